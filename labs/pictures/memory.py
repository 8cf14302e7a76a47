"""A rank's memory by category: stacked bars with the prediction's and the student's tick, and lines
at the capacities of GPUs; a bar for each strategy, or a column for each number of ranks."""

import textwrap
from dataclasses import dataclass, replace

from matplotlib.axes import Axes

from labs.meters.metrics import Metric, name_of
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.training.memory_categories import Memory

ROW = 0.46  # inches from one bar to the next
_LINE = {"color": palette.MUTED, "linestyle": (0, (4, 3)), "linewidth": 1, "zorder": 0.5}
_NAME = {"color": palette.MUTED, "fontsize": 9}
SIZE = 0.9 * marks.CHARACTER  # inches of a character of a name
LEVEL = 0.19  # inches from a name to the next above it

Capacity = tuple[float, str]  # (bytes, name)


@dataclass(frozen=True)
class MemoryRow:
    """One rank's memory, in bytes.

    measured is drawn in full colours; without it, the predicted Memory in pale ones. predicted: a
    Memory, or a number for its tick alone; guessed: the student's tick. overhead: what CUDA and
    NCCL hold in addition to tensors. out_of_memory: the rank ran out of memory at `limit` bytes
    (None: at the chart's smallest capacity), and the bar, if any, is what it held or would have
    needed. source: how `measured` was found, in words. interval: (low, high) of the bar's end,
    overhead included, as a whisker.
    """

    name: str
    measured: Memory | None = None
    predicted: Memory | float | None = None
    guessed: float | None = None
    overhead: float = 0
    out_of_memory: bool = False
    limit: float | None = None
    source: str = "measured"
    interval: tuple[float, float] | None = None

    @property
    def bar(self) -> Memory:
        """What is drawn by category."""
        found = self.measured if self.measured is not None else self.predicted
        return found if isinstance(found, Memory) else Memory()

    @property
    def predicted_total(self) -> float | None:
        """The predicted bytes in total, or None."""
        return self.predicted.total if isinstance(self.predicted, Memory) else self.predicted

    @property
    def is_pale(self) -> bool:
        """Whether nothing was measured, so that the bar itself is the prediction."""
        return self.measured is None and isinstance(self.predicted, Memory)

    def drawn(self, unit: marks.Unit) -> marks.LabelledBar:
        """The row in the chart's unit."""
        parts = {**self.bar.by_name(), marks.OVERHEAD: self.overhead}
        if self.out_of_memory and not self.bar.total:  # the limit is all that is known
            parts = {"": self.limit}
        ticks = (None if self.is_pale else self.predicted_total, self.guessed, self.limit)
        return marks.LabelledBar(
            {name: nbytes / unit.size for name, nbytes in parts.items()}, self.label(unit),
            *(value and value / unit.size for value in ticks), palette.GRID, self.is_pale,
            self.interval and tuple(end / unit.size for end in self.interval))

    def label(self, unit: marks.Unit) -> str:
        """The text right of the bar."""
        if self.out_of_memory:
            return f"✗ out of memory at {unit.text(self.limit)}"
        if not self.bar.total:
            return "" if self.predicted_total is None else unit.text(self.predicted_total)
        overhead = f" + {unit.number(self.overhead)}" if self.overhead else ""
        return f"{unit.number(self.bar.total)}{overhead} {unit.name}"

    def metric(self, title: str) -> Metric | None:
        """The measured bytes; None of what was computed, or ran out of memory."""
        if self.measured is None or self.source != "measured" or self.out_of_memory:
            return None
        return Metric(name_of(self.name, title), self.measured.total, "bytes", self.predicted_total)

    def words(self, unit: marks.Unit) -> str:
        """The row in a sentence."""
        bar = self.drawn(unit)
        parts = [f"out of memory at {unit.text(self.limit)}"] if self.out_of_memory else []
        if self.measured is not None or self.is_pale:
            source = "predicted" if self.is_pale else self.source
            parts.append(f"{source} {unit.text(self.bar.total)}{bar.by_part()}")
        if self.overhead:
            parts.append(f"and {unit.text(self.overhead)} for CUDA and NCCL")
        said = ", ".join(parts + bar.tick_words()) or "nothing yet"
        return f"{', '.join(self.name.splitlines())}: {said}"


