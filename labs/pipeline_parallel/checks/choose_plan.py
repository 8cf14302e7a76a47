"""Exercise 7.25: the fastest way to spread a job over its GPUs, of those that fit."""

import functools
from collections.abc import Callable

from labs.exercises.verdicts import Wrong, check, kind_of
from labs.predictions import hardware
from labs.predictions.plans import search
from labs.predictions.plans.job import Job, Plan, impossible
from labs.predictions.plans.known_jobs import JOBS
from labs.predictions.plans.memory import fits, largest_rank

SLOWER = 1.05  # a plan as good as the fastest: what the model of step time cannot tell apart
GB = 1e9


@functools.cache
def fastest(name: str) -> Plan | None:
    """The fastest plan of a job of JOBS that fits; None where none does."""
    return search.fastest(JOBS[name])


@check("7.25")
def check_choose_plan(choose_plan: Callable):
    """choose_plan(job) -> a Plan that fits and whose step is at most 5 % longer than the shortest;
    None where none fits."""
    worst = 1.0
    for name, job in JOBS.items():
        worst = max(worst, _judge(choose_plan(job), name, job))
    return (f"right for {len(JOBS)} jobs, up to 405B parameters on 16,384 GPUs: all plans fit, and "
            f"none is more than {worst - 1:.1%} slower than the fastest")


def _judge(got, name, job: Job) -> float:
    """How many times as long as the shortest step that of the plan takes."""
    want = fastest(name)
    if got is None or want is None:
        return _judge_none(got, want, job)
    if not isinstance(got, Plan):
        raise Wrong(f"{job}: choose_plan returned {kind_of(got)}, not a lab.Plan or None",
                    code="wrong_type")
    if reason := impossible(job, got):
        raise Wrong(f"{job}: {got} cannot be run: {reason}",
                    "lab.impossible(job, plan) says why a plan cannot be run.",
                    code="impossible_plan")
    _judge_memory(got, job)
    took, shortest = (search.step_seconds(job, plan) for plan in (got, want))
    if took > SLOWER * shortest:
        raise Wrong(f"{job}: {got} takes {took:.3g} s a step; {want} takes {shortest:.3g} s and "
                    f"fits, too{_difference(got, want)}",
                    "No rule of thumb is right for all jobs: compare the seconds of all plans that "
                    "fit.", code="slower_choice")
    return took / shortest


def _judge_none(got, want, job) -> float:
    if got is None and want is not None:
        raise Wrong(f"{job}: you say that nothing fits, but {want} does, with "
                    f"{_held(job, want) / GB:.1f} GB on the largest rank",
                    "Have you tried recomputation, a smaller micro-batch, more stages?",
                    code="nothing_returned")
    if got is not None:
        if not isinstance(got, Plan):
            raise Wrong(f"{job}: choose_plan returned {kind_of(got)}, not a lab.Plan or None",
                        code="wrong_type")
        _judge_memory(got, job)
        raise Wrong(f"{job}: {got} cannot be run: {impossible(job, got)}", code="impossible_plan")
    return 1.0


def _judge_memory(plan, job):
    if impossible(job, plan) or fits(job, plan):
        return
    stage, parts = largest_rank(job, plan)
    largest = max(parts, key=parts.get)
    raise Wrong(f"{job}: {plan} does not fit: a rank of stage {stage} holds "
                f"{sum(parts.values()) / GB:.1f} GB, {parts[largest] / GB:.1f} of them {largest}, "
                f"and each {job.gpu.name} has {job.gpu.usable / GB:.1f} GB, of which CUDA and NCCL "
                f"take {hardware.overhead(job.gpus) / GB:.1f}",
                "lab.fits(job, plan) says whether the largest rank fits.", code="does_not_fit")


def _held(job, plan) -> float:
    return sum(largest_rank(job, plan)[1].values())


def _difference(got, want) -> str:
    """The one setting in which two plans differ, if it is only one."""
    others = [name for name, value in vars(want).items() if getattr(got, name) != value]
    return f"; only {others[0].replace('_', ' ')} differs" if len(others) == 1 else ""
