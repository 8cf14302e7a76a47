"""Guess, predict, measure: the measured bar, the prediction's tick and the student's tick."""

from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas


@dataclass(frozen=True)
class Bar:
    """One bar and its ticks; measured, predicted and guessed share a unit, and None is not
    drawn."""

    name: str
    measured: float
    predicted: float | None = None
    guessed: float | None = None
    colour: str = palette.PHASES["communication"]


def bars(rows: list[Bar], unit: str, title: str = "",
         limit: tuple[float, str] | None = None) -> Picture:
    """A picture of horizontal bars with ticks. title: what the axis counts, after its unit; limit:
    (value, name) of a line across all bars."""
    drawn = [marks.LabelledBar({"measured": row.measured},
                               f"{marks.format_number(row.measured)} {unit}", row.predicted,
                               row.guessed, colour=row.colour) for row in rows]
    axis_title = f"{unit} {title}".strip()
    figure, [ax] = marks.bar_chart([row.name for row in rows], [drawn], [axis_title],
                                   1.05 + 0.46 * len(rows))
    if limit:
        marks.draw_limit(ax, limit[0])
        ax.text(limit[0], -0.55, limit[1], ha="center", va="bottom", color=palette.MUTED)
    marks.draw_legend(figure, drawn)
    words = [", ".join([f"{row.name}: measured {bar.label}", *bar.tick_words()])
             for row, bar in zip(rows, drawn, strict=True)]
    return Picture(figure, "\n".join([axis_title, *words]), data=rows)


def numbers_before_and_after(before: list[float], after: list[float],
                             guessed: float | None = None) -> Picture:
    """A picture of one number per rank: a pale bar before, a full line after, and the guess as a
    dashed line across."""
    figure, ax = canvas(WIDTH, 2.5)
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        ax.bar(rank, old, width=0.62, color=palette.rank(rank), alpha=0.45)
        ax.hlines(new, rank - 0.36, rank + 0.36, color=palette.rank(rank), linewidth=5)
        ax.text(rank + 0.4, new, f"{new:g}", va="center", fontsize=11, weight="bold",
                color=palette.rank(rank))
    handles = [Patch(color=palette.MUTED, alpha=0.45, label="before"),
               Line2D([], [], color=palette.MUTED, linewidth=5, label="after")]
    words = [f"rank {rank}: {old:g} → {new:g}"
             for rank, (old, new) in enumerate(zip(before, after, strict=True))]
    if guessed is not None:
        words.append(f"your guess: {guessed:g}")
        handles.append(ax.axhline(guessed, color=palette.GUESSED, linestyle=(0, (3, 2)), zorder=0,
                                  label=words[-1]))
    ax.set_xticks(range(len(before)), [f"rank {r}, had {old:g}" for r, old in enumerate(before)])
    ax.tick_params(axis="x", labelcolor=palette.INK)
    ax.set_yticks([])
    ax.set_xlim(-0.6, len(before) - 0.2)
    marks.legend_above(figure, handles)
    return Picture(figure, "\n".join(words), data=(before, after, guessed))

