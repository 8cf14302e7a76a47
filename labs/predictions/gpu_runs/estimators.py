"""What others would say of the same rows, each asked as its users would ask it.

Those in closed form are here. The packages that can be installed are asked by
`scripts/bench gpu-runs`, which passes them to `compare`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from labs.predictions.code_bases import Kept
from labs.predictions.memory.parameters import active_count, block_size, norm_size
from labs.predictions.plans.experts import expert_copies
from labs.predictions.plans.job import Job, Plan, training_run
from labs.predictions.plans.memory import rank_memory, stage_experts, stage_parameters
from labs.predictions.step_time import step_time
from labs.predictions.step_time.constants import FITTED, Overheads
from labs.predictions.step_time.efficiency import flops_per_token, gpt_flops_per_token

MFU = 0.4


@dataclass(frozen=True)
class Estimator:
    """quantity: "seconds" of a step, or "memory", bytes of a rank. of: (job, plan, pipeline stage
    of the rank) -> the quantity, or None where the estimator does not claim to know such a job.
    refuses: in a few words, which jobs those are."""

    name: str
    quantity: str
    of: Callable[[Job, Plan, int], float | None]
    refuses: str = ""


def constant_mfu(job: Job, plan: Plan, stage: int = 0) -> float:
    """FLOPs of the model at 40 % of the GPUs' peak."""
    tokens, shape = job.batch * job.sequence, job.shape
    if shape.is_mixture:
        return tokens * flops_per_token(active_count(shape), shape.layers, shape.hidden,
                                        job.sequence) / (job.gpus * job.gpu.flops * MFU)
    own = gpt_flops_per_token(job.shape.layers, job.shape.hidden, job.shape.vocabulary,
                              job.sequence)
    return tokens * own / (job.gpus * job.gpu.flops * MFU)


def kernels_and_bytes(job: Job, plan: Plan, stage: int = 0) -> float:
    """Our model without a host, with constants of published runs alone."""
    plain = replace(job, code=replace(job.code, overheads=Overheads(), constants=FITTED))
    return step_time(training_run(plain, plan)).total


def states(job: Job, plan: Plan, stage: int) -> float:
    """Parameters, gradients and optimizer state of a rank, 18 bytes a parameter divided as ZeRO
    divides them, and nothing else."""
    found = 0.0
    for own, shards in ((stage_parameters(job, plan, stage), plan.data * plan.context),
                        (stage_experts(job, plan, stage), expert_copies(plan))):
        if plan.sharding == "FSDP":
            found += 18 * own / shards
        else:
            found += 6 * own + 12 * own / (shards if plan.sharding == "ZeRO-1" else 1)
    return found


def closed_form(job: Job, plan: Plan, stage: int) -> float:
    """18 bytes a parameter, activations of fused kernels and 12 bytes a logit, whatever the code
    base does."""
    plain = replace(job, recipe="megatron", code=replace(job.code, kept=Kept()))
    return sum(rank_memory(plain, plan, stage).values())


def megatron_theoretical(job: Job, plan: Plan, stage: int) -> float | None:
    """What Megatron-LM prints as its theoretical memory: the states of the rank that has most
    parameters, 18 bytes each, or 6 + 12 / data-parallel ranks with the distributed optimizer, and
    the activations of the pipeline's first stage.

    It counts activations as Korthikanti et al., 2022 (arXiv 2205.05198), table 2, does, where
    sequence parallelism is on and attention's scores are not kept; else 10 + 24 / TP bytes for each
    element of the residual stream, and 5 % more. None for experts, other stages, FSDP, context
    parallelism, full recomputation and schedules other than 1F1B, of which there is no term here.
    Source: https://github.com/NVIDIA/Megatron-LM, megatron/training/theoretical_memory_usage.py
    @00caa53, `report_theoretical_memory`.
    """
    if (stage or job.shape.is_mixture or plan.sharding not in ("DDP", "ZeRO-1") or plan.context > 1
            or plan.recompute == "full" or plan.schedule != "1F1B"):
        return None
    of_optimizer = 12 / (plan.data if plan.sharding == "ZeRO-1" else 1)
    return (6 + of_optimizer) * _megatron_parameters(job, plan) + _megatron_activations(job, plan)


def _megatron_parameters(job, plan) -> float:
    """Of the rank with most: an equal share of the layers and of the final norm, and an embedding;
    without a pipeline the head too."""
    shape = replace(job.shape, qkv_bias=False, out_bias=False, mlp_bias=False)
    layers = shape.layers * block_size(shape) + norm_size(shape)
    ends = 2 if plan.pipeline == 1 and not shape.tied else 1
    return (layers / plan.pipeline + ends * shape.vocabulary * shape.hidden) / plan.tensor


def _megatron_activations(job, plan) -> float:
    """Bytes on the first stage. A pipeline's first stage has p micro-batches of layers / p in
    flight, as much as one micro-batch of all layers."""
    shape, tokens = job.shape, job.sequence * plan.micro_batch
    # Megatron-LM turns sequence parallelism off on one tensor-parallel rank
    is_sharded = (plan.sequence_parallel and plan.tensor > 1
                  and (job.flash or plan.recompute == "selective"))
    layer = (18 * shape.hidden + 4 * shape.ffn if is_sharded
             else (10 + 24 / plan.tensor) * shape.hidden)
    # the words' numbers, 8 bytes each, and the mask of the embedding's dropout
    total = tokens * (shape.layers * layer + plan.pipeline * (8 + shape.hidden))
    if plan.chunks > 1:
        total *= 1 + (plan.pipeline - 1) / (plan.pipeline * plan.chunks)
    else:
        total *= min(1, plan.micro_batches(job) / plan.pipeline)
    if plan.pipeline == 1 and is_sharded:
        total += 4 * tokens * (shape.hidden + shape.vocabulary)
    elif plan.pipeline == 1:
        total += 2 * tokens * (shape.hidden + shape.vocabulary / plan.tensor)
    return total / plan.tensor if is_sharded else 1.05 * total


ESTIMATORS = (
    Estimator("kernels and bytes alone", "seconds", kernels_and_bytes),
    Estimator("a constant MFU of 40 %", "seconds", constant_mfu),
    Estimator("closed form", "memory", closed_form),
    Estimator("states alone", "memory", states),
    Estimator("Megatron-LM's formula", "memory", megatron_theoretical,
              "a pipeline's later stages, experts, FSDP, context parallelism, full recomputation"))
