"""The jobs of the billion-parameter lab, at sizes that follow from the prediction for a card: a DDP
baseline that the card cannot hold, the same model sharded, one that DDP could never hold, then
checkpointed, then offloaded; and one job on 1, 2, ... GPUs. And the seconds of a job's step on a
node, by the planner's `training_run`, in the four parts that the table and the chart show."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from labs.checks.comparison import config_of
from labs.fsdp.memory_limits import predicted_peak_of, search
from labs.predictions.code_bases import PYTORCH_EAGER, CodeBase
from labs.predictions.hardware import GPU
from labs.predictions.memory.parameters import shape_of
from labs.predictions.plans import job as plans
from labs.predictions.plans.job import Job, Plan
from labs.predictions.step_time.constants import Constants
from labs.predictions.step_time.parts import parts_of
from labs.predictions.step_time.training_run import TrainingRun
from labs.training import models, strategies
from labs.training.memory_categories import Memory
from labs.training.presets import Preset, preset
from labs.words import counted

USABLE = 0.9  # of a card: the rest is CUDA's context, NCCL's buffers and what lies between tensors
# So that a step takes seconds, and the search ends where a card is far too large.
MOST_SEQUENCES = {"small": 128, "larger": 8}
MOST_LAYERS = 128


@dataclass(frozen=True)
class NodeJob:
    """One row: a strategy that trains a preset's GPT-2. formula, recipe, checkpointing: what
    `predict` of labs.predictions.memory calls it. offload: its shards live in the host's memory."""

    name: str
    strategy: Callable
    size: Preset
    formula: str = "fsdp2"
    recipe: str = "fp32"
    checkpointing: str = "none"
    offload: bool = False

    @property
    def parameters(self) -> int:
        """Ψ of its model."""
        return self.size.parameters


def jobs_for(card: GPU, ranks: int, chosen: dict[str, Callable]) -> list[NodeJob]:
    """Returns the rows before those of scaling. chosen: strategies by name, as the arguments of
    `billion_parameters`."""
    small = first_that_ddp_cannot_hold(card, replace(preset("billion"), ranks=ranks))
    large = never_held_by_ddp(card, replace(preset("larger"), ranks=ranks))
    return [NodeJob("DDP", strategies.ddp, small, "ddp"), NodeJob("FSDP", chosen["shard"], small),
            NodeJob("FSDP1", chosen["fsdp1"], small, "fsdp1"),
            NodeJob("FSDP, bf16", chosen["mixed"], small, recipe="bf16 policy"),
            NodeJob("larger, FSDP", chosen["shard"], large),
            NodeJob("… + checkpointing", chosen["checkpointed"], large, checkpointing="full"),
            NodeJob("… + CPU offload", Checkpointing(chosen["offloaded"]), large,
                checkpointing="full", offload=True)]


def scaling_jobs(ranks: int, checkpointed: Callable) -> list[NodeJob]:
    """Returns one job on 1, 2, 4, ... GPUs of the node, with as many tokens on each."""
    counts = sorted({*(2**n for n in range(ranks.bit_length()) if 2**n <= ranks), ranks})
    return [NodeJob(f"checkpointed, {counted(count, 'GPU')}", checkpointed,
                replace(preset("billion"), ranks=count), checkpointing="full")
            for count in counts]


@dataclass(frozen=True)
class Checkpointing:
    """A strategy: the given one, and each block is computed again in backward."""

    strategy: Callable

    def __call__(self, model: nn.Module, optimizer_class, **settings) -> tuple:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        blocks = models.blocks(model)
        for number, block in enumerate(blocks):
            blocks[number] = checkpoint_wrapper(block)
        return self.strategy(model, optimizer_class, **settings)


def first_that_ddp_cannot_hold(card: GPU, size: Preset) -> Preset:
    """Returns the preset with the smallest batch whose tensors alone are more than the card has
    under DDP. FSDP holds it, unless the card is too small for a billion parameters."""
    def holds(batch):
        job = NodeJob("DDP", strategies.ddp, replace(size, batch=batch), "ddp")
        return batch < MOST_SEQUENCES["small"] and predicted_peak(job).total <= card.usable

    # One more than the largest batch that DDP holds.
    return replace(size, batch=1 + search(holds, size.batch)[0])


