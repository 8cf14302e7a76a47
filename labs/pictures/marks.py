"""The parts that charts of measurements share: bars, ticks, labels, axes, legends and numbers."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.pictures import palette
from labs.pictures.picture import WIDTH, canvas

UNITS = {"GB": 10**9, "MB": 10**6, "kB": 10**3, "bytes": 1}
OVERHEAD = "CUDA, NCCL"  # a part of a bar: what a process holds in addition to its tensors
HEADLINE = 0.28  # inches of a line of a chart's title
NOTE_LINE = 0.25  # inches of a line of a note below a chart
CHARACTER = 0.082  # inches that a character of 10 points takes, generously
# So that no line runs through a text.
ON_PAPER = {"zorder": 3, "bbox": {"facecolor": palette.PAPER, "edgecolor": "none", "pad": 1}}
GUESS_MARKER = {"marker": "D", "markersize": 6, "color": palette.GUESSED,
                "markeredgecolor": palette.PAPER, "markeredgewidth": 0.8, "clip_on": False}
_TITLE_CHARACTERS, _NOTE_CHARACTERS = 94, 112  # of a line as wide as a picture
_HEADLINE = {"fontsize": 11, "weight": "bold", "color": palette.INK}
BAR = 0.62  # of a row: how thick a bar is


def format_number(value: float) -> str:
    """A number for a label: thousands whole, 227.5 with four digits, smaller ones with three."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.4g}" if value >= 100 else f"{value:.3g}"


def with_minus(text: str) -> str:
    """The text with minus signs in place of hyphens, as on the axes."""
    return text.replace("-", "\N{MINUS SIGN}")


@dataclass(frozen=True)
class Unit:
    """A unit of an axis. size: what one unit is in the values that are drawn (1e6 bytes)."""

    name: str
    size: float = 1

    def number(self, value: float) -> str:
        """The value in this unit, without its name."""
        return format_number(value / self.size)

    def text(self, value: float) -> str:
        """The value in this unit, with its name."""
        return f"{self.number(value)} {self.name}"


def unit_for(largest: float, unit: str | None = None) -> Unit:
    """The unit that suits `largest` bytes, or the one that is named. Raises ValueError where there
    is no such unit."""
    if unit is not None and unit not in UNITS:
        raise ValueError(f"no unit {unit!r}: choose {', '.join(UNITS)}")
    chosen = unit or next((name for name, size in UNITS.items() if largest >= 0.9 * size), "bytes")
    return Unit(chosen, UNITS[chosen])


@dataclass(frozen=True)
class LabelledBar:
    """A bar in the axis's unit. parts: name -> length, end to end; a part has its name's colour in
    the palette, or `colour`. label: the text right of the bar. limit: where the rank ran out of
    memory. is_pale: nothing was measured, the bar is a prediction. whisker: (low, high) of the
    prediction's uncertainty."""

    parts: dict[str, float]
    label: str = ""
    predicted: float | None = None
    guessed: float | None = None
    limit: float | None = None
    colour: str = palette.BORDER
    is_pale: bool = False
    whisker: tuple[float, float] | None = None

    @property
    def total(self) -> float:
        """Where the bar ends."""
        return sum(self.parts.values())

    @property
    def end(self) -> float:
        """Where the rightmost of bar, predicted tick, whisker and limit is."""
        return max(self.total, self.predicted or 0, self.limit or 0, *(self.whisker or ()))

    def style(self, part: str) -> dict:
        """How a part is filled: in its colour, or with a pale hatching of it."""
        if part == OVERHEAD:
            return {"facecolor": palette.PAPER, "edgecolor": palette.MUTED, "linewidth": 1,
                    "linestyle": (0, (2, 1.5))}
        colour = palette.PARTS.get(part, self.colour)
        if not self.is_pale:
            hatch = {"hatch": palette.HATCHES[part]} if part in palette.HATCHES else {}
            return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5, **hatch}
        mixed = tuple(0.45 * channel + 0.55 for channel in to_rgb(colour))
        return {"facecolor": mixed, "edgecolor": colour, "linewidth": 0.0, "hatch": "////"}

    def by_part(self) -> str:
        """` (parameters 0.4, activations 0.8)`; parts below a ten-thousandth are left out."""
        parts = ", ".join(f"{name} {format_number(length)}" for name, length in self.parts.items()
                          if name not in ("", OVERHEAD) and length > 1e-4 * self.total)
        return f" ({parts})" if parts else ""

    def tick_words(self) -> list[str]:
        """The ticks in words, those that there are: ["predicted 1.5", "your guess 2"]."""
        return [f"{name} {format_number(value)}" for name, value in
                (("predicted", self.predicted), ("your guess", self.guessed)) if value is not None]


