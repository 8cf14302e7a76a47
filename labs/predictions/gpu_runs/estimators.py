"""What others would say of the same rows, each asked as its users would ask it.

Each takes a job and a plan, and gives seconds of a step or bytes of a rank, or None where it does
not claim to know such a job.
"""

from dataclasses import replace

from labs.predictions.code_bases import Kept
from labs.predictions.plans.job import Job, Plan, training_run
from labs.predictions.plans.memory import rank_memory, stage_parameters
from labs.predictions.step_time import step_time
from labs.predictions.step_time.constants import FITTED, Overheads
from labs.predictions.step_time.efficiency import gpt_flops_per_token

MFU = 0.4


def constant_mfu(job: Job, plan: Plan) -> float:
    """FLOPs of the model at 40 % of the GPUs' peak."""
    tokens = job.batch * job.sequence
    own = gpt_flops_per_token(job.shape.layers, job.shape.hidden, job.shape.vocabulary,
                              job.sequence)
    return tokens * own / (job.gpus * job.gpu.flops * MFU)


def kernels_and_bytes(job: Job, plan: Plan) -> float:
    """Our model without a host, with constants of published runs alone."""
    plain = replace(job, code=replace(job.code, overheads=Overheads(), constants=FITTED))
    return step_time(training_run(plain, plan)).total


def states(job: Job, plan: Plan, stage: int) -> float:
    """Parameters, gradients and optimizer state of a rank, 18 bytes a parameter divided as ZeRO
    divides them, and nothing else."""
    own = stage_parameters(job, plan, stage)
    shards = plan.data * plan.context
    if plan.sharding == "FSDP":
        return 18 * own / shards
    return 6 * own + 12 * own / (shards if plan.sharding == "ZeRO-1" else 1)


def closed_form(job: Job, plan: Plan, stage: int) -> float:
    """18 bytes a parameter, activations of fused kernels and 12 bytes a logit, whatever the code
    base does."""
    plain = replace(job, recipe="megatron", code=replace(job.code, kept=Kept()))
    return sum(rank_memory(plain, plan, stage).values())


SECONDS = {"kernels and bytes alone": kernels_and_bytes, "a constant MFU of 40 %": constant_mfu}
MEMORY = {"closed form": closed_form, "states alone": states}
"""Name -> estimator."""
