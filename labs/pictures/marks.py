"""The parts that charts of measurements share: bars, ticks, labels, axes, legends and numbers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from labs.pictures import palette
from labs.pictures.picture import WIDTH

UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3, "bytes": 1}
CHARACTER = 0.082  # inches that a character of 10 points takes, generously
BAR = 0.62  # of a row: how thick a bar is


def format_number(value: float) -> str:
    """A number for a label: thousands whole, 227.5 with four digits, smaller ones with three."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.4g}" if value >= 100 else f"{value:.3g}"


def unit_for(largest: float, unit: str | None = None) -> tuple[str, int]:
    """(name, bytes) of the unit that suits `largest` bytes, or of the unit that is named. Raises
    ValueError where there is no such unit."""
    if unit is not None and unit not in UNITS:
        raise ValueError(f"no unit {unit!r}: choose {', '.join(UNITS)}")
    chosen = unit or next((name for name, size in UNITS.items() if largest >= 0.9 * size), "bytes")
    return chosen, UNITS[chosen]


def draw_stack(ax: Axes, place: float, parts: Iterable[tuple[float, dict]], upright: bool = False,
               thickness: float = BAR) -> float:
    """Draws (length, style) pairs end to end as one bar at `place` and returns where it ends;
    style: keywords of matplotlib's bar, for example {"color": ...}."""
    end = 0.0
    for length, style in parts:
        if length and upright:
            ax.bar(place, length, bottom=end, width=thickness, **style)
        elif length:
            ax.barh(place, length, left=end, height=thickness, **style)
        end += length
    return end


def draw_tick(ax: Axes, value: float | None, place: float, colour: str, upright: bool = False):
    """Draws a thick mark at `value` across the bar at `place`; nothing where value is None."""
    if value is not None:
        lines = ax.hlines if upright else ax.vlines
        lines(value, place - 0.43, place + 0.43, color=colour, linewidth=3, zorder=4)


def tick_handles(rows: Iterable) -> list[Line2D]:
    """The legend's entries for the ticks (attributes `predicted`, `guessed`) that any row has."""
    rows = list(rows)
    kinds = (("predicted", palette.PREDICTED, "predicted"),
             ("guessed", palette.GUESSED, "your guess"))
    return [Line2D([], [], color=colour, linewidth=3, label=label) for kind, colour, label in kinds
            if any(getattr(row, kind) is not None for row in rows)]


def tick_words(predicted: float | None, guessed: float | None,
               text: Callable[[float], str] = format_number) -> list[str]:
    """The ticks in words, those that there are: ["predicted 1.5", "your guess 2"]."""
    named = (("predicted", predicted), ("your guess", guessed))
    return [f"{name} {text(value)}" for name, value in named if value is not None]


@dataclass(frozen=True)
class LabelledBar:
    """A horizontal bar in the axis's unit: (length, style) pairs end to end, the text right of it,
    ticks, and the limit at which the rank ran out of memory."""

    parts: list[tuple[float, dict]]
    label: str
    predicted: float | None = None
    guessed: float | None = None
    limit: float | None = None

    @property
    def end(self) -> float:
        """Where the rightmost of bar, predicted tick and limit is."""
        return max(sum(length for length, _ in self.parts), self.predicted or 0, self.limit or 0)


def label_spans(rows: list[LabelledBar], inches: float) -> list[tuple[float, float]]:
    """Where each bar's label begins and ends on an axis of `inches` that has room for all: right of
    the bar and the predicted tick, and right of the guess too where that would lie under it."""
    rooms = [CHARACTER * (len(row.label) + 3) for row in rows]
    per_inch = _longest(rows) / (inches - max(rooms))
    spans = []
    for row, room in zip(rows, rooms, strict=True):
        end = row.end + room * per_inch
        start = row.guessed if row.guessed and row.end < row.guessed < end else row.end
        spans.append((start, start + room * per_inch))
    return spans


def _longest(rows) -> float:
    return max(max(row.end, row.guessed or 0) for row in rows) or 1


def draw_bars(ax: Axes, rows: list[LabelledBar], inches: float, right: float = 0,
              size: float = 10):
    """Draws a bar for each row with its ticks and label. inches: of the axis, which ends right of
    all labels and not before `right`. size: of the labels, in points."""
    spans = label_spans(rows, inches)
    for place, (row, (start, _)) in enumerate(zip(rows, spans, strict=True)):
        draw_stack(ax, place, row.parts)
        draw_tick(ax, row.predicted, place, palette.PREDICTED)
        draw_tick(ax, row.guessed, place, palette.GUESSED)
        if row.limit is not None:
            ax.vlines(row.limit, place - 0.45, place + 0.45, color=palette.RANK_FAILED,
                      linewidth=5, zorder=4)
        # On a patch of paper, so that no line runs through the text.
        ax.annotate(row.label, (start, place), xytext=(8, 0), textcoords="offset points",
                    va="center", fontsize=size, zorder=3,
                    color=palette.INK if row.limit is None else palette.RANK_FAILED,
                    bbox={"facecolor": palette.PAPER, "edgecolor": "none", "pad": 1.5})
    ax.set_xlim(0, max([right, 1.03 * _longest(rows), *(end for _, end in spans)]))
    plain_numbers(ax.xaxis)


def axis_inches(names: Iterable[str]) -> float:
    """Inches that are left for the axis of a chart whose rows have these names."""
    return WIDTH - 0.35 - CHARACTER * max(len(line) for name in names for line in name.split("\n"))


def name_rows(ax: Axes, names: list[str], above: float = 0.55):
    """Names the rows of horizontal bars, the first one on top; above: rows of space over it."""
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", labelcolor=palette.INK)
    ax.set_ylim(len(names) - 0.5, -above)


def plain_numbers(axis: Axis):
    """Writes the axis's numbers out, with commas, in place of matplotlib's powers and offsets."""
    axis.set_major_formatter(lambda value, _: f"{value:,g}")


def legend_above(figure: Figure, handles: list, columns: int | None = None, **style):
    """Draws the legend above the chart, in one row where `columns` does not say otherwise."""
    if handles:
        figure.legend(handles=handles, ncols=columns or len(handles), loc="outside upper left",
                      frameon=False, **{"fontsize": 9.5, "handlelength": 1.4,
                                        "columnspacing": 1.3, **style})
