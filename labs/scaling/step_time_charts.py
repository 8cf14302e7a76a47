"""The pictures of exercise 6.10: predicted against published step times, and whether overlap
explains the difference: errors by the share of the step in which computing could hide
communication."""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.checks.guesses import guessed
from labs.checks.numbers import require_number
from labs.checks.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.predictions.step_time import PublishedRun, StepParts, load_published_runs, step_time
from labs.predictions.step_time.efficiency import attention_flops, six_nd
from labs.predictions.step_time.fit import held_out
from labs.scaling.step_seconds import BOUND, hidden

BANDS = {"up to 2k": (0, 2048), "2k to 4k": (2049, 4096), "4k to 8k": (4097, 8192),
         "above 8k": (8193, math.inf)}
COLOURS = dict(zip(("llm-foundry", "Megatron-LM", "torchtitan"), palette.RUNS[1:], strict=True))


@dataclass(frozen=True)
class Prediction:
    """One published run by each model: predicted over published seconds, less 1, in percent.
    could_hide: percent of the published step in which computing and communication both run."""

    row: PublishedRun
    six_n: float
    with_attention: float
    without_communication: float
    nothing_hidden: float
    yours: float
    could_hide: float


MODELS = {"six_n": "6N at one MFU", "with_attention": "6N + attention at one MFU",
          "without_communication": "parts, no communication",
          "nothing_hidden": "parts, nothing hidden", "yours": "yours"}


@shows("6.10")
def show_step_times(step_seconds: Callable) -> Picture:
    """Draws the error of every published run over the length of its sequences: by the student's
    function and by one MFU for all, with the target and the worst row named."""
    found = predictions(step_seconds)
    figure, ax = canvas(WIDTH, 4.6 + marks.HEADLINE)
    lesson = (f"Mean error of {len(found)} published runs: {_mean(found, 'yours'):.1f} % by your "
              f"function, {_mean(found, 'six_n'):.1f} % with {MODELS['six_n']}")
    marks.headline(figure, lesson)
    ax.fill_between((0.4, 300), -BOUND, BOUND, color=palette.GRID, zorder=0, linewidth=0)
    ax.axhline(0, color=palette.MUTED, linewidth=0.8, zorder=1)
    for one in found:
        at, colour = _place(one, found), COLOURS.get(one.row.code_base.name, palette.PLAIN)
        ax.plot(at, one.six_n, "x", markersize=4.5, color=palette.MUTED, zorder=2)
        ax.plot(at, one.yours, "o", markersize=4.5, color=colour, zorder=3, alpha=0.85)
    worst = max(found, key=lambda one: abs(one.yours))
    error = marks.with_minus(f"{worst.yours:+z.0f} %")
    ax.annotate(f"worst: {worst.row.model}, {worst.row.run.gpus} {worst.row.run.gpu.name}, {error}",
                (_place(worst, found), worst.yours), xytext=(6, -13),
                textcoords="offset points", ha="right", va="center", fontsize=9, **marks.ON_PAPER)
    _axes(ax, found)
    marks.legend_above(figure, [
        *(Line2D([], [], marker="o", linestyle="", color=colour, label=f"yours, {name}")
          for name, colour in COLOURS.items()),
        Line2D([], [], marker="x", linestyle="", color=palette.MUTED,
               label=MODELS["six_n"]),
        Patch(color=palette.GRID, label=f"target for the mean error: {BOUND} %")])
    return Picture(figure, f"{lesson}\n{_words(found, worst)}", data=found)


def _place(one, found) -> float:
    """Thousands of tokens of a sequence, spread a little so that rows of one length are seen."""
    same = [other.row.id for other in found if other.row.sequence == one.row.sequence]
    spread = (same.index(one.row.id) + 0.5) / len(same) - 0.5
    return one.row.sequence / 1024 * 2 ** (0.5 * spread)


def _axes(ax, found):
    lengths = sorted({one.row.sequence for one in found})
    ax.set_xscale("log", base=2)
    ax.set_xlim(0.38, 330)
    ax.set_xticks([length / 1024 for length in lengths],
                  [f"{length / 1024:g}k" for length in lengths])
    ax.set_ylim(-105, max(85, 1.1 * max(abs(one.yours) for one in found)))
    ax.set_xlabel("tokens of a sequence")
    ax.set_ylabel("predicted seconds of a step, error in %")


def _words(found, worst) -> str:
    lines = [f"{name}: mean error {_mean(rows, 'yours'):.1f} % by your function, "
             f"{_mean(rows, 'six_n'):.1f} % with {MODELS['six_n']}"
             for name, rows in in_bands(found).items()]
    return "\n".join([*lines, f"worst: {worst.row.id}, {worst.yours:+.1f} %"])


