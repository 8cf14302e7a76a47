"""What eight ranks in three dimensions send, and what they hold."""

from collections.abc import Callable

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.meters.metrics import Metric
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pipeline_parallel.charts.mesh import COLOURS
from labs.pipeline_parallel.dimensions.training import (
    NAMES,
    SIZES,
    RankRun,
    group_of,
    small_llama,
    train_in_three_dimensions,
)
from labs.predictions.traffic import passes
from labs.words import counted


@shows("7.23")
def show_three_dimensions(parallelize: Callable) -> Picture:
    """Trains two steps on eight ranks and draws the bytes that a rank sends in each dimension in
    the second, and the share of the parameters that it keeps: one row for all ranks, because they
    are alike; where they are not, the longest bar and the range."""
    runs = train_in_three_dimensions(parallelize, steps=2)
    whole = sum(p.numel() for p in small_llama().parameters())
    figure, (sent, held) = canvas(WIDTH, 2.6, ncols=2, gridspec_kw={"width_ratios": [1.6, 1]})
    names = list(reversed(NAMES))
    for row, name in enumerate(names):
        sizes = [sent_bytes(run, name) / 1e6 for run in runs]
        sent.barh(row, max(sizes), marks.BAR, color=COLOURS[name])
        sent.text(max(sizes), row, f" {_range(sizes, '.2f')} MB in {calls_in(runs[0], name)}",
                  va="center", fontsize=9)
    shares = [100 * run.held / whole for run in runs]
    held.barh(0, max(shares), marks.BAR, color=palette.MEMORY["parameters"])
    held.text(max(shares), 0, f" {_range(shares, '.1f')} %", va="center", fontsize=9)
    lines = [held.axvline(100 / len(runs), color=palette.PREDICTED, linewidth=1,
                          label="one eighth")]
    if (guess := guessed("7.23")) is not None:
        lines.append(held.axvline(guess, color=palette.GUESSED, linestyle=(0, (3, 2)),
                                  label="your guess"))
    marks.name_rows(sent, names)
    marks.name_rows(held, [f"each of {len(runs)} ranks"])
    sent.set_xlabel(f"MB that each of {len(runs)} ranks sends in a step")
    held.set_xlabel("% of the parameters that it keeps")
    sent.margins(x=0.5)
    held.margins(x=0.3)
    marks.legend_above(figure, lines)
    words = [f"rank {rank} {run.coordinates}: sends " + ", ".join(
        f"{sent_bytes(run, name) / 1e6:.2f} MB in its {name} group" for name in names)
        + f"; keeps {share:.1f} % of the parameters"
        for rank, (run, share) in enumerate(zip(runs, shares, strict=True))]
    metrics = [Metric("rank 0: share of the parameters", runs[0].held / whole, ""),
               *(Metric(f"rank 0: sent in its {name} group", sent_bytes(runs[0], name) / 1e6, "MB")
                 for name in NAMES)]
    return Picture(figure, "\n".join(words), data=(runs, guess), metrics=metrics)


def _range(values, form) -> str:
    """One number, or the smallest and the largest where they differ as printed."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def sent_bytes(run: RankRun, name: str) -> float:
    """Bytes that a rank sends in the groups of a dimension, by ring algorithms."""
    size = SIZES[NAMES.index(name)]
    calls = [call for call in run.calls if group_of(call) == name and call.kind != "recv"]
    return sum(call.bytes if call.kind == "send" else
               passes(call.kind) * (size - 1) / size * call.bytes for call in calls)


def calls_in(run: RankRun, name: str) -> str:
    """How many collectives and messages a rank issued in a dimension, in words."""
    calls = [call for call in run.calls if group_of(call) == name]
    return counted(len(calls), "message" if name == "pipeline" else "collective")
