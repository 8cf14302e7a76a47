"""Exercise 7.25: the fastest way to spread a job over its GPUs, of those that fit."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from labs.checks.guesses import guessed
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import marks
from labs.pictures.tables import Table
from labs.pipeline_parallel.published_meshes import LLAMA_3_STEPS
from labs.predictions import hardware
from labs.predictions.hardware import overhead
from labs.predictions.plans import search
from labs.predictions.plans.job import Job, Plan, impossible
from labs.predictions.plans.known_jobs import JOBS
from labs.predictions.plans.memory import fits, largest_rank
from labs.predictions.plans.search import plans, step_parts, step_seconds

SLOWER = 1.05  # a plan as good as the fastest: what the model of step time cannot tell apart
GB = 1e9


@functools.cache
def fastest(name: str) -> Plan | None:
    """The fastest plan of a job of JOBS that fits; None where none does."""
    return search.fastest(JOBS[name])


@check("7.25", hints={"empty": "No plan fits this job, so there is no shortest step: return None."})
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
                    "Choose among lab.plans(job): all of them can be run.",
                    code="impossible_plan")
    # Memory before time: a plan that does not fit can be faster than all that do.
    _judge_memory(got, job)
    # The invariant is in seconds, not in sizes: several plans are within 5 % of the fastest, which
    # is more than the model of step time can tell apart.
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


@dataclass(frozen=True)
class Kind:
    """Plans that a rule of thumb would name. allows(plan): whether a plan is one of them."""

    name: str
    allows: Callable[[Plan], bool]


def _only(**sizes) -> Callable[[Plan], bool]:
    """Whether a plan is plain 1F1B, with no other dimension than data and those that are named."""
    return lambda plan: plan.schedule == "1F1B" and all(
        getattr(plan, name) == 1 or name in sizes
        for name in ("tensor", "pipeline", "context", "chunks"))


KINDS = (Kind("DDP", lambda plan: _only()(plan) and plan.sharding in ("DDP", "ZeRO-1")),
         Kind("FSDP", lambda plan: _only()(plan) and plan.sharding == "FSDP"),
         Kind("HSDP", lambda plan: _only()(plan) and plan.sharding == "HSDP"),
         Kind("and TP", _only(tensor=1)), Kind("and PP", _only(tensor=1, pipeline=1)),
         Kind("and CP", _only(tensor=1, pipeline=1, context=1)),
         Kind("and chunks, ZB", lambda plan: True))


@shows("7.25")
def show_plans(choose_plan: Callable) -> Table:
    """Returns a table of jobs: seconds of a step by the fastest plan of each kind that fits, and
    the plan that the student's function chooses."""
    rows = []
    for job in JOBS.values():
        chosen = choose_plan(job)
        if chosen is not None and not isinstance(chosen, Plan):
            raise Wrong(f"{job}: choose_plan returned {kind_of(chosen)}, not a lab.Plan or None",
                        code="wrong_type")
        seconds = [(kind, step_seconds(job, plan)) for plan in plans(job) if fits(job, plan)
                   for kind in KINDS if kind.allows(plan)]
        best = [min((took for each, took in seconds if each is kind), default=None)
                for kind in KINDS]
        rows.append((f"{job.name}, {job.gpus:,} × {job.gpu.name}",
                     *("–" if took is None else marks.format_number(took) for took in best),
                     str(chosen).split(", micro")[0] if chosen else "nothing fits"))
    guess = guessed("7.25")
    return Table("seconds of a step by the fastest plan of each kind that fits",
                 ("job", *(kind.name for kind in KINDS), "your plan"), rows,
                 note="– : no plan of this kind fits. DDP: with ZeRO-1, too. Each column from "
                      "“and TP” on allows one thing more than the one before it; the last, "
                      "interleaved chunks and ZB-H1."
                      + ("" if guess is None else f" Your guess: {guess:g} GPUs of a replica."))


@shows("Costs of plans")
def show_plan_costs(job: Job, plans: Iterable[Plan]) -> Table:
    """Returns a table of the plans: predicted seconds of a step, two of its causes, and the bytes
    of the largest rank."""
    rows = []
    for plan in plans:
        parts = step_parts(job, plan)
        rows.append((str(plan), f"{parts.total:.2f}", f"{parts.all_reduce:.2f}",
                     f"{parts.bubble:.2f}", f"{_held(job, plan) / GB:.1f}",
                     "yes" if fits(job, plan) else "no"))
    return Table(f"{job}", ("plan", "s of a step", "all-reduce, s", "bubble, s",
                            "GB of the largest rank", "fits"), rows)


@shows("7.25")
def show_published_plans(choose_plan: Callable) -> Table:
    """Returns a table of Llama 3's published steps: the seconds that follow from its TFLOP/s, those
    that the model of step time predicts for the published plan, and the student's choice."""
    rows = []
    for step in LLAMA_3_STEPS:
        memory = sum(largest_rank(step.job, step.plan)[1].values()) / GB
        chosen = choose_plan(step.job)
        ours = "nothing fits" if chosen is None else (
            f"{_short(chosen)}: {step_seconds(step.job, chosen):.2f} s")
        rows.append((f"{step.job.gpus:,}, {step.job.sequence:,} tokens", _short(step.plan), ours,
                     f"{step.seconds:.2f}", f"{step.predicted:.2f}", f"{step.error:+.1f} %",
                     f"{memory:.1f}" + " (fits)" * fits(step.job, step.plan)))
    job = LLAMA_3_STEPS[0].job
    return Table("Llama 3 405B: the published plans and yours",
                 ("GPUs", "published plan", "your plan", "published s", "predicted s", "error",
                  "GB predicted"), rows, left=2,
                 note="Published seconds: from TFLOP/s that count attention. 8 chunks follow from "
                      "the report's section 3.3.2; none of these steps was fitted to. An "
                      f"{job.gpu.name} has room for "
                      f"{(job.gpu.usable - overhead(job.gpus)) / GB:.1f} GB.")


def _short(plan) -> str:
    """The plan without its micro-batch."""
    return str(plan).replace(f", micro-batch {plan.micro_batch}", "").replace(
        ", recompute none", "")