def draw_stack(ax: Axes, place: float, bar: LabelledBar, upright: bool = False) -> None:
    """Draws the parts of a bar end to end at `place`."""
    end = 0.0
    for name, length in bar.parts.items():
        if length and upright:
            ax.bar(place, length, bottom=end, width=BAR, **bar.style(name))
        elif length:
            ax.barh(place, length, left=end, height=BAR, **bar.style(name))
        end += length


def draw_tick(ax: Axes, value: float | None, place: float, colour: str, upright: bool = False,
              width: float = 3) -> None:
    """Draws a mark, `width` points thick, at `value` across the bar at `place`; nothing where value
    is None."""
    if value is not None:
        lines = ax.hlines if upright else ax.vlines
        lines(value, place - 0.43, place + 0.43, color=colour, linewidth=width, zorder=4)
        if colour == palette.GUESSED:  # a shape of its own, too, for who cannot tell the colours
            at = (place - 0.43, value) if upright else (value, place - 0.43)
            ax.plot(*at, **GUESS_MARKER, zorder=5)


def draw_whisker(ax: Axes, whisker: tuple[float, float] | None, place: float) -> None:
    """Draws the prediction's uncertainty, from low to high; nothing where it is None."""
    if whisker:
        ax.hlines(place, *whisker, color=palette.PREDICTED, linewidth=1.3, zorder=4)
        ax.vlines(whisker, place - 0.14, place + 0.14, color=palette.PREDICTED, linewidth=1.3,
                  zorder=4)


def draw_legend(figure: Figure, bars: Iterable[LabelledBar], *others: Artist) -> None:
    """Draws a legend above the chart: the parts that can be seen in any bar, the ticks that there
    are, and handles of the chart's own. Parts that look the same, as the optimizer's state and its
    step do, share an entry."""
    bars, styles = list(bars), {}
    some_pale = len({bar.is_pale for bar in bars}) == 2
    for bar in reversed(bars):  # the later one prevails
        # Only "predicted only" is hatched where both kinds are drawn, or it would look like a part.
        shown = replace(bar, is_pale=bar.is_pale and not some_pale)
        styles.update({name: shown.style(name) for name, length in bar.parts.items()
                       if name and length > 0.002 * bar.total})
    if some_pale:
        others = (*others, Patch(label="predicted only",
                                 **LabelledBar({}, is_pale=True).style("other")))
    if any(bar.whisker for bar in bars):
        others = (*others, Line2D([], [], color=palette.PREDICTED, linewidth=1.3, marker="|",
                                  markersize=7, label="the prediction's uncertainty"))
    order = [*palette.PARTS, *styles]
    entries: dict[str, tuple[list[str], dict]] = {}
    for name in sorted(styles, key=order.index):
        entries.setdefault(repr(sorted(styles[name].items())), ([], styles[name]))[0].append(name)
    ticks = (("predicted", {"color": palette.PREDICTED}, "predicted"),
             ("guessed", GUESS_MARKER, "your guess"))
    legend_above(figure, [
        *(Patch(label=", ".join(names), **style) for names, style in entries.values()),
        *(Line2D([], [], linewidth=3, label=label, **style) for kind, style, label in ticks
          if any(getattr(bar, kind) is not None for bar in bars)), *others])


