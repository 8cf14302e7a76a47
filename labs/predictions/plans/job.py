"""A job, which is a model, a batch and a cluster; and a plan, which spreads it over the GPUs."""

from dataclasses import dataclass
from math import prod
from numbers import Integral

from labs.predictions.code_bases import PYTORCH, CodeBase
from labs.predictions.hardware import GPU
from labs.predictions.memory.parameters import block_size, norms_size
from labs.predictions.memory.recipes import Recipe, recipe_of
from labs.predictions.memory.shape import Shape
from labs.predictions.plans.experts import (
    expert_copies,
    expert_optimizer_shards,
    expert_shards,
    expert_tensor,
    impossible_experts,
    is_sent,
    layer_experts,
    rank_experts,
)
from labs.predictions.plans.stages import STAGES, layers_by_cost
from labs.predictions.step_time.constants import FITTED
from labs.predictions.step_time.training_run import TrainingRun

SHARDING = ("DDP", "ZeRO-1", "FSDP", "HSDP")
DATA_PARALLEL_ONLY = ("ZeRO-2", "FSDP, no resharding")
"""Further ways to shard, which only plans without other dimensions have and no search lists. ZeRO-2
sends as much as ZeRO-1; without resharding FSDP gathers its parameters once for each micro-batch,
and keeps them until its backward."""
RECOMPUTE = ("none", "selective", "full")
SCHEDULES = ("1F1B", "ZB-H1")
LOSSES = {"eager": 12.0, "in place": 6.0, "chunked": 0.6}
"""Kind of loss -> bytes for each logit of a micro-batch at its peak. eager: fp32 logits, their
log-softmax and its gradient. in place: 16-bit logits, and an fp32 softmax that becomes the gradient
(Megatron-LM, core/tensor_parallel/cross_entropy.py). chunked: with the head, in pieces that are not
kept (prime-rl's: 2,048 of 151,936 words at a time, in which it holds 46 bytes a logit)."""


@dataclass(frozen=True)
class Job:
    """shape: of the model. batch: sequences of one optimizer step, on all GPUs together. sequence:
    tokens. recipe: bytes of states for each parameter; None: the code base's. flash: whether
    attention's scores are never written to memory. code: the code base that trains. loss:
    one of LOSSES; "": as the code base does. lora: rank of the matrices that are trained beside
    frozen ones, on every product of a layer; 0: all is trained.
    adapters: network cards of a node, which its GPUs share; adapter: bytes/s of one, 0 means the
    usual one. 8 cards for 8 GPUs is what DGX A100 and DGX H100 have, and what
    Llama 3's 400 Gbit/s for each GPU are."""

    name: str
    shape: Shape
    sequence: int
    batch: int
    gpu: GPU
    gpus: int
    gpus_per_node: int = 8
    recipe: str | Recipe | None = None
    flash: bool = True
    adapters: int = 8
    adapter: float = 0
    code: CodeBase = PYTORCH
    loss: str = ""
    lora: int = 0

    @property
    def logit_bytes(self) -> float:
        """For each logit of a micro-batch at the peak of the loss."""
        return LOSSES[self.loss] if self.loss else self.code.kept.logit

    @property
    def trained(self) -> float:
        """Share of a layer's parameters that have a gradient: 1, or with LoRA that of its matrices,
        of rank · (inputs + outputs) numbers for each product (Hu et al., "LoRA", 2021, arXiv
        2106.09685, section 4.1)."""
        if not self.lora:
            return 1.0
        shape = self.shape
        attention = (shape.hidden + shape.query, 2 * (shape.hidden + shape.key),
                     shape.query + shape.hidden)
        mlp = shape.mlp_matrices * (shape.hidden + shape.active_ffn)
        return self.lora * (sum(attention) + mlp) / self.layer_parameters

    @property
    def network(self) -> float:
        """Bytes/s to other nodes for each GPU when all of a node send at once."""
        adapter = self.adapter or self.gpu.generation.network
        return adapter * self.adapters / self.gpus_per_node

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer block."""
        return block_size(self.shape)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding, and as many of the head: tied ones are copied to the last
        stage of a pipeline."""
        return self.shape.vocabulary * self.shape.hidden

    @property
    def bytes_per_parameter(self) -> Recipe:
        """What each parameter keeps: parameters, gradients, optimizer_state, in bytes."""
        return recipe_of(self.recipe or self.code.recipe)

    def __str__(self):
        return (f"{self.name}, sequences of {self.sequence:,} tokens, {self.batch:,} a step, on "
                f"{self.gpus:,} × {self.gpu.name}")


