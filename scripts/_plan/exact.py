"""A dry run of a proposed plan: every tensor of one rank, without a GPU (--exact)."""

from labs.predictions.plans.models import config_named
from labs.training.memory_categories import GB

_STRATEGIES = {"DDP": "ddp", "FSDP": "fsdp2"}
_PRECISIONS = {"fp32": "fp32", "bf16": "bf16", "bf16 policy": "mixed"}
_CHECKPOINTING = {"none": "none", "full": "full"}


def sentence(answer) -> str:
    """What a dry run of the answer's plan says, or why there is none."""
    job, plan = answer.job, answer.plan
    recipe = job.bytes_per_parameter.name
    if plan.gpus != plan.data or plan.sharding not in _STRATEGIES:
        return "none: it follows DDP and FSDP alone"
    if recipe not in _PRECISIONS or plan.recompute not in _CHECKPOINTING or job.lora:
        return f"none: it follows {', '.join(_PRECISIONS)}, recompute none or full, without LoRA"
    if plan.offload:
        return "none: it does not follow what moves to the host"
    from labs.predictions.dryrun import dry_run

    run = dry_run(config_named(job.name), ranks=job.gpus, strategy=_STRATEGIES[plan.sharding],
                  batch=plan.micro_batch, sequence=job.sequence, precision=_PRECISIONS[recipe],
                  checkpointing=_CHECKPOINTING[plan.recompute], threads=1, backend="nccl")
    return (f"{run.peak.total / GB:.1f} GB of one rank at its peak, from {run.traced} of "
            f"{run.layers} layers with fake tensors in {run.seconds:.0f} s")
