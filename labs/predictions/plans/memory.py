"""Bytes of one rank of a job that is spread over data, tensor, pipeline and context ranks.

Sources: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022
(arXiv 2205.05198), sections 4.2 and 4.3; Narayanan et al., SC 2021 (arXiv 2104.04473), section 2.2,
on micro-batches in flight; Rajbhandari et al., "ZeRO", SC 2020, section 5; Grattafiori et al., 2024
(arXiv 2407.21783), section 3.3.2, on what is not resharded.
"""

import functools
from dataclasses import replace

from labs.predictions import hardware
from labs.predictions.memory.activations import korthikanti
from labs.predictions.memory.parameters import block_size
from labs.predictions.pipelines.formulas import KINDS
from labs.predictions.plans.experts import (
    dispatched_bytes,
    expert_optimizer_shards,
    expert_shards,
    layer_experts,
    rank_experts,
)
from labs.predictions.plans.job import Job, Plan, norm_parameters

_GATHERING = 4  # tensor-parallel ranks up to which `Kept.steady` holds

PARTS = ("parameters", "gradients", "optimizer state", "gathered parameters",
         "unsharded gradients", "activations", "logits", "buffers")


def stage_parameters(job: Job, plan: Plan, stage: int) -> float:
    """Parameters that one tensor-parallel rank of a pipeline stage has: its layers, the embedding
    on the first stage, the final norm and the head on the last, without the experts. Norms are
    replicated."""
    norms = norm_parameters(job)
    layer = (job.layer_parameters - layer_experts(job) - norms) / plan.tensor + norms
    if dense := _dense_layers(job, plan, stage):
        # what such a block has in place of router and shared expert
        other = block_size(job.shape, job.shape.dense_blocks[0])
        more = other - (job.layer_parameters - layer_experts(job))
        layer += dense / plan.layers(job, stage) * more / plan.tensor
    # A tied matrix is there once on a single stage; in a pipeline the last stage has a copy.
    ends = (stage == 0) + (stage == plan.pipeline - 1) * (plan.pipeline > 1 or not job.shape.tied)
    # The final norm is one of the two that a layer has.
    return (plan.layers(job, stage) * layer + ends * job.embedding_parameters / plan.tensor
            + (stage == plan.pipeline - 1) * norms / 2)


def stage_experts(job: Job, plan: Plan, stage: int) -> float:
    """Parameters of the experts that one rank of a pipeline stage computes with."""
    layers = plan.layers(job, stage) - _dense_layers(job, plan, stage)
    return layers * rank_experts(job, plan)


def _dense_layers(job, plan, stage) -> int:
    """Layers without experts of a stage, in a model that has others with them; where stages are
    interleaved, as if each had consecutive layers."""
    if not job.shape.is_mixture or not job.shape.dense_blocks:
        return 0
    first = sum(plan.layers(job, before) for before in range(stage))
    own = range(first, first + plan.layers(job, stage))
    return sum(block in own for block in job.shape.dense_blocks)


def in_flight(plan: Plan, job: Job, stage: int) -> float:
    """Micro-batches whose activations a stage stores at its peak. Under 1F1B those that it has sent
    on and whose gradients have not come back, p − stage of them, or all if there are fewer. Of
    interleaved chunks it counts each as 1/v; under ZB-H1 every stage stores as many as the
    first."""
    kind = KINDS["1F1B-I" if plan.chunks > 1 else plan.schedule]
    return kind.peak(plan.pipeline, plan.micro_batches(job), plan.chunks, stage) / plan.chunks


