"""Exercise 7.25: the fastest way to spread a job over its GPUs, of those that fit and have given
settings."""

from collections.abc import Callable, Iterable

from labs.checks.generator import new_generator, unless_graded
from labs.checks.guesses import guessed
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import marks
from labs.pictures.tables import Table
from labs.pipeline_parallel.published_meshes import LLAMA_3, LLAMA_3_STEPS, llama_3_seconds
from labs.predictions import hardware
from labs.predictions.hardware import gpu, overhead
from labs.predictions.memory.parameters import Shape
from labs.predictions.plans import search
from labs.predictions.plans.job import Job, Plan, impossible
from labs.predictions.plans.known_jobs import JOBS
from labs.predictions.plans.memory import fits, largest_rank
from labs.predictions.plans.search import step_parts, step_seconds
from labs.predictions.step_time.published_runs import error_percent

SLOWER = 1.05  # a plan as good as the fastest: what the model of step time cannot tell apart
GB = 1e9


# (name of a job, settings): a size, a name, several at once, and some with which nothing fits
CASES = (*((name, {}) for name in JOBS),
         ("GPT-1.3B", {"sharding": "FSDP"}), ("Llama-3-70B on 32", {"tensor": 1}),
         ("Llama-3-8B, long", {"context": 4, "recompute": "none"}),
         ("GPT-175B", {"tensor": 1, "pipeline": 1, "sharding": "DDP"}),
         ("GPT-175B on 64", {"schedule": "1F1B", "chunks": 1}))


def drawn_jobs() -> list[tuple[Job, dict]]:
    """(job, settings) of drawn sizes, others at each call, that no table lists: small ones, because
    a search through their plans takes a tenth of a second."""
    rng, found = new_generator(), []
    for settings in ({}, {"recompute": rng.choice(("none", "full"))}):
        heads, gpus = 8 * rng.randint(3, 6), rng.choice((8, 16))
        shape = Shape("llama", 128 * heads, rng.choice((10, 14, 15, 20, 21)), heads, 8, 128,
                      1024 * rng.randint(8, 20), 128 * rng.randint(250, 1000))
        found.append((Job("a job of drawn sizes", shape, 1024 * rng.choice((1, 2)),
                          gpus * rng.choice((8, 12, 16)), gpu(rng.choice(("A100-80", "H100"))),
                          gpus), settings))
    return found


@check("7.25", hints={"empty": "No plan fits this job, so there is no shortest step: return None."})
def check_choose_plan(choose_plan: Callable):
    """choose_plan(job, **settings) -> a Plan with these settings that fits and whose step is at
    most 5 % longer than the shortest; None where none fits."""
    worst = 1.0
    known = [(JOBS[name], settings) for name, settings in CASES]
    for job, settings in [*known, *drawn_jobs()]:
        got = choose_plan(job, **settings)
        try:
            ratio = _judge(got, job, settings)
        except Wrong as error:
            if not settings:
                raise
            raise error.said_of(f"choose_plan(job, {_arguments(settings)})") from None
        if job.name in JOBS:  # the verdict has no number of a drawn job
            worst = max(worst, ratio)
    return (f"right for {len(JOBS)} jobs, up to 405B parameters on 16,384 GPUs, and for given "
            f"settings: all plans fit, and none is more than {worst - 1:.1%} slower than the "
            "fastest")


def _arguments(settings) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _judge(got, job: Job, settings) -> float:
    """How many times as long as the shortest step that of the plan takes."""
    want = search.fastest(job, **settings)
    if got is None or want is None:
        return _judge_none(got, want, job, settings)
    if not isinstance(got, Plan):
        raise Wrong(f"{job}: choose_plan returned {kind_of(got)}, not a lab.Plan or None",
                    code="wrong_type")
    if reason := impossible(job, got):
        raise Wrong(f"{job}: {got} cannot be run: {reason}",
                    "Choose among lab.plans(job): all of them can be run.",
                    code="impossible_plan")
    _judge_settings(got, job, settings)
    # Memory before time: a plan that does not fit can be faster than all that do.
    _judge_memory(got, job)
    # The invariant is in seconds, not in sizes: several plans are within 5 % of the fastest, which
    # is more than the model of step time can tell apart.
    took, shortest = (search.step_seconds(job, plan) for plan in (got, want))
    if took > SLOWER * shortest:
        raise Wrong(f"{job}: {got} takes {took:.3g} s a step; {unless_graded(want)} takes "
                    f"{shortest:.3g} s and fits, too{unless_graded(_difference(got, want))}",
                    "No rule of thumb is right for all jobs: compare the seconds of all plans that "
                    "fit.", code="slower_choice")
    return took / shortest


def _judge_settings(got, job, settings):
    # What is asked for is not the fastest plan but the fastest of these: else the table below would
    # say of each dimension that it gains nothing.
    for name, value in settings.items():
        if getattr(got, name) != value:
            raise Wrong(f"{job}: {got} has {name} {getattr(got, name)!r}, not {value!r}",
                        "Only plans whose attributes all have the values of `settings` count.",
                        code="setting_ignored")


def _judge_none(got, want, job, settings) -> float:
    if got is None and want is not None:
        raise Wrong(f"{job}: you say that nothing fits, but {unless_graded(want)} does, with "
                    f"{_held(job, want) / GB:.1f} GB on the largest rank",
                    "Have you tried recomputation, a smaller micro-batch, more stages?",
                    code="nothing_returned")
    if got is not None:
        if not isinstance(got, Plan):
            raise Wrong(f"{job}: choose_plan returned {kind_of(got)}, not a lab.Plan or None",
                        code="wrong_type")
        if not impossible(job, got):
            _judge_settings(got, job, settings)
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


