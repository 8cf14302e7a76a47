"""What training a mixture takes by the planner, and how far the planner is from published runs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matplotlib.lines import Line2D

from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.predictions.code_bases import MEGATRON_CORE
from labs.predictions.gpu_runs.folder import load
from labs.predictions.gpu_runs.run import GpuRun
from labs.predictions.gpu_runs.scoreboard import predicted_memory, predicted_seconds
from labs.predictions.hardware import gpu
from labs.predictions.plans.answer import Answer
from labs.predictions.plans.job import Job, Plan, impossible
from labs.predictions.plans.memory import fits
from labs.predictions.plans.models import shape_named
from labs.predictions.plans.search import fastest, step_seconds
from labs.words import counted

GB, SEQUENCE, TOKENS = 1e9, 4096, 4 * 2**20  # tokens of a step
_GPUS = {"Mixtral-8x7B": (64, 512), "Qwen3-30B-A3B": (64, 512), "DeepSeek-V3": (512, 2048)}
_EXPERT = (8, 64)  # sizes to try: within a node, and DeepSeek-V3's
# Of what the search lists: without context parallelism, which 4,096 tokens do not need, and with
# plain 1F1B, because that is what FSDP and expert parallelism are published with.
_PLAIN = dict(context=1, chunks=1, schedule="1F1B")


def job_of(model: str, gpus: int, tokens: int = TOKENS) -> Job:
    """A step of so many tokens of a mixture by Megatron-Core, on H100s."""
    return Job(model, shape_named(model), SEQUENCE, tokens // SEQUENCE, gpu("H100"), gpus,
               code=MEGATRON_CORE)


def best_plan(job: Job, expert: int) -> Plan | None:
    """The fastest plan that fits with this expert-parallel size; None where none fits."""
    listed = [fastest(job, expert=expert, **_PLAIN), *_of_uneven_stages(job, expert)]
    fitting = [plan for plan in listed if plan and fits(job, plan)]
    return min(fitting, key=lambda plan: step_seconds(job, plan), default=None)


def _of_uneven_stages(job, expert) -> Iterator[Plan]:
    """Plans of 8 and 16 pipeline stages for a model whose layers these do not divide, which the
    search leaves out: DeepSeek-V3 has 61."""
    for pipeline in (8, 16):
        if job.shape.layers % pipeline:
            for sharding in ("ZeRO-1", "FSDP"):
                for recompute in ("none", "full"):
                    plan = Plan(job.gpus // pipeline, pipeline=pipeline, sharding=sharding,
                                recompute=recompute, expert=expert,
                                stages=_stages(job.shape.layers, pipeline))
                    if not impossible(job, plan):
                        yield plan


def _stages(layers, pipeline) -> tuple[int, ...]:
    """Layers of each stage, of which none has more than one above another's; the last have fewer,
    because the head is there."""
    return tuple((layers + pipeline - 1 - stage) // pipeline for stage in range(pipeline))


@shows("What it takes")
def show_plans() -> Table:
    """Returns a table of three mixtures on 64 to 2,048 H100s: the fastest plan that fits with
    expert parallelism and the fastest without it, and what they take."""
    rows, answer = [], ""
    for model, sizes in _GPUS.items():
        for gpus in sizes:
            job = job_of(model, gpus)
            usable = [size for size in _EXPERT if job.shape.experts % size == 0]
            with_experts = [plan for size in usable if (plan := best_plan(job, size))]
            divided = min(with_experts, key=lambda plan: step_seconds(job, plan), default=None)
            for named, plan in ((f"{model}, {gpus:,}", divided), ("without EP", best_plan(job, 1))):
                rows.append((named, *_taken(job, plan)))
            if model == "DeepSeek-V3" and divided:
                answer = marks.answered(guessed("9.9b"), step_seconds(job, divided), "s")
    return Table("the fastest plan that fits, with expert parallelism and without",
                 ("model, H100s", "plan", "GB", "s of a step", "80 % interval", "tokens/s, GPU",
                  "MFU"), rows, left=1,
                 note=f"A step is {TOKENS // 2**20} · 2²⁰ tokens in sequences of {SEQUENCE:,}, "
                      "trained by Megatron-Core in BF16. Of pipelines plain 1F1B. The interval "
                      "is that of measured runs with experts, on 8 to 128 GPUs: beyond that "
                      f"nothing was measured. {answer}".strip())


def _taken(job, plan) -> tuple[str, ...]:
    if plan is None:
        return ("nothing fits", *["–"] * 5)
    found = Answer(job, plan, counts_tensors=False)
    low, high = found.seconds_factors.of(found.seconds.total)
    words = str(plan).replace(", recompute none", "").replace("recompute full", "recomputed")
    return (words, f"{found.largest[1] / GB:.0f}", f"{found.seconds.total:.1f}",
            f"{low:.1f} to {high:.1f}", f"{found.tokens_per_s / job.gpus:,.0f}", f"{found.mfu:.0%}")


# --- published runs -------------------------------------------------------------------------------

DEEPSEEK_HOURS, DEEPSEEK_TOKENS, DEEPSEEK_GPUS = 2.664e6, 14.8e12, 2048
"""Of pre-training on H800s: DeepSeek-AI, "DeepSeek-V3", 2024 (arXiv 2412.19437), section 1, table
1. A step has 15,360 sequences of 4,096 tokens, and the plan is PP 16, EP 64, ZeRO-1 (sections 3.2
and 4.2)."""
DEEPSEEK = job_of("DeepSeek-V3", DEEPSEEK_GPUS, 15360 * SEQUENCE)
DEEPSEEK_PLAN = Plan(128, pipeline=16, expert=64, sharding="ZeRO-1", recompute="full",
                     stages=_stages(61, 16))


def deepseek_seconds() -> float:
    """Of a step, from the published GPU hours."""
    all_gpus = 3600 * DEEPSEEK_HOURS / DEEPSEEK_GPUS
    return all_gpus * DEEPSEEK.batch * SEQUENCE / DEEPSEEK_TOKENS


_KINDS = {"Megatron-LM's tests, 8 GPUs": (palette.RUNS[1], "o"),
          "Mixtral-8x7B, Megatron-LM": (palette.RUNS[2], "s"),
          "Qwen3-30B-A3B, prime-rl": (palette.RUNS[3], "^")}


@dataclass(frozen=True)
class Compared:
    """A published run. kind: one of _KINDS. measured, predicted: seconds of a step, or bytes."""

    kind: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, in percent off."""
        return 100 * (self.predicted / self.measured - 1)


