"""Guess, predict, measure: the measured bar, the formula's tick and the student's tick."""

from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.pictures import palette
from labs.pictures.marks import beside, number, tick, tick_handles
from labs.pictures.picture import WIDTH, Picture, canvas


@dataclass(frozen=True)
class Row:
    """One bar. measured, predicted and guessed share a unit; None is not drawn."""

    name: str
    measured: float
    predicted: float = None
    guessed: float = None
    colour: str = palette.PHASES["communication"]


def bars(rows: list, unit: str, title: str = "", limit: tuple = None) -> Picture:
    """Horizontal bars with ticks. limit: (value, name) of a line across all of them."""
    figure, ax = canvas(WIDTH, 1.05 + 0.46 * len(rows))
    widest = max(v for row in rows for v in
                 (row.measured, row.predicted, row.guessed, limit and limit[0]) if v)
    for place, row in enumerate(rows):
        ax.barh(place, row.measured, height=0.62, color=row.colour)
        ax.annotate(f"{number(row.measured)} {unit}", (_label_at(row, unit, widest), place),
                    xytext=(8, 0), textcoords="offset points", va="center", fontsize=10, zorder=3,
                    bbox={"facecolor": palette.PAPER, "edgecolor": "none", "pad": 1.5})
        tick(ax, row.predicted, place, palette.PREDICTED)
        tick(ax, row.guessed, place, palette.GUESSED)
    if limit:
        ax.axvline(limit[0], color=palette.MUTED, linestyle=(0, (4, 3)), linewidth=1, zorder=0)
        ax.text(limit[0], -0.55, limit[1], ha="center", va="bottom", color=palette.MUTED)
    ax.set_yticks(range(len(rows)), [row.name for row in rows])
    ax.tick_params(axis="y", labelcolor=palette.INK)
    ax.set_ylim(len(rows) - 0.5, -0.55)
    ax.set_xlim(0, max(widest * 1.03, *(_label_end(row, unit, widest) for row in rows)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.set_xlabel(f"{unit} {title}".strip())
    _legend(figure, rows)
    return Picture(figure, _words(rows, unit, title), data=rows)


def before_and_after(before: list, after: list, guessed: float = None) -> Picture:
    """One number per rank: a pale bar before, a full line after, the guess as a dashed line."""
    figure, ax = canvas(WIDTH, 2.5)
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        ax.bar(rank, old, width=0.62, color=palette.rank(rank), alpha=0.45)
        ax.hlines(new, rank - 0.36, rank + 0.36, color=palette.rank(rank), linewidth=5)
        ax.text(rank + 0.4, new, f"{new:g}", va="center", fontsize=11, weight="bold",
                color=palette.rank(rank))
    handles = [Patch(color=palette.MUTED, alpha=0.45, label="before"),
               Line2D([], [], color=palette.MUTED, linewidth=5, label="after")]
    if guessed is not None:
        handles.append(ax.axhline(guessed, color=palette.GUESSED, linestyle=(0, (3, 2)), zorder=0,
                                  label=f"your guess: {guessed:g}"))
    ax.set_xticks(range(len(before)), [f"rank {r}, had {old:g}" for r, old in enumerate(before)])
    ax.tick_params(axis="x", labelcolor=palette.INK)
    ax.set_yticks([])
    ax.set_xlim(-0.6, len(before) - 0.2)
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False)
    words = [f"rank {rank}: {old:g} → {new:g}"
             for rank, (old, new) in enumerate(zip(before, after, strict=True))]
    words += [f"your guess: {guessed:g}"] if guessed is not None else []
    return Picture(figure, "\n".join(words), data=(before, after, guessed))


def _label_room(row, unit, widest) -> float:
    """What the words beside a bar take of the axis, in its unit."""
    return widest * 0.0155 * len(f"   {number(row.measured)} {unit}")


def _label_at(row, unit, widest) -> float:
    return beside(row.measured, row.predicted, row.guessed, _label_room(row, unit, widest))


def _label_end(row, unit, widest) -> float:
    return _label_at(row, unit, widest) + _label_room(row, unit, widest)


def _legend(figure, rows):
    handles = [Patch(color=rows[0].colour, label="measured"), *tick_handles(rows)]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, frameon=False)


def _words(rows, unit, title):
    def line(row):
        parts = [f"{row.name}: measured {number(row.measured)} {unit}"]
        parts += [f"the formula {number(row.predicted)}"] if row.predicted is not None else []
        parts += [f"your guess {number(row.guessed)}"] if row.guessed is not None else []
        return ", ".join(parts)

    return "\n".join([f"{unit} {title}".strip(), *map(line, rows)])