def layer_activations(job: Job, plan: Plan) -> float:
    """Bytes that one layer saves for the backward of one micro-batch, on one rank. With fused
    kernels each tensor is saved once: of a Llama's block in 16 bits the inputs and outputs of two
    norms, queries, keys, values and attention's output, and the gate, its partner and their
    product, 2·(6h + 2·kv + 3·ffn) bytes a token. An unfused block saves more: 28 copies of the
    residual stream, 56·h bytes, were measured with transformers (stas00/ml-engineering,
    training/performance/README.md @744d01e).
    A layer with experts saves the MLP's tensors for each expert that a token uses, and
    `dispatched_bytes` on top."""
    shape, tokens, kept = job.shape, job.sequence // plan.context, job.code.kept
    if plan.recompute == "full":
        return 2 * plan.micro_batch * tokens * shape.hidden / plan.tensor
    sent = dispatched_bytes(job, plan)
    if kept.hidden:
        mlp = kept.plain_mlp if shape.mlp_matrices == 2 and kept.plain_mlp else kept.mlp
        own = (kept.hidden * shape.hidden + kept.key * shape.key
               + mlp * shape.active_ffn) / plan.tensor
        whole = kept.gathered * shape.hidden * (plan.tensor > 1) * (plan.pipeline == 1)
        return 2 * plan.micro_batch * tokens * (own + whole) + sent
    if shape.mlp_matrices == 2:
        scores = "selective" if job.flash else plan.recompute
        layer = korthikanti(plan.micro_batch, tokens, shape.hidden, shape.heads,
                            tensor_parallel=plan.tensor, recompute=scores,
                            sequence_parallel=plan.sequence_parallel)
        if not shape.is_mixture:
            return layer
        # theirs has an MLP of 4h, of which GELU's input and output are saved
        other = 2 * (shape.active_ffn - 4 * shape.hidden)
        return layer + 2 * plan.micro_batch * tokens * other / plan.tensor + sent
    widths = 6 * shape.hidden + 2 * shape.key + 3 * shape.active_ffn
    return 2 * plan.micro_batch * tokens * widths / plan.tensor + sent


def rank_memory(job: Job, plan: Plan, stage: int = 0) -> dict[str, float]:
    """Part -> bytes of one rank of a pipeline stage, at the peak of a step: PARTS.

    States are divided as the plan's sharding says: the optimizer's over all data-parallel and
    context-parallel ranks from ZeRO-1 on, gradients too from ZeRO-2 on, parameters too under
    FSDP (under HSDP all over a node's); those of a rank's experts over the ranks that have the same
    experts. Under FSDP a stage of a pipeline gathers its parameters
    once for all micro-batches, and adds up the unsharded gradients of a chunk until its
    micro-batches are done; without a pipeline two layers are gathered, and one layer's gradients
    are unsharded. Raises ValueError where there is no such stage.
    """
    if not 0 <= stage < plan.pipeline:
        raise ValueError(f"no stage {stage}: the plan has stages 0 to {plan.pipeline - 1}")
    own, experts = stage_parameters(job, plan, stage), stage_experts(job, plan, stage)
    recipe = job.bytes_per_parameter
    parameters = own / plan.shards(job) + experts / expert_shards(job, plan)
    optimized = (own / plan.optimizer_shards(job)
                 + experts / expert_optimizer_shards(job, plan))
    reduced = optimized if plan.sharding == "ZeRO-2" else parameters
    own += experts
    is_last, kept = stage == plan.pipeline - 1, job.code.kept
    # (tokens of a micro-batch, vocabulary / tensor), in elements
    logits = plan.micro_batch * job.sequence / plan.context * job.shape.vocabulary / plan.tensor
    on_gpu = not plan.offload
    found = {"parameters": on_gpu * recipe.parameters * parameters,
            "gradients": on_gpu * job.trained * recipe.gradients * reduced,
            "optimizer state": on_gpu * job.trained * recipe.optimizer_state * optimized,
            "gathered parameters": recipe.compute * (
                own if plan.sharding == "FSDP, no resharding" else _unsharded(job, plan, own, 2)),
            "unsharded gradients": job.trained * recipe.gradients
                                   * _unsharded(job, plan, own / plan.chunks, 1),
            "activations": plan.layers(job, stage) * layer_activations(job, plan)
                           * in_flight(plan, job, stage) + _recomputed_experts(job, plan),
            "logits": is_last * logits * (
                job.logit_bytes + kept.held * (plan.micro_batches(job) > 1)),
            "buffers": kept.fixed + _buffers(job, plan, stage)}
    # a pipeline has several micro-batches at several moments at once
    return _at_peak(job, plan, found, own) if kept.is_phased and plan.pipeline == 1 else found


