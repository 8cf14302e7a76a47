"""The picture of public GPU runs: measured against predicted, in seconds and in bytes."""

import functools

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.checks.verdicts import print_in_script
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.gpu_runs.folder import load
from labs.predictions.gpu_runs.scoreboard import OURS, Row, Scoreboard, compare
from labs.training.memory_categories import GB

COLOURS = dict(zip(("nanotron", "Megatron-LM", "prime-rl", "this workbook"),
                   (*palette.RUNS[1:], palette.INK), strict=True))
NEAR = 0.2  # of the measured value: the band
LAYERS = 16  # of nanotron 1B
_PANELS = {"seconds": ("seconds of a step", 1.0), "memory": ("GB at the peak of a rank", GB)}


@functools.cache
def scoreboard() -> Scoreboard:
    """The scoreboard of this project's rows."""
    return compare(load())


def show_gpu_runs() -> Picture:
    """Draws every public run on GPUs that can be predicted: what was measured, from left to right,
    and how many times the prediction it is."""
    return print_in_script(picture_of(scoreboard()))


def picture_of(board: Scoreboard) -> Picture:
    """The picture of a scoreboard."""
    rows = {quantity: _once(board, quantity) for quantity in _PANELS}
    figure, axes = canvas(WIDTH, 3.9 + marks.HEADLINE, ncols=2)
    lesson = "; ".join(
        f"{name}: {len(found):,} runs, half of them within {_median(found):.1f} % of the prediction"
        for name, found in (("Seconds", rows["seconds"]), ("memory", rows["memory"])))
    marks.headline(figure, lesson)
    for ax, (quantity, (label, unit)) in zip(axes, _PANELS.items(), strict=True):
        _panel(ax, rows[quantity], label, unit)
    axes[0].set_ylabel("measured / predicted")
    marks.legend_above(figure, [
        *(Line2D([], [], marker="o", linestyle="", color=colour, label=name)
          for name, colour in COLOURS.items()),
        Patch(color=palette.GRID, label=f"within {100 * NEAR:g} %")])
    marks.note_below(figure, "Far above and far below: pipelines on 32 nodes and more, which "
                             "stall or do not, and no setting tells; far above also jobs "
                             "that are nearly out of memory.")
    return Picture(figure, f"{lesson}\n{_words(rows)}", data=board)


def _once(board, quantity) -> list[Row]:
    """Each run's row: one that is in two groups counts once."""
    return list({row.run.id: row for row in board.rows if row.quantity == quantity}.values())


def _median(rows) -> float:
    return float(np.median([100 * abs(row.predicted[OURS] / row.measured - 1) for row in rows]))


def _panel(ax, rows, label, unit):
    measured = [row.measured / unit for row in rows]
    ends = 0.8 * min(measured), 1.25 * max(measured)
    ax.fill_between(ends, 1 - NEAR, 1 + NEAR, color=palette.GRID, zorder=0, linewidth=0)
    ax.axhline(1, color=palette.MUTED, linewidth=0.8, zorder=1)
    for source, colour in COLOURS.items():
        own = [row for row in rows if row.run.source == source]
        ax.plot([row.measured / unit for row in own],
                [row.measured / row.predicted[OURS] for row in own], "o",
                markersize=5 if len(own) < 20 else 2.5, color=colour, alpha=0.7, zorder=3,
                markeredgewidth=0)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(*ends)
    ratios = [row.measured / row.predicted[OURS] for row in rows]
    ax.set_ylim(0.8 * min(ratios), 1.25 * max(ratios))
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
             if 0.8 * min(ratios) <= tick <= 1.25 * max(ratios)]
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.yaxis.minorticks_off()
    marks.plain_numbers(ax.xaxis)
    ax.set_xlabel(label)


def _words(rows) -> str:
    lines = []
    for quantity, found in rows.items():
        for source in COLOURS:
            own = [row for row in found if row.run.source == source]
            if own:
                lines.append(f"{quantity}, {source}: {len(own)} runs, median error "
                             f"{_median(own):.1f} %")
    return "\n".join(lines)


def show_launch_floor() -> Picture:
    """Draws the seconds of a micro-batch of 1B parameters on 16 H100s over its size, measured and
    predicted, for 2, 4 and 8 tensor-parallel ranks: below a floor no micro-batch gets faster."""
    rows = [row for row in _once(scoreboard(), "seconds") if row.run.source == "nanotron"
            and row.run.job.name == "nanotron 1B" and row.run.gpus == 16
            and row.run.plan.pipeline == 1 and row.run.plan.tensor in (2, 4, 8)]
    figure, ax = canvas(WIDTH, 3.4 + marks.HEADLINE)
    for tensor, colour in zip((2, 4, 8), palette.RUNS[1:], strict=True):
        own = sorted((row for row in rows if row.run.plan.tensor == tensor),
                     key=lambda row: row.run.plan.micro_batch)
        for values, style in ((_milliseconds(own, "measured"), {"linestyle": "", "marker": "o"}),
                              (_milliseconds(own, "predicted"), {"linestyle": "-"})):
            ax.plot([row.run.plan.micro_batch for row in own], values, color=colour, **style)
    floor = min(_milliseconds(rows, "measured"))
    launch = rows[0].run.job.code.overheads.launch
    smallest = [value for row, value in zip(rows, _milliseconds(rows, "measured"), strict=True)
                if row.run.plan.micro_batch == 1]
    lesson = (f"With one sequence a micro-batch takes {min(smallest):.0f} to {max(smallest):.0f} "
              "ms on 2, 4 and 8 tensor-parallel ranks alike: the hosts start 16 layers")
    marks.headline(figure, lesson)
    ax.axhline(floor, color=palette.MUTED, linestyle=(0, (4, 3)), linewidth=1)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    sizes = sorted({row.run.plan.micro_batch for row in rows})
    ax.set_xticks(sizes, [f"{size}" for size in sizes])
    ax.set_yticks([64, 128, 256, 512], ["64", "128", "256", "512"])
    ax.set_xlabel("sequences of a micro-batch")
    ax.set_ylabel("milliseconds of a micro-batch")
    marks.legend_above(figure, [
        *(Line2D([], [], color=colour, label=f"{tensor} tensor-parallel ranks")
          for tensor, colour in zip((2, 4, 8), palette.RUNS[1:], strict=True)),
        Line2D([], [], marker="o", linestyle="", color=palette.INK, label="measured"),
        Line2D([], [], color=palette.INK, label="predicted"),
        Line2D([], [], color=palette.MUTED, linestyle=(0, (4, 3)),
               label=f"{floor:.0f} ms: {LAYERS} layers of {1e3 * launch:.1f} ms, and the head")])
    words = [f"{row.run.plan.tensor} ranks, {row.run.plan.micro_batch} sequences: measured "
             f"{measured:.0f} ms, predicted {predicted:.0f}"
             for row, measured, predicted in zip(rows, _milliseconds(rows, "measured"),
                                                 _milliseconds(rows, "predicted"), strict=True)]
    return print_in_script(Picture(figure, "\n".join([lesson, *words]), data=rows))


def _milliseconds(rows, which) -> list[float]:
    """Of one micro-batch."""
    return [1e3 * (row.measured if which == "measured" else row.predicted[OURS])
            / row.run.plan.micro_batches(row.run.job) for row in rows]