@dataclass(frozen=True)
class Plan:
    """Sizes of the dimensions, and what is done with the states of data-parallel ranks.

    data: replicas that get different sequences. sharding: one of SHARDING or DATA_PARALLEL_ONLY;
    shards are cut over data and context ranks together, under HSDP over those of a node.
    micro_batch: sequences that a replica computes at a time. recompute: one of RECOMPUTE. chunks:
    stages of a pipeline rank, interleaved where there are more than one. schedule: one of
    SCHEDULES. offload: whether shards, gradients and optimizer state are in the host's memory,
    where AdamW runs; under FSDP alone.
    sequence_parallel: whether tensor-parallel ranks cut norms and residual stream too. stages: of a
    pipeline, layers of each; or one of STAGES; "": as the code base does. Context parallelism
    gathers keys and values before attention (Grattafiori et al., 2024, section 3.3.2).
    expert: ranks, of the data-parallel and context-parallel ones, over which the experts of a layer
    are divided. expert_tensor: tensor-parallel ranks of an expert; 0: as many as `tensor`.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sharding: str = "ZeRO-1"
    micro_batch: int = 1
    recompute: str = "selective"
    chunks: int = 1
    schedule: str = "1F1B"
    sequence_parallel: bool = True
    stages: str | tuple[int, ...] = ""
    offload: bool = False
    expert: int = 1
    expert_tensor: int = 0

    @property
    def gpus(self) -> int:
        """GPUs that the plan uses: the product of its dimensions."""
        return prod((self.data, self.tensor, self.pipeline, self.context))

    def micro_batches(self, job: Job) -> int:
        """Micro-batches of a step on each replica."""
        return job.batch // (self.data * self.micro_batch)

    @property
    def is_fsdp(self) -> bool:
        """Whether parameters are sharded, and gathered when they are needed."""
        return self.sharding in ("FSDP", "HSDP", "FSDP, no resharding")

    @property
    def is_data_parallel(self) -> bool:
        """Whether it has no other dimension than data."""
        return self.tensor == self.pipeline == self.context == self.expert == 1

    def shards(self, job: Job) -> int:
        """Ranks that parameters are cut over; 1 under DDP, ZeRO-1 and ZeRO-2."""
        ranks = self.data * self.context
        if self.sharding == "HSDP":
            return max(1, min(ranks, job.gpus_per_node // self.tensor))
        return ranks if self.is_fsdp else 1

    def optimizer_shards(self, job: Job) -> int:
        """Ranks that the optimizer state is cut over."""
        sharded = self.sharding in ("ZeRO-1", "ZeRO-2")
        return self.data * self.context if sharded else self.shards(job)

    def reduce_rounds(self, job: Job) -> int:
        """How often a step reduces its sharded gradients in a pipeline: once, but where ranks
        interleave stages once for each group of micro-batches that a stage computes in a row, so
        that only one stage's gradients are unsharded."""
        return self.micro_batches(job) // self.pipeline if self.chunks > 1 else 1

    def stage_layers(self, job: Job) -> tuple[int, ...]:
        """Layers of each pipeline stage, where they are listed or cut by cost; else empty."""
        kind = self.stages or job.code.stages
        if not isinstance(kind, str):
            return tuple(kind)
        if kind == "equal" or self.pipeline == 1:
            return ()
        return layers_by_cost(job.shape.layers, job.layer_parameters, job.embedding_parameters,
                              self.pipeline)

    def layers(self, job: Job, stage: int) -> int:
        """Layers of a pipeline stage. Where equal stages do not divide the layers, the first and
        the last have one fewer, as Llama 3's (Grattafiori et al., 2024, arXiv 2407.21783, section
        3.3.2)."""
        if stages := self.stage_layers(job):
            return stages[stage]
        if job.shape.layers % self.pipeline == 0:
            return job.shape.layers // self.pipeline
        return (job.shape.layers + 2) // self.pipeline - (stage in (0, self.pipeline - 1))

    def __str__(self):
        sizes = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "DP": self.data}
        words = [" × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)]
        if self.pipeline > 1:
            words += [f"{self.chunks} chunks"] * (self.chunks > 1)
            words += [self.schedule] * (self.schedule != "1F1B")
        words += [f"EP {self.expert}"] * (self.expert > 1)
        words += [f"expert-TP {self.expert_tensor}"] * (self.expert_tensor > 0)
        return ", ".join([*words, self.sharding, f"micro-batch {self.micro_batch}",
                          f"recompute {self.recompute}"])


def impossible(job: Job, plan: Plan) -> str:
    """Why the plan cannot be run, in one sentence; empty if it can."""
    shape = job.shape
    for name in ("data", "tensor", "pipeline", "context", "micro_batch", "chunks",
                 "expert"):
        size = getattr(plan, name)
        # a search asks of a million sizes, and `Integral` takes ten times as long to ask for
        if type(size) is not int and not isinstance(size, Integral) or size < 1:
            return f"{name.replace('_', '-')} {size!r}: a whole number from 1 on is needed"
    if plan.gpus != job.gpus:
        return (f"data {plan.data} × tensor {plan.tensor} × pipeline {plan.pipeline} × context "
                f"{plan.context} is {plan.gpus:,} GPUs, the job has {job.gpus:,}")
    if reason := _impossible_stages(job, plan):
        return reason
    if plan.offload and (plan.sharding != "FSDP" or plan.pipeline > 1):
        return "offload to the host belongs to FSDP without a pipeline"
    if job.loss and job.loss not in LOSSES:
        return f"no loss {job.loss!r}: choose {', '.join(LOSSES)}"
    # Of a sequence each context rank takes two chunks, one from either end, so that causal
    # attention is equally long on all (Grattafiori et al., 2024, section 3.3.2).
    for size, what, count in ((plan.tensor, "query heads", shape.heads),
                              (plan.tensor, "key and value heads", shape.kv_heads),
                              (plan.tensor, "elements of the MLP", shape.ffn),
                              (2 * plan.context if plan.context > 1 else 1, "tokens of a sequence",
                               job.sequence),
                              (plan.data * plan.micro_batch, "sequences of a step", job.batch)):
        if count % size:
            return f"{count:,} {what} cannot be divided by {size:,}"
    if shape.positions and job.sequence > shape.positions:
        return (f"sequences of {job.sequence:,} tokens: {job.name} has learned positions for only "
                f"{shape.positions:,}")
    for name, values in (("sharding", (*SHARDING, *DATA_PARALLEL_ONLY)), ("recompute", RECOMPUTE),
                         ("schedule", SCHEDULES)):
        if getattr(plan, name) not in values:
            return f"no {name} {getattr(plan, name)!r}: choose {', '.join(values)}"
    return (impossible_experts(job, plan) or _not_alone(job, plan)
            or _illegal_schedule(job, plan))


def _not_alone(job, plan) -> str:
    """Why there is no such way to shard in this plan; empty if there is."""
    if plan.sharding not in DATA_PARALLEL_ONLY:
        return ""
    if not plan.is_data_parallel:
        kinds = "tensor, pipeline and context" if plan.expert == 1 else "expert"
        return f"{plan.sharding} belongs to plans without {kinds} parallelism"
    if plan.sharding == "ZeRO-2" and plan.micro_batches(job) > 1:
        return (f"ZeRO-2 would reduce its gradients after each of {plan.micro_batches(job):,} "
                "micro-batches, which is not modelled: take ZeRO-1 or FSDP, or one micro-batch")
    return ""


def _impossible_stages(job, plan) -> str:
    """Why the layers cannot be cut into the plan's stages; empty if they can."""
    layers, kind = job.shape.layers, plan.stages or job.code.stages
    if not isinstance(kind, str):
        if len(kind) != plan.pipeline or sum(kind) != layers or min(kind, default=0) < 0:
            return (f"stages {', '.join(map(str, kind))}: {layers} layers on {plan.pipeline} "
                    "pipeline ranks are needed, one number for each rank")
        return ""
    if kind not in STAGES:
        return f"no stages {kind!r}: choose {', '.join(STAGES)} or list the layers of each"
    if kind == "equal" and layers % plan.pipeline and (layers + 2) % plan.pipeline:
        return (f"{layers} layers cannot be divided by {plan.pipeline}, nor can "
                f"{layers + 2}, with the embedding and the head in a layer's place")
    if kind == "by cost" and plan.pipeline > layers:
        return f"{layers} layers cannot be cut over {plan.pipeline} pipeline ranks"
    return ""


def _illegal_schedule(job, plan) -> str:
    """Why the plan's schedule cannot be run, or has no closed form here; empty if it can."""
    if plan.pipeline == 1 and (plan.chunks > 1 or plan.schedule != "1F1B"):
        return "chunks and schedules belong to a pipeline, and this plan has one pipeline rank"
    if plan.chunks == 1:
        return ""
    if plan.schedule != "1F1B":
        return f"{plan.schedule} with {plan.chunks} chunks: this schedule has one stage on a rank"
    places = max(plan.layers(job, stage) for stage in range(plan.pipeline))
    if places % plan.chunks:
        return f"{places} layers of a pipeline rank cannot be divided by {plan.chunks} chunks"
    # Narayanan et al., SC 2021, section 2.2: a chunk's micro-batches come in groups of p
    if plan.micro_batches(job) % plan.pipeline:
        return (f"{plan.micro_batches(job)} micro-batches cannot be divided by {plan.pipeline} "
                "pipeline ranks, as an interleaved schedule needs")
    return ""


def training_run(job: Job, plan: Plan) -> TrainingRun:
    """The run as the model of step time takes it. Raises ValueError if the plan cannot be run."""
    if reason := impossible(job, plan):
        raise ValueError(reason)
    shape, recipe = job.shape, job.bytes_per_parameter
    # a stage of a pipeline does not reshard after forward, so it gathers once (Llama 3 does so)
    stage = 3 if plan.pipeline == 1 and plan.sharding != "FSDP, no resharding" else 2
    return TrainingRun(
        layers=shape.layers, hidden=shape.hidden, ffn=shape.active_ffn, heads=shape.heads,
        kv_hidden=shape.key, query=shape.query, vocabulary=shape.vocabulary,
        mlp_matrices=shape.mlp_matrices, sequence=job.sequence,
        micro_batch=plan.micro_batch, accumulation=plan.micro_batches(job), gpu=job.gpu,
        gpus=job.gpus, gpus_per_node=job.gpus_per_node,
        network=job.network, tensor=plan.tensor,
        sequence_parallel=plan.sequence_parallel and plan.tensor > 1,
        pipeline=plan.pipeline, chunks=plan.chunks, context=plan.context,
        sharding=stage if plan.is_fsdp else 0, shards=plan.shards(job), recompute=plan.recompute,
        param_bytes=recipe.compute, fp32=recipe.compute == 4,
        flash=job.code.flash if job.flash else 0, fused=job.code.fused,
        loss_bytes=job.code.loss_bytes, early_stop=job.code.early_stop,
        reduce_overlaps=plan.pipeline == 1 and not job.code.overheads.gradient_share,
        stages=plan.stage_layers(job), overheads=job.code.overheads,
        # FITTED took the rows with ZeRO-1 for DDP, which sends as many numbers
        optimizer_shards=(plan.optimizer_shards(job) if plan.sharding in ("ZeRO-1", "ZeRO-2")
                          and job.code.constants is not FITTED else 0),
        context_overlaps=False, zero_bubble=plan.schedule == "ZB-H1",
        reduce_rounds=plan.reduce_rounds(job), offload=plan.offload, trained=job.trained,
        stored=job.layer_parameters - is_sent(plan) * layer_experts(job) if shape.is_mixture else 0,
        active_experts=shape.active_experts * shape.is_mixture, latent=shape.latent,
        **_experts(job, plan) if is_sent(plan) else {},
        host_bandwidth=job.gpu.generation.host_bandwidth / job.gpus_per_node)


def _experts(job, plan) -> dict:
    """What the model of step time must know of experts that are not where tensor parallelism alone
    puts them."""
    return {"expert": plan.expert, "expert_tensor": expert_tensor(plan),
            "expert_weights": rank_experts(job, plan),
            "expert_copies": expert_copies(plan), "expert_shards": expert_shards(job, plan),
            "expert_optimizer_shards": expert_optimizer_shards(job, plan)}


def norm_parameters(job: Job) -> int:
    """Parameters of a layer's two norms, which tensor parallelism does not cut."""
    return norms_size(job.shape)
