"""A plan's memory where every tensor of one rank can be counted: `labs.predictions.memory.predict`.

It is known for PyTorch without compilation and data parallelism alone; elsewhere the closed form of
`labs.predictions.plans.memory` answers, which is within 10 % of it.
"""

import functools

from labs.predictions.code_bases import PYTORCH_EAGER
from labs.predictions.memory.parameters import shape_of
from labs.predictions.plans.job import Job, Plan
from labs.training.memory_categories import Memory

_STRATEGIES = {"DDP": dict(strategy="ddp"), "ZeRO-1": dict(strategy="zero1"),
               "ZeRO-2": dict(strategy="zero2"), "FSDP": dict(strategy="fsdp2"),
               "FSDP, no resharding": dict(strategy="fsdp2", reshard=False)}


def is_countable(job: Job, plan: Plan) -> bool:
    """Whether this kind of job and plan can be counted. Its model may still have no configuration
    from which a step can be recorded: then `counted_memory` returns None."""
    recipe = job.bytes_per_parameter
    return (job.code.name == PYTORCH_EAGER.name and plan.is_data_parallel
            and plan.sharding in _STRATEGIES and not plan.offload and job.flash
            and not job.loss and not job.lora and (plan.is_fsdp or not recipe.mixed))


@functools.cache  # a picture asks for one plan's memory several times
def counted_memory(job: Job, plan: Plan) -> Memory | None:
    """Bytes of one rank at the peak of a step, every tensor counted; None where only the closed
    form answers. The first of a kind takes some seconds: torch is imported and a step recorded.

    A step of several micro-batches is at its peak in the last one, when the gradients of the
    earlier ones are there: shards under FSDP, which reduces after each (torch's default, and what
    the model of a step's seconds counts); under DDP unsharded ones.
    """
    if not is_countable(job, plan):
        return None
    from labs.predictions.memory.predict import predict
    from labs.predictions.plans.models import config_named

    # one GPU alone is not wrapped in DDP, so it has no buckets
    is_plain = plan.gpus == 1 and not plan.is_fsdp
    chosen = dict(strategy="plain") if is_plain else _STRATEGIES[plan.sharding]
    try:
        config = config_named(job.name)
        if shape_of(config) != job.shape:
            return None
        return predict(config, batch=plan.micro_batch, sequence=job.sequence, ranks=plan.data,
                       recipe=job.bytes_per_parameter, checkpointing=plan.recompute, device="cuda",
                       accumulation="sync" if plan.micro_batches(job) > 1 else "none",
                       **chosen)["peak"]
    except ValueError:  # no such model, or one that cannot be recorded
        return None