def memory_bars(rows: list[MemoryRow], title: str = "", capacities: list[Capacity] = (),
                unit: str | None = None, note: str = "", lesson: str = "") -> Picture:
    """A picture with a horizontal bar for each row, by category.

    title: what the axis counts, after its unit, e.g. "of one rank at the peak". capacities: (bytes,
    name) of lines across all bars; those far beyond the longest bar are left out. unit: "GB" (10^9
    bytes), "MB" ...; None: the one that suits. note: a sentence above the chart; below it the
    guesses are answered. lesson: the picture's title. Raises ValueError for a row that is out of
    memory where neither it nor the chart has a limit.
    """
    rows = [_with_limit(row, capacities) for row in rows]
    shown, unit = _shown(rows, capacities, unit)
    names = [row.name for row in rows]
    wide = marks.axis_inches(names)
    lines = textwrap.wrap(note, int(wide / 0.075))
    bars = [row.drawn(unit) for row in rows]
    answers = "\n".join(marks.answers([pair for pair, row in zip(
        zip(names, bars, strict=True), rows, strict=True) if row.bar.total], unit.name))
    figure, [ax] = marks.bar_chart(names, [bars], [_axis_title(unit, title)],
                                   1.05 + ROW * len(rows) + 0.22 * len(lines)
                                   + marks.NOTE_LINE * len(answers.splitlines())
                                   + marks.HEADLINE * bool(lesson))
    marks.headline(figure, lesson)
    marks.note_below(figure, answers)
    ax.set_title("\n".join(lines), loc="left", fontsize=10)
    _lines_upright(ax, shown, unit.size, wide, ROW)
    marks.draw_legend(figure, bars)
    picture = _picture(figure, rows, title, unit, shown,
                       "\n".join(filter(None, [note, answers])))
    picture.text = "\n".join(filter(None, [lesson, picture.text]))
    return picture


def _picture(figure, rows, title, unit, shown, note) -> Picture:
    return Picture(figure, _in_words(rows, title, unit, shown, note), data=rows,
                   metrics=[metric for row in rows if (metric := row.metric(title))])


def _with_limit(row, capacities) -> MemoryRow:
    if not row.out_of_memory or row.limit is not None:
        return row
    if not capacities:
        raise ValueError(f"{row.name!r} ran out of memory, but at how many bytes? Give the row a "
                         "limit, or the picture a capacity")
    return replace(row, limit=min(capacities)[0])


def _shown(rows, capacities, unit) -> tuple[list[Capacity], marks.Unit]:
    """The capacities that are drawn, and the axis's unit."""
    in_bytes = [row.drawn(marks.Unit("bytes")) for row in rows]
    longest = (max((max(bar.end, bar.guessed or 0) for bar in in_bytes), default=0)
               or min(capacities, default=(1,))[0])  # nothing to draw, but an axis
    return capacities_shown(capacities, longest), marks.unit_for(longest, unit)


def _axis_title(unit, title) -> str:
    powers = {"GB": " (10⁹ bytes)", "MB": " (10⁶ bytes)", "kB": " (10³ bytes)"}
    return f"{unit.name}{powers.get(unit.name, '')} {title}".strip()


def _in_words(rows, title, unit, shown, note) -> str:
    return "\n".join([f"{unit.name} {title}".strip(), *(row.words(unit) for row in rows),
                      *(f"{name} has {unit.text(size)}" for size, name in shown),
                      *([note] if note else [])])


def memory_columns(measured: dict[str, Memory], predicted: dict[str, Memory | float] | None = None,
                   title: str = "", capacities: list[Capacity] = (), unit: str | None = None,
                   below: str = "", source: str = "measured", note: str = "",
                   lesson: str = "") -> Picture:
    """A picture with a column for each name, by category. predicted: the tick; a name
    that is only there gets a pale column. below: what the names are; source: how `measured` was
    found. The rest as for `memory_bars`."""
    predicted = predicted or {}
    names = list(predicted if set(measured) <= set(predicted) else {**measured, **predicted})
    rows = [MemoryRow(name, measured.get(name), predicted.get(name), source=source)
            for name in names]
    shown, unit = _shown(rows, capacities, unit)
    bars = [row.drawn(unit) for row in rows]
    top = 1.12 * max([*(bar.end for bar in bars), *(size / unit.size for size, _ in shown)])
    lines = textwrap.wrap(note, 112)
    figure, ax = canvas(WIDTH, 3.6 + 0.2 * len(lines) + marks.HEADLINE * bool(lesson))
    marks.headline(figure, lesson)
    for place, bar in enumerate(bars):
        marks.draw_stack(ax, place, bar, upright=True)
        marks.draw_tick(ax, bar.predicted, place, palette.PREDICTED, upright=True)
        ax.text(place, bar.end + 0.015 * top, marks.format_number(bar.total), ha="center",
                va="bottom", **marks.ON_PAPER)
    ax.set_ylim(0, top)
    ax.set_xlim(-0.6, len(rows) - 0.4 + (0.03 + 0.13 * len(rows) if shown else 0))
    _lines_across(ax, shown, unit.size, len(rows) - 0.45)
    ax.set_xticks(range(len(rows)), names)
    ax.tick_params(axis="x", labelcolor=palette.INK)
    ax.set_xlabel(below)
    marks.plain_numbers(ax.yaxis)
    ax.set_title("\n".join([*lines, _axis_title(unit, title)]), loc="left", fontsize=10)
    marks.draw_legend(figure, bars)
    picture = _picture(figure, rows, title, unit, shown, note)
    picture.text = "\n".join(filter(None, [lesson, picture.text]))
    return picture