def never_held_by_ddp(card: GPU, size: Preset) -> Preset:
    """Returns the preset with so many layers that parameters, gradients and optimizer state in fp32
    are more than the card has, whatever the batch; and with the largest batch that FSDP holds, of 8
    at most."""
    one, two = (replace(size, layers=n).parameters for n in (1, 2))
    layers = min(MOST_LAYERS, 1 + math.ceil((1.02 * card.usable / 16 - one) / (two - one)))

    def holds(batch):
        peak = predicted_peak(NodeJob("FSDP", strategies.fsdp2,
                                  replace(size, layers=layers, batch=batch)))
        return batch <= MOST_SEQUENCES["larger"] and peak.total <= USABLE * card.usable

    return replace(size, layers=layers, batch=max(1, search(holds, size.batch)[0]))


def predicted_peak(job: NodeJob, device: str = "cuda") -> Memory:
    """Returns the memory of one rank at the peak of a step, under NCCL."""
    size = job.size
    if job.offload:  # no shard is on the device, as if they were divided among very many ranks
        size = replace(size, ranks=min(256, size.hidden))
    return predicted_peak_of(size, strategy=job.formula, recipe=job.recipe,
                             checkpointing=job.checkpointing, device=device, backend="nccl")


@dataclass(frozen=True)
class Node:
    """GPUs that share a host. code: what trains, with its constants of the step-time model: by
    default plain PyTorch, as this notebook does."""

    card: GPU
    code: CodeBase = PYTORCH_EAGER

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s of the host's memory, of all ranks together."""
        return self.card.generation.host_bandwidth

    @property
    def constants(self) -> Constants:
        """Of the step-time model."""
        return self.code.constants


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, one after the other. communication: of collectives, what computing does
    not hide, and by how much it slows down what does. host: copies that nothing hides, AdamW on
    the host, and the wait for the host to start kernels. copied: bytes over PCIe, of one rank,
    whether they are hidden or not."""

    computing: float
    communication: float
    optimizer: float
    host: float
    copied: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.by_name().values())

    def by_name(self) -> dict[str, float]:
        """Name of a part, as charts show it -> seconds."""
        return {"computing": self.computing, "exposed": self.communication,
                "optimizer": self.optimizer, "host": self.host}


def planned(job: NodeJob, node: Node) -> tuple[Job, Plan]:
    """Returns the job and its plan as `scripts/plan` takes them. Products of fp32 are in TF32."""
    size, ranks = job.size, job.size.ranks
    plan = Plan(ranks, sharding="DDP" if job.formula == "ddp" else "FSDP", micro_batch=size.batch,
                recompute=job.checkpointing, offload=job.offload)
    # The ranks of a job that leaves GPUs idle share all of the host's memory bandwidth.
    return Job(job.name, shape_of(config_of(size)), size.context, ranks * size.batch, node.card,
               ranks, ranks, job.recipe, code=node.code), plan


def training_run(job: NodeJob, node: Node) -> TrainingRun:
    """Returns the job as the step-time model takes it."""
    return plans.training_run(*planned(job, node))


def step_seconds(job: NodeJob, node: Node) -> StepSeconds:
    """Returns what a step of the job takes on the node."""
    run = training_run(job, node)
    seconds = dict.fromkeys(("computing", "communication", "optimizer", "host"), 0.0)
    for part in parts_of(run, node.constants):
        name = ("optimizer" if part.name == "optimizer" and not job.offload else
                "host" if part.cause in ("host", "launch") else
                "computing" if part.beside is None else "communication")
        seconds[name] += part.exposed(node.constants)
    return StepSeconds(**seconds, copied=copied_bytes(run))


def copied_bytes(run: TrainingRun) -> float:
    """Returns the bytes that offload moves over PCIe in a step and rank: a layer's shard for each
    of two gathers, the root's for one, and the gradients of both back. All in fp32."""
    layers = run.layers * run.layer_parameters
    return run.offload * 4 / run.shards * (3 * layers + 2 * run.embedding_parameters)


def communication_seconds(job: NodeJob, node: Node) -> float:
    """Returns the seconds of all collectives of a step, hidden or not."""
    return sum(part.seconds for part in parts_of(training_run(job, node), node.constants)
               if part.beside is not None and part.cause != "host")