def _at_peak(job, plan, parts, own) -> dict[str, float]:
    """The parts of the moment that holds most: when the loss is computed, when a recomputed layer
    is, when the last gradients are reduced, or when AdamW takes the root of all second moments at
    once (torch.optim's foreach)."""
    kept, recipe, is_sharded = job.code.kept, job.bytes_per_parameter, plan.shards(job) > 1
    layer = _layer(job, plan) * recipe.compute
    ends = (1 if job.shape.tied else 2) * job.embedding_parameters / plan.tensor * recipe.compute
    root = kept.root * ends
    # DDP keeps a copy of all gradients in buckets; ZeRO-2 reduces a layer's, FSDP gathers it too
    buckets = 0 if is_sharded or plan.gpus == 1 else parts["gradients"]
    if plan.sharding == "ZeRO-2":
        buckets = 2 * _layer(job, plan) * recipe.gradients
    gathered = own * recipe.compute if plan.sharding == "FSDP, no resharding" else 0.0
    whole = parts | {"buffers": parts["buffers"] + buckets, "unsharded gradients": 0.0,
                     "gathered parameters": (gathered or kept.layers * layer + root) * is_sharded}
    before = whole | {"gradients": parts["gradients"] * (plan.micro_batches(job) > 1)}
    if plan.recompute == "full":
        one = layer_activations(job, replace(plan, recompute="none"))
        moments = [before | {"gathered parameters":
                             (gathered or 2 * layer + root) * is_sharded},
                   whole | {"activations": parts["activations"] + one, "logits": 0.0}]
    else:
        # what another kind of loss has there is not known
        late = 0.0 if job.loss else kept.backward / kept.logit
        moments = [before | {"logits": parts["logits"] * (1 + late)}]
    nothing = {"activations": 0.0, "logits": 0.0}
    moments.append(whole | nothing | {"gathered parameters": kept.reduced * ends * is_sharded})
    moments.append(whole | nothing | {
        "gathered parameters": root * is_sharded,
        "buffers": whole["buffers"] + parts["optimizer state"] / (
            3 if recipe.optimizer_state == 12 else 2)})
    return max(moments, key=lambda moment: sum(moment.values()))


def _buffers(job, plan, stage) -> float:
    """Bytes of the residual stream that tensor-parallel ranks hold whole: of one layer, and in a
    pipeline that is full of each layer of the stage."""
    kept, tokens = job.code.kept, plan.micro_batch * job.sequence / plan.context
    if plan.tensor == 1:
        return 0.0
    is_steady = 1 < plan.pipeline < plan.micro_batches(job) and plan.tensor <= _GATHERING
    copies = kept.buffers + is_steady * kept.steady * plan.layers(job, stage)
    return 2 * copies * tokens * job.shape.hidden


def _unsharded(job, plan, own, layers) -> float:
    """Parameters that are unsharded under FSDP: `own` in a pipeline, else those of some layers."""
    if not plan.is_fsdp:
        return 0.0
    return own if plan.pipeline > 1 else layers * _layer(job, plan)


def _layer(job, plan) -> float:
    """Parameters of one layer that a rank computes with, unsharded."""
    return (job.layer_parameters - layer_experts(job)) / plan.tensor + rank_experts(job, plan)


def _recomputed_experts(job, plan) -> float:
    """Bytes of one layer with experts while it is recomputed. Those of a dense layer are part of
    what was fitted as `Kept.fixed`, but where phases are told apart."""
    if not job.shape.is_mixture or plan.recompute != "full" or job.code.kept.is_phased:
        return 0.0
    return layer_activations(job, replace(plan, recompute="none"))


def largest_rank(job: Job, plan: Plan) -> tuple[int, dict[str, float]]:
    """(stage, parts) of the rank that holds most: of the first stage, which has the embedding, of
    the last, which has the head, or of the second, because no stage between them has more layers or
    more micro-batches in flight."""
    stages = [(stage, rank_memory(job, plan, stage)) for stage in _largest_stages(plan)]
    return max(stages, key=lambda found: sum(found[1].values()))


def _largest_stages(plan) -> list[int]:
    return sorted({0, min(1, plan.pipeline - 1), plan.pipeline - 1})


@functools.cache  # a search asks for tens of thousands of plans, and a notebook searches thrice
def fits(job: Job, plan: Plan) -> bool:
    """Whether the largest rank and what CUDA and NCCL take fit on the job's GPU."""
    return all(hardware.fits(sum(rank_memory(job, plan, stage).values()), job.gpu, job.gpus)
               for stage in _largest_stages(plan))
