"""What notebook 07b draws of plans: the memory of each stage, and the fastest plan of each kind."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.patches import Patch

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_named
from labs.exercises.verdicts import Wrong, kind_of, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.pipeline_parallel.checks.rank_memory import PARTS
from labs.pipeline_parallel.dimensions.published_meshes import LLAMA_3_STEPS
from labs.predictions.hardware import overhead
from labs.predictions.plans.job import Job, Plan
from labs.predictions.plans.known_jobs import JOBS
from labs.predictions.plans.memory import fits, largest_rank
from labs.predictions.plans.search import plans, step_seconds

COLOURS = {**palette.MEMORY, "logits": palette.MEMORY["buffers"]}
GB = 1e9


@shows("7.24")
def show_stages(rank_memory_of: Callable, job: Job, plan: Plan) -> Picture:
    """Draws the bytes of one rank of each pipeline stage, by the student's function, in parts, and
    what the GPU has."""
    parts = [require_named(rank_memory_of(job, plan, stage), PARTS, f"stage {stage}")
             for stage in range(plan.pipeline)]
    figure, ax = canvas(WIDTH, 3.6 + marks.NOTE_LINE)
    bottoms = [0.0] * plan.pipeline
    for name in PARTS:
        heights = [found[name] / GB for found in parts]
        ax.bar(range(plan.pipeline), heights, 0.72, bottoms, color=COLOURS[name])
        bottoms = [low + high for low, high in zip(bottoms, heights, strict=True)]
    for stage, total in enumerate(bottoms):
        ax.text(stage, total, f"{total:.1f}", ha="center", va="bottom", fontsize=9)
    limit = (job.gpu.usable - overhead(job.gpus)) / GB
    if limit < 3 * max(bottoms):
        ax.axhline(limit, color=palette.RANK_FAILED, linewidth=1)
    handles = [Patch(color=COLOURS[name], label=name) for name in PARTS]
    if (guess := guessed("7.24")) is not None:
        handles.append(ax.hlines(guess, -0.5, 0.5, color=palette.GUESSED, linestyle=(0, (3, 2)),
                                 label="your guess for stage 0"))
    ax.set(xlabel="pipeline stage", ylabel="GB of a rank", xticks=range(plan.pipeline))
    ax.margins(y=0.12)
    marks.legend_above(figure, handles)
    marks.note_below(figure, f"{job}:\n{plan}. Each GPU has room for {limit:.1f} GB.")
    words = [f"stage {stage}: {total:.1f} GB, of them " + ", ".join(
        f"{name} {found[name] / GB:.1f}" for name in PARTS)
        for stage, (total, found) in enumerate(zip(bottoms, parts, strict=True))]
    return Picture(figure, "\n".join(words), data=parts)


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