def compared_runs(quantity: str) -> list[Compared]:
    """All runs with experts of labs/predictions/gpu_runs/rows of which this was measured.
    quantity: "seconds" or "memory"."""
    predict = {"seconds": predicted_seconds, "memory": predicted_memory}[quantity]
    return [Compared(_kind(run), getattr(run, quantity), predict(run)) for run in load()
            if run.job and run.job.shape.is_mixture and getattr(run, quantity)]


def _kind(run: GpuRun) -> str:
    small, mixtral, qwen = _KINDS
    return qwen if run.source == "prime-rl" else mixtral if "mixtral" in run.id else small


@shows("Published runs")
def show_published_runs() -> Picture:
    """Draws what the planner predicts of published runs with experts over what was measured:
    seconds of a step and GB; and DeepSeek-V3's step from its GPU hours."""
    runs = {quantity: compared_runs(quantity) for quantity in ("seconds", "memory")}
    deepseek = Compared("DeepSeek-V3", deepseek_seconds(),
                        step_seconds(DEEPSEEK, DEEPSEEK_PLAN))
    lines = [*_medians(runs), *_of_deepseek(deepseek)]
    figure, axes = canvas(WIDTH, 4.0 + marks.HEADLINE + marks.NOTE_LINE * len(lines), ncols=2)
    off = {quantity: _median(found) for quantity, found in runs.items()}
    lesson = (f"Predicted GB are {off['memory']:.0f} % off in the median, seconds "
              f"{off['seconds']:.0f} %, and DeepSeek-V3's step "
              f"{deepseek.predicted / deepseek.measured:.1f} times too long")
    marks.headline(figure, lesson)
    for ax, (quantity, found) in zip(axes, runs.items(), strict=True):
        size = GB if quantity == "memory" else 1
        for kind, (colour, marker) in _KINDS.items():
            own = [each for each in found if each.kind == kind]
            ax.plot([each.measured / size for each in own], [each.predicted / size for each in own],
                    marker, color=colour, markersize=6, markeredgecolor=palette.INK,
                    markeredgewidth=0.5)
        _draw_axes(ax, found, quantity, size, deepseek)
    handles = [Line2D([], [], color=colour, marker=marker, linestyle="none", label=kind)
               for kind, (colour, marker) in _KINDS.items()]
    marks.legend_above(figure, [
        *handles, Line2D([], [], color=palette.PHASES["exposed"], marker="*", markersize=10,
                         linestyle="none", label="DeepSeek-V3"),
        Line2D([], [], color=palette.MUTED, label="equal")])
    note = "\n".join(lines)
    marks.note_below(figure, note)
    return Picture(figure, f"{lesson}\n{note}", data=runs | {"DeepSeek-V3": deepseek})