def capacities_shown(capacities: list[Capacity], longest: float) -> list[Capacity]:
    """Those capacities that a chart shows whose longest bar has `longest` bytes: all that the bar
    crosses and the next larger one, unless that is so large that the bars would shrink to
    nothing."""
    next_larger = min((size for size, _ in capacities if size > longest), default=0)
    too_large = len(capacities) > 1 and next_larger > 4 * longest
    limit = max(longest, 0 if too_large else 1.02 * next_larger)
    return [line for line in capacities if line[0] <= limit]


def merge_close(capacities: list[Capacity], distance: float) -> list[Capacity]:
    """The capacities in ascending order, where those less than `distance` bytes above the first of
    a group become one line with the names of all, in the order given: `A100-80, H100`."""
    # Distances are measured from the first of a group, so that a chain of close ones cannot merge
    # all.
    groups = []
    for line in sorted(capacities):
        if groups and line[0] - groups[-1][0][0] < distance:
            groups[-1].append(line)
        else:
            groups.append([line])
    return [(group[0][0], ", ".join(line[1] for line in capacities if line in group))
            for group in groups]


def _lines_upright(ax: Axes, capacities: list[Capacity], unit: float, inches: float, row: float):
    """Draws vertical lines with their names above the first bar. The axis (of `inches`) ends right
    of the last name, and the figure grows by the inches that the names take. row: inches."""
    if not capacities:
        return
    lines = [(size / unit, name) for size, name in capacities]
    lines = merge_close(lines, 0.012 * max([ax.get_xlim()[1], *(1.1 * at for at, _ in lines)]))
    last, name = lines[-1]
    right = max(ax.get_xlim()[1], last / (1 - (SIZE * len(name) + 0.1) / inches))
    levels = _name_levels(lines, right / inches)
    (below, top), heads = ax.get_ylim(), 0.17 + LEVEL * max(levels)
    for (at, name), level in zip(lines, levels, strict=True):
        high = -0.5 - (LEVEL * level + 0.17) / row
        ax.vlines(at, high, below, **_LINE)
        ax.text(at, high, f" {name}", ha="left", va="top", **_NAME)
    ax.set_xlim(0, right)
    ax.set_ylim(below, top - heads / row)
    # By whole pixels, or every line would be blurred.
    ax.figure.set_figheight(ax.figure.get_figheight() + round(96 * heads) / 96)


def _name_levels(lines, per_inch) -> list[int]:
    """How high the name of each of the lines stands, which are in ascending order: right of its
    line, one level above all lines that it would run into. per_inch: of the axis."""
    placed = []
    for at, name in reversed(lines):
        end = at + (len(name) * SIZE + 0.1) * per_inch
        placed.append((at, max((level + 1 for other, level in placed if other < end), default=0)))
    return [level for _, level in reversed(placed)]


def _lines_across(ax: Axes, capacities: list[Capacity], unit: float, right: float):
    """Draws horizontal lines up to x = `right` and from there a leader to each name; names that
    would touch are moved apart."""
    left, free, top = ax.get_xlim()[0], 0.0, ax.get_ylim()[1]
    for at, name in merge_close([(size / unit, name) for size, name in capacities], 0.012 * top):
        height = max(at, free)
        ax.hlines(at, left, right, **_LINE)
        ax.plot([right, right + 0.2], [at, height], color=palette.MUTED, linewidth=0.7)
        ax.text(right + 0.2, height, f" {name}", ha="left", va="center", **_NAME)
        free = height + 0.065 * top