@shows("6.10")
def show_step_errors(step_seconds: Callable) -> Table:
    """Returns a table of mean errors by length of sequence, for models that leave more and more
    out, and the worst row of the student's."""
    bands = in_bands(predictions(step_seconds))
    rows = []
    for name, found in bands.items():
        worst = max(found, key=lambda one: abs(one.yours))
        rows.append((name, len(found), *(f"{_mean(found, model):.1f}" for model in MODELS),
                     f"{worst.row.id} {worst.yours:+z.0f}"))
    [beyond] = [_mean(found, "six_n") for name, found in bands.items() if name == "above 8k"]
    return Table("mean error of predicted step times, in percent", (
        "tokens", "runs", *MODELS.values(), "your worst"), rows,
        note=marks.answered(guessed("6.10"), beyond, f"% with {MODELS['six_n']} above 8k"))


def in_bands(found: list[Prediction]) -> dict[str, list[Prediction]]:
    """Band of sequence lengths -> its rows."""
    return {name: [one for one in found if low <= one.row.sequence <= high]
            for name, (low, high) in BANDS.items()}


def _mean(found, model) -> float:
    return fmean(abs(getattr(one, model)) for one in found)


def predictions(step_seconds: Callable) -> list[Prediction]:
    """Every published run that can be predicted, with constants fitted without its fold; one MFU is
    the median of all runs, with 6N and with attention."""
    rows = [row for row in load_published_runs() if row.run]
    six_n, both = _at_median([_flops(row, False) for row in rows], rows), _at_median(
        [_flops(row, True) for row in rows], rows)
    found = []
    for row, alone, attention in zip(rows, six_n, both, strict=True):
        parts = copy.deepcopy(_parts()[row.id])  # the student may change them
        computing = sum(parts.computing.values())
        sent = sum(one.seconds for one in parts.communication.values())
        both_run = sum(map(hidden, parts.communication.values()))
        yours = require_number(step_seconds(parts), row.id)
        found.append(Prediction(row, alone, attention, *(
            100 * (seconds / row.seconds - 1) for seconds in (computing, computing + sent, yours)),
            100 * both_run / row.seconds))
    return found


@functools.cache
def _parts() -> dict[str, StepParts]:
    constants = held_out()
    return {row.id: StepParts.of(row.run, constants[row.id]) for row in load_published_runs()
            if row.run}


def _flops(row, with_attention) -> float:
    """FLOPs of a step for each GPU; products of the weights, look-ups left out."""
    run = row.run
    weights = run.tensor * (run.layers * run.layer_parameters + run.embedding_parameters)
    each = six_nd(weights, 1) + with_attention * attention_flops(run.layers, run.hidden,
                                                                 run.sequence)
    return each * run.step_tokens / run.gpus


def _at_median(flops, rows) -> list[float]:
    """Errors in percent of FLOPs / (peak x one MFU), the median of the rows'."""
    shares = [one / row.seconds / row.run.gpu.flops for one, row in zip(flops, rows, strict=True)]
    usual = median(shares)
    return [100 * (share / usual - 1) for share in shares]


OVERLAP_BANDS = {"over 20 %": (20, 100), "10 to 20 %": (10, 20), "5 to 10 %": (5, 10),
         "under 5 %": (0, 5)}  # of the published step
# What a model without a student's function takes for `interference`; its other six constants are
# fitted for it, or the comparison would be with constants that were fitted to another model.
EXTREMES = {"nothing hidden": 1.0, "all hidden for nothing": 0.0}


@shows("6.10")
def show_overlap(step_seconds: Callable) -> Table:
    """Returns a table of mean errors, in percent, by the share of the published step in which
    computing could hide communication: by the student's function, and by models in which nothing
    is hidden, or all that can be without a cost, each with constants fitted for it."""
    found = predictions(step_seconds)
    errors = {name: _errors(interference) for name, interference in EXTREMES.items()}
    yours = {one.row.id: abs(one.yours) for one in found}
    rows = []
    for name, (low, high) in OVERLAP_BANDS.items():
        ids = [one.row.id for one in found if low <= one.could_hide < high]
        rows.append((name, len(ids), *(f"{fmean(each[row] for row in ids):.1f}"
                                       for each in (*errors.values(), yours))))
    values = sorted(constants.unhidden for constants in held_out().values())
    return Table("mean error of predicted step times, in percent", (
        "computing could hide", "runs", *EXTREMES, "yours"), rows,
        note="Each model with constants fitted for it, without the run that it predicts. Yours: "
             f"interference {values[0]:.2f} to {values[-1]:.2f}, by which runs were left out.")


def _errors(interference) -> dict[str, float]:
    """Id -> error in percent of the step with this interference."""
    # Fitted for this interference: constants of another model would make it look worse than it is.
    constants = held_out(interference)
    return {row.id: 100 * abs(step_time(row.run, constants[row.id]).total / row.seconds - 1)
            for row in load_published_runs() if row.run}