def _only(*dimensions: str, **settings) -> dict:
    """Settings of plain 1F1B with no other dimension than data and those that are named."""
    others = {"tensor", "pipeline", "context", "chunks"}.difference(dimensions)
    return {**dict.fromkeys(others, 1), "schedule": "1F1B", **settings}


# Plans that a rule of thumb would name -> their settings; the fastest of several counts.
KINDS = {"DDP": (_only(sharding="DDP"), _only(sharding="ZeRO-1")),
         "FSDP": (_only(sharding="FSDP"),), "HSDP": (_only(sharding="HSDP"),),
         "and TP": (_only("tensor"),), "and PP": (_only("tensor", "pipeline"),),
         "and CP": (_only("tensor", "pipeline", "context"),), "and chunks, ZB": ({},)}


@shows("7.25")
def show_plans(choose_plan: Callable) -> Table:
    """Returns a table of jobs: seconds of a step by the plan that the student's function chooses of
    each kind, and its plan of all."""
    rows, replica = [], ""
    for job in JOBS.values():
        chosen = {kind: [plan for each in settings if (plan := choose_plan(job, **each))]
                  for kind, settings in KINDS.items()}
        for plan in (plan for plans in chosen.values() for plan in plans):
            if not isinstance(plan, Plan):
                raise Wrong(f"{job}: choose_plan returned {kind_of(plan)}, not a lab.Plan or None",
                            code="wrong_type")
        best = [min((step_seconds(job, plan) for plan in plans), default=None)
                for plans in chosen.values()]
        [of_all] = chosen["and chunks, ZB"] or [None]
        rows.append((f"{job.name}, {job.gpus:,} × {job.gpu.name}",
                     *("–" if took is None else marks.format_number(took) for took in best),
                     str(of_all).split(", micro")[0] if of_all else "nothing fits"))
        if of_all and job.name == "Llama-3-405B":
            replica = of_all.gpus // of_all.data
    guess = guessed("7.25")
    return Table("seconds of a step by your choice of each kind",
                 ("job", *KINDS, "your plan"), rows,
                 note="– : no plan of this kind fits. DDP: with ZeRO-1, too. Each column from "
                      "“and TP” on allows one thing more than the one before it; the last, "
                      "interleaved chunks and ZB-H1."
                      + (replica and f" {marks.answered(guess, replica, 'GPUs')}"))


@shows("Costs of plans")
def show_plan_costs(job: Job, plans: Iterable[Plan]) -> Table:
    """Returns a table of the plans: predicted seconds of a step, two of its causes, and the bytes
    of the largest rank."""
    rows = []
    for plan in plans:
        parts = step_parts(job, plan)
        # FSDP gathers and reduces in `sharding`, DDP and ZeRO-1 in `all_reduce`.
        rows.append((str(plan), f"{parts.total:.2f}", f"{parts.all_reduce + parts.sharding:.2f}",
                     f"{parts.bubble:.2f}", f"{_held(job, plan) / GB:.1f}",
                     "yes" if fits(job, plan) else "no"))
    return Table(f"{job}", ("plan", "s of a step", "exposed data-parallel, s",
                            "bubble, s", "GB of the largest rank", "fits"), rows)


@shows("7.25")
def show_published_plans(choose_plan: Callable) -> Table:
    """Returns a table of Llama 3's published steps: the seconds that the model of step time
    predicts for the published plan, those that follow from its TFLOP/s if these count all or half
    of attention, and the student's choice."""
    rows = []
    for row, step in zip(LLAMA_3, LLAMA_3_STEPS, strict=True):
        memory = sum(largest_rank(step.job, step.plan)[1].values()) / GB
        chosen = choose_plan(step.job)
        ours = "nothing fits" if chosen is None else (
            f"{_short(chosen)}: {step_seconds(step.job, chosen):.2f} s")
        rows.append((f"{step.job.gpus:,}, {step.job.sequence:,} tokens", _short(step.plan), ours,
                     f"{step.predicted:.2f}", *(_published(row, step, share) for share in (1, 0.5)),
                     f"{memory:.1f}" + " (fits)" * fits(step.job, step.plan)))
    job = LLAMA_3_STEPS[0].job
    return Table("Llama 3 405B: the published plans and yours",
                 ("GPUs", "published plan", "your plan", "predicted s",
                  "published s (error), all of attention", "published s (error), half of attention",
                  "GB predicted"), rows, left=2,
                 note="Published seconds: from the TFLOP/s, if they count all or half of "
                      "attention. 8 chunks follow from the report's section 3.3.2; none of these "
                      "steps was fitted to. An "
                      f"{job.gpu.name} has room for "
                      f"{(job.gpu.usable - overhead(job.gpus)) / GB:.1f} GB.")


def _published(row, step, attention) -> str:
    """The published seconds if the TFLOP/s count this share of attention, and the error then."""
    seconds = llama_3_seconds(row, attention)
    return f"{seconds:.2f} ({error_percent(step.predicted, seconds):+.1f} %)"


def _short(plan) -> str:
    """The plan without its micro-batch."""
    return str(plan).replace(f", micro-batch {plan.micro_batch}", "").replace(
        ", recompute none", "")