def bar_chart(names: Sequence[str], panels: Sequence[Sequence[LabelledBar]],
              axis_titles: Sequence[str], height: float, size: float = 10,
              places: Sequence[float] = ()) -> tuple[Figure, list[Axes]]:
    """A figure of `height` inches with a row for each name and a panel for each list of bars.
    size: of the labels, in points. places: of the rows, counted in rows, if not evenly spaced."""
    figure, grid = canvas(WIDTH, height, ncols=len(panels), sharey=True, squeeze=False)
    figure.get_layout_engine().set(wspace=0.05)  # the numbers of two axes must not touch
    inches = axis_inches(names) / len(panels) - (0.25 if len(panels) > 1 else 0)
    places = places or range(len(names))
    for ax, bars, title in zip(grid[0], panels, axis_titles, strict=True):
        _draw_bars(ax, bars, places, inches, size)
        ax.set_xlabel(title)
    name_rows(grid[0][0], names, places=places)
    return figure, list(grid[0])


def _draw_bars(ax, bars, places, inches, size):
    """Bars with ticks and labels on an axis of `inches` that ends right of all of them."""
    rooms = [CHARACTER * (len(bar.label) + 3) for bar in bars]
    longest = max(max(bar.end, bar.guessed or 0) for bar in bars) or 1
    per_inch, right = longest / (inches - max(rooms)), 1.03 * longest
    for place, bar, room in zip(places, bars, rooms, strict=True):
        draw_stack(ax, place, bar)
        draw_whisker(ax, bar.whisker, place)
        draw_tick(ax, bar.predicted, place, palette.PREDICTED)
        draw_tick(ax, bar.guessed, place, palette.GUESSED)
        draw_tick(ax, bar.limit, place, palette.RANK_FAILED, width=5)
        # The label stands right of the bar and the predicted tick; right of the guess too, where
        # that would lie under it.
        hidden = bar.guessed and bar.end < bar.guessed < bar.end + room * per_inch
        start = bar.guessed if hidden else bar.end
        right = max(right, start + room * per_inch)
        ax.annotate(bar.label, (start, place), xytext=(8, 0), textcoords="offset points",
                    va="center", fontsize=size, **ON_PAPER,
                    color=palette.INK if bar.limit is None else palette.RANK_FAILED)
    ax.set_xlim(0, right)
    plain_numbers(ax.xaxis)


def draw_limit(ax: Axes, value: float, colour: str = palette.MUTED) -> dict[str, Any]:
    """Draws a dashed line across all bars at `value` and returns its style, for a legend."""
    style = {"color": colour, "linestyle": (0, (4, 3)), "linewidth": 1.1, "zorder": 0.5}
    ax.axvline(value, **style)
    ax.set_xlim(0, max(ax.get_xlim()[1], 1.05 * value))
    return style


def clear_of(ax: Axes, value: float, inches: float) -> None:
    """Moves the labels of bars, through which a line at `value` would run, right of it. inches: of
    the axis."""
    per_inch = ax.get_xlim()[1] / inches
    for label in ax.texts:
        end = label.xy[0] + (CHARACTER * len(label.get_text()) + 0.15) * per_inch
        if label.xy[0] < value < end:
            label.xy = (value, label.xy[1])
            ax.set_xlim(0, max(ax.get_xlim()[1], end - label.xy[0] + 2 * value - label.xy[0]))


def axis_inches(names: Iterable[str]) -> float:
    """Inches that are left for the axis of a chart whose rows have these names."""
    return WIDTH - 0.35 - CHARACTER * max(len(line) for name in names for line in name.split("\n"))


def name_rows(ax: Axes, names: Sequence[str], above: float = 0.55, places: Sequence[float] = (),
              size: float = 10) -> None:
    """Names the rows of horizontal bars, the first one on top; above: rows of space over it."""
    places = places or range(len(names))
    ax.set_yticks(places, names)
    ax.tick_params(axis="y", labelcolor=palette.INK, labelsize=size)
    ax.set_ylim(places[-1] + 0.5, -above)


