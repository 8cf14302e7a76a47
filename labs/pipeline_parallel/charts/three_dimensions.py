"""What eight ranks in three dimensions send, and what they hold."""

from collections.abc import Callable

from matplotlib.patches import Patch

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
    """Trains two steps on eight ranks and draws, for each rank, the bytes that it sends in each
    dimension in the second step, and the share of the parameters that it keeps."""
    runs = train_in_three_dimensions(parallelize, steps=2)
    whole = sum(p.numel() for p in small_llama().parameters())
    figure, (sent, held) = canvas(WIDTH, 4.1, ncols=2, sharey=True,
                                  gridspec_kw={"width_ratios": [1.6, 1]})
    words = []
    for rank, run in enumerate(runs):
        by_dimension = {name: sent_bytes(run, name) / 1e6 for name in reversed(NAMES)}
        left = 0.0
        for name, size in by_dimension.items():
            sent.barh(rank, size, marks.BAR, left, color=COLOURS[name])
            left += size
        share = 100 * run.held / whole
        held.barh(rank, share, marks.BAR, color=palette.MEMORY["parameters"])
        held.text(share, rank, f" {share:.1f} %", va="center", fontsize=9)
        words.append(f"rank {rank} {run.coordinates}: sends " + ", ".join(
            f"{size:.2f} MB in its {name} group" for name, size in by_dimension.items())
            + f"; keeps {share:.1f} % of the parameters")
    lines = [held.axvline(100 / len(runs), color=palette.PREDICTED, linewidth=1,
                          label="one eighth")]
    if (guess := guessed("7.23")) is not None:
        lines.append(held.axvline(guess, color=palette.GUESSED, linestyle=(0, (3, 2)),
                                  label="your guess"))
    marks.name_rows(sent, [f"rank {rank}: {', '.join(map(str, run.coordinates))}"
                           for rank, run in enumerate(runs)])
    sent.set_xlabel("MB that a rank sends in a step")
    held.set_xlabel("% of the parameters that it keeps")
    held.margins(x=0.2)
    marks.legend_above(figure, [
        *(Patch(color=COLOURS[name], label=f"{name}: {calls_in(runs[0], name)}")
          for name in reversed(NAMES)), *lines])
    metrics = [Metric("rank 0: share of the parameters", runs[0].held / whole, ""),
               *(Metric(f"rank 0: sent in its {name} group", sent_bytes(runs[0], name) / 1e6, "MB")
                 for name in NAMES)]
    return Picture(figure, "\n".join(words), data=(runs, guess), metrics=metrics)


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