def _draw_axes(ax, found, quantity, size, deepseek) -> None:
    ends = [value / size for each in found for value in (each.measured, each.predicted)]
    if quantity == "seconds":
        ax.plot(deepseek.measured, deepseek.predicted, "*", color=palette.PHASES["exposed"],
                markersize=13, zorder=5)
        ends += [deepseek.measured, deepseek.predicted]
    limits = min(ends) / 1.3, max(ends) * 1.3
    ax.plot(limits, limits, color=palette.MUTED, linewidth=1, zorder=0)
    unit = "GB of a rank" if quantity == "memory" else "seconds of a step"
    ax.set(xscale="log", yscale="log", xlim=limits, ylim=limits, xlabel=f"measured, {unit}",
           ylabel="predicted")
    for axis in (ax.xaxis, ax.yaxis):
        marks.plain_numbers(axis)


def _median(found) -> float:
    return float(np.median([abs(each.error) for each in found]))


def _medians(runs) -> list[str]:
    """Each kind's median error in seconds and in bytes."""
    lines = []
    for kind in _KINDS:
        words = []
        for quantity, found in runs.items():
            own = [each for each in found if each.kind == kind]
            bias = float(np.median([each.error for each in own]))
            words.append(f"{quantity} {marks.with_minus(f'{round(bias):+d}')} %, in absolute value "
                         f"{_median(own):.0f} % (medians of {counted(len(own), 'run')})")
        lines.append(f"{kind}: {'; '.join(words)}.")
    # labs/predictions/code_bases.py, MEGATRON_CORE and PRIME_RL
    return [*lines, "One constant for seconds was fitted to Megatron-LM's runs, and one for memory "
            "to each code base's."]


def _of_deepseek(step) -> list[str]:
    """The published step beside the predicted one, and what explains the difference."""
    parts = Answer(DEEPSEEK, DEEPSEEK_PLAN, counts_tensors=False).seconds
    computing = parts.matmul + parts.attention
    return [f"DeepSeek-V3: {step.measured:.1f} s from its {DEEPSEEK_HOURS / 1e6:g} million hours "
            f"of H800s, {step.predicted:.1f} predicted ({DEEPSEEK_PLAN.pipeline} stages, EP "
            f"{DEEPSEEK_PLAN.expert}, ZeRO-1, BF16, all recomputed, H100s). Of these, "
            f"{parts.expert:.1f} s are all-to-alls and {parts.bubble:.1f} the bubble, which "
            f"DualPipe hides in the main; products and attention are {computing:.1f}. DeepSeek "
            "multiplies and dispatches in FP8, sends a token to 4 nodes at most, and recomputes "
            "little."]