def plain_numbers(axis: Axis) -> None:
    """Writes the axis's numbers out, with commas, in place of matplotlib's powers and offsets."""
    axis.set_major_formatter(lambda value, _: f"{value:,g}")


def whole_numbers(axis: Axis) -> None:
    """Leaves out the ticks between whole numbers, of what is counted."""
    axis.get_major_locator().set_params(integer=True)


def headline(figure: Figure, text: str) -> None:
    """Writes what is to be seen above all else; the figure needs HEADLINE inches for it, and grows
    where it takes several lines. To be called before `legend_above`, of which it becomes the title.
    """
    if text:
        lines = textwrap.wrap(text, _TITLE_CHARACTERS)
        _grow(figure, HEADLINE * (len(lines) - 1))
        figure.suptitle("\n".join(lines), x=0.01, ha="left", **_HEADLINE)


def _grow(figure: Figure, inches: float) -> None:
    figure.set_figheight(figure.get_figheight() + inches)


def answered(guess: float | None, found: float, unit: str = "") -> str:
    """A guess answered in words: right within 5 %, else how far off; "" without a guess."""
    if guess is None:
        return ""
    truth = f"{format_number(found)} {unit}".strip()
    words = f"You guessed {format_number(guess)}, and it is {truth}: "
    if abs(guess - found) <= 0.05 * abs(found):
        return words + "right."
    high = "high" if guess > found else "low"
    if found * guess <= 0:
        return words + f"too {high}."
    times = max(guess / found, found / guess)
    off = f"{times:.2g} times" if times >= 2 else f"{abs(guess / found - 1):.0%}"
    return words + f"{off} too {high}."


def answers(bars: Iterable[tuple[str, LabelledBar]], unit: str) -> list[str]:
    """The guesses of (name, bar) answered in words, each answer once."""
    found = {}
    for name, bar in bars:
        if words := answered(bar.guessed, bar.total or bar.predicted or 0, unit):
            found.setdefault(words, " ".join(name.split()))
    return [words if len(found) == 1 else f"{name}: {words[0].lower()}{words[1:]}"
            for words, name in found.items()]


def note_below(figure: Figure, note: str) -> None:
    """Writes a note below the chart, which must have NOTE_LINE inches for each of its lines, and
    grows where one is too long."""
    if note:
        lines = [textwrap.wrap(line, _NOTE_CHARACTERS) or [""] for line in note.split("\n")]
        _grow(figure, NOTE_LINE * sum(len(parts) - 1 for parts in lines))
        figure.supxlabel("\n".join(sum(lines, [])), fontsize=10, x=0.01, ha="left")


def legend_above(figure: Figure, handles: list[Artist]) -> None:
    """Draws the legend above the chart, in as many rows as it needs."""
    if not handles:
        return
    inches = [CHARACTER * len(handle.get_label()) + 0.4 for handle in handles]
    rows = next((rows for rows in (1, 2, 3) if _legend_inches(inches, rows) <= WIDTH), 3)
    columns = -(-len(handles) // rows)
    # matplotlib fills a legend column by column; this way it is read row by row.
    by_column = zip_longest(*(handles[at:at + columns] for at in range(0, len(handles), columns)))
    legend = figure.legend(handles=[handle for column in by_column for handle in column if handle],
                           ncols=columns, loc="outside upper left", frameon=False, fontsize=9.5,
                           handlelength=1.4, columnspacing=1.2)
    if lesson := figure.get_suptitle():
        # A legend outside of the axes would be drawn over the figure's own title.
        figure.suptitle("")
        legend.set_title(lesson)
        legend.get_title().set(**_HEADLINE)
        legend.set_alignment("left")


def _legend_inches(inches: list[float], rows: int) -> float:
    """How wide a legend is whose entries are so wide: a column is as wide as its widest entry."""
    columns = -(-len(inches) // rows)
    return sum(max(inches[at::columns]) for at in range(columns))
