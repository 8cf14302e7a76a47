"""A rank's memory by category: stacked bars with the prediction's and the student's tick, and lines
at the capacities of GPUs; a bar for each strategy, or a column for each number of ranks."""

import textwrap
from dataclasses import dataclass, replace

from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from labs.pictures import capacities as gpu_lines
from labs.pictures import marks, palette
from labs.pictures.capacities import Capacity
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.training.memory_categories import Memory

ROW = 0.46  # inches from one bar to the next
OVERHEAD = "CUDA, NCCL"  # the legend's name for what a process holds in addition to its tensors
_OVERHEAD_STYLE = {"facecolor": palette.PAPER, "edgecolor": palette.MUTED, "linewidth": 1,
                   "linestyle": (0, (2, 1.5))}


@dataclass(frozen=True)
class MemoryRow:
    """One rank's memory, in bytes.

    measured is drawn in full colours; without it, the predicted Memory in pale ones. predicted: a
    Memory, or a number for its tick alone; guessed: the student's tick. overhead: what CUDA and
    NCCL hold in addition to tensors. out_of_memory: the rank ran out of memory at `limit` bytes
    (None: at the chart's smallest capacity), and the bar, if any, is what it held or would have
    needed. source: how `measured` was found, in words.
    """

    name: str
    measured: Memory | None = None
    predicted: Memory | float | None = None
    guessed: float | None = None
    overhead: float = 0
    out_of_memory: bool = False
    limit: float | None = None
    source: str = "measured"

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

    @property
    def end(self) -> float:
        """Where the rightmost of bar, prediction and limit is."""
        return max(self.bar.total + self.overhead, self.predicted_total or 0, self.limit or 0)


def memory_bars(rows: list[MemoryRow], title: str = "", capacities: list[Capacity] = (),
                unit: str | None = None, note: str = "") -> Picture:
    """A picture with a horizontal bar for each row, by category.

    title: what the axis counts, after its unit, e.g. "of one rank at the peak". capacities: (bytes,
    name) of lines across all bars; those far beyond the longest bar are left out. unit: "GB" (10^9
    bytes), "MB" ...; None: the one that suits. note: a sentence above the chart. Raises ValueError
    for a row that is out of memory where neither it nor the chart has a limit.
    """
    rows = [_with_limit(row, capacities) for row in rows]
    layout = _Layout(rows, capacities, unit)
    lines = textwrap.wrap(note, int(layout.wide / 0.075))
    figure, ax = canvas(WIDTH, 1.05 + ROW * len(rows) + layout.heads + 0.22 * len(lines))
    ax.set_title("\n".join(lines), loc="left", fontsize=10)
    marks.name_rows(ax, [row.name for row in rows], above=0.55 + layout.heads / ROW)
    marks.draw_bars(ax, [layout.drawn(row) for row in rows], layout.wide,
                    layout.right / layout.size)
    gpu_lines.draw_upright(ax, layout.lines, layout.size, -0.5, ROW)
    ax.set_xlabel(_axis_title(ax.xaxis, layout.unit, title))
    _legend(figure, rows)
    return Picture(figure, _in_words(rows, title, layout, note), data=rows)


class _Layout:
    """How the axis of a chart is laid out. longest: bytes of the longest bar or tick; unit, size:
    the axis's unit and its bytes; right: bytes at the axis's end; wide: inches of the axis; shown:
    the capacities drawn; lines: these with the level of their names; heads: inches of the names."""

    def __init__(self, rows, capacities, unit=None):
        self.longest = (max((max(row.end, row.guessed or 0) for row in rows), default=0)
                        or min(capacities, default=(1,))[0])  # nothing to draw, but an axis
        self.unit, self.size = marks.unit_for(self.longest, unit)
        self.wide = marks.axis_inches(row.name for row in rows)
        self.shown = gpu_lines.capacities_shown(capacities, self.longest)
        names = [line[0] + len(line[1]) * gpu_lines.SIZE * self.longest / self.wide
                 for line in self.shown[-1:]]
        spans = marks.label_spans([self.drawn(row) for row in rows], self.wide)
        self.right = max([1.03 * self.longest, *(1.12 * end for end in names),
                          *(end * self.size for _, end in spans)])
        self.lines = gpu_lines.name_levels(
            gpu_lines.merge_close(self.shown, 0.012 * self.right), self.right / self.wide)
        levels = [level for *_, level in self.lines]
        self.heads = 0.17 + gpu_lines.LEVEL * max(levels) if levels else 0

    def number(self, nbytes: float) -> str:
        """Bytes in the chart's unit, without its name."""
        return marks.format_number(nbytes / self.size)

    def label(self, row) -> str:
        """The text right of a bar."""
        if row.out_of_memory:
            return f"✗ out of memory at {self.number(row.limit)} {self.unit}"
        if not row.bar.total:
            total = row.predicted_total
            return "" if total is None else f"{self.number(total)} {self.unit}"
        overhead = f" + {self.number(row.overhead)}" if row.overhead else ""
        return f"{self.number(row.bar.total)}{overhead} {self.unit}"

    def drawn(self, row) -> marks.LabelledBar:
        """The row in the chart's unit."""
        parts = _parts(row, self.size)
        if row.out_of_memory and not row.bar.total:  # the limit is all that is known
            parts = [(row.limit / self.size, {"color": palette.BORDER, "alpha": 0.5})]
        predicted = None if row.is_pale else row.predicted_total
        ticks = (value and value / self.size for value in (predicted, row.guessed, row.limit))
        return marks.LabelledBar(parts, self.label(row), *ticks)


def _with_limit(row, capacities) -> MemoryRow:
    if not row.out_of_memory or row.limit is not None:
        return row
    if not capacities:
        raise ValueError(f"{row.name!r} ran out of memory, but at how many bytes? Give the row a "
                         "limit, or the picture a capacity")
    return replace(row, limit=min(capacities)[0])


def _parts(row, size) -> list[tuple[float, dict]]:
    """(length in the chart's unit, style) of each part of a bar."""
    parts = [(nbytes / size, _style(name, row.is_pale)) for name, nbytes in
             row.bar.by_name().items()]
    return [*parts, (row.overhead / size, _OVERHEAD_STYLE)]


def _style(name, pale) -> dict:
    """The colour of a category, or a pale hatching of it where nothing was measured."""
    colour = palette.MEMORY[name]
    if not pale:
        return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5}
    mixed = tuple(0.45 * part + 0.55 for part in to_rgb(colour))
    return {"facecolor": mixed, "edgecolor": colour, "linewidth": 0.0, "hatch": "////"}


def _axis_title(axis, unit, title) -> str:
    """What the axis counts, in words; its numbers are written out."""
    marks.plain_numbers(axis)
    powers = {"GB": " (10⁹ bytes)", "MB": " (10⁶ bytes)", "kB": " (10³ bytes)"}
    return f"{unit}{powers.get(unit, '')} {title}".strip()


def _legend(figure, rows):
    """The categories that occur, then what the marks mean, in two lines where one is too long."""
    pale, full = any(row.is_pale for row in rows), any(row.measured for row in rows)
    names = [name for name in palette.MEMORY if any(row.bar.by_name()[name] for row in rows)]
    categories = [Patch(label=name, **_style(name, pale and not full)) for name in names]
    others = marks.tick_handles(replace(row, predicted=None) if row.is_pale else row
                                for row in rows)
    if any(row.overhead for row in rows):
        others.append(Patch(label=OVERHEAD, **_OVERHEAD_STYLE))
    if pale and full:
        others.append(Patch(label="predicted only", **_style("other", True)))
    if len(categories) + 1.2 * len(others) <= 7.45:
        marks.legend_above(figure, categories + others)
        return
    # matplotlib fills a legend column by column, so categories and marks alternate.
    empty = [Patch(alpha=0, label=" ")] * (len(categories) - len(others))
    marks.legend_above(figure, [handle for pair in zip(categories, others + empty, strict=False)
                                for handle in pair], columns=len(categories))


def _in_words(rows, title, layout, note) -> str:
    sentences = [_sentence(row, layout) for row in rows]
    limits = [f"{name} has {layout.number(size)} {layout.unit}" for size, name in layout.shown]
    return "\n".join([f"{layout.unit} {title}".strip(), *sentences, *limits, *filter(None, [note])])


def _sentence(row, layout) -> str:
    number, unit = layout.number, layout.unit
    parts = [f"out of memory at {number(row.limit)} {unit}"] if row.out_of_memory else []
    if row.measured is not None or row.is_pale:
        source = "predicted" if row.is_pale else row.source
        parts.append(f"{source} {number(row.bar.total)} {unit}{_by_category(row.bar, number)}")
    if row.overhead:
        parts.append(f"and {number(row.overhead)} {unit} for CUDA and NCCL")
    parts += marks.tick_words(None if row.is_pale else row.predicted_total, row.guessed, number)
    return f"{', '.join(row.name.splitlines())}: " + (", ".join(parts) or "nothing yet")


def _by_category(memory, number) -> str:
    """` (parameters 0.4, activations 0.8)`; categories below a ten-thousandth are left out."""
    parts = ", ".join(f"{name} {number(nbytes)}" for name, nbytes in memory.by_name().items()
                      if nbytes > 1e-4 * memory.total)
    return f" ({parts})" if parts else ""


def memory_columns(measured: dict[str, Memory], predicted: dict[str, Memory | float] | None = None,
                   title: str = "", capacities: list[Capacity] = (), unit: str | None = None,
                   below: str = "", source: str = "measured", note: str = "") -> Picture:
    """A picture with a column for each name, by category. predicted: the tick; a name
    that is only there gets a pale column. below: what the names are; source: how `measured` was
    found. The rest as for `memory_bars`."""
    predicted = predicted or {}
    names = list(predicted if set(measured) <= set(predicted) else {**measured, **predicted})
    rows = [MemoryRow(name, measured.get(name), predicted.get(name), source=source)
            for name in names]
    layout = _Layout(rows, capacities, unit)
    top = 1.12 * max([layout.longest, *(line[0] for line in layout.shown)])
    lines = textwrap.wrap(note, 112)
    figure, ax = canvas(WIDTH, 3.6 + 0.2 * len(lines))
    for place, row in enumerate(rows):
        _draw_column(ax, place, row, layout, top)
    ax.set_ylim(0, top / layout.size)
    ax.set_xlim(-0.6, len(rows) - 0.4 + (0.03 + 0.13 * len(rows) if layout.shown else 0))
    gpu_lines.draw_across(ax, gpu_lines.merge_close(layout.shown, 0.012 * top), layout.size,
                          len(rows) - 0.45, 0.065 * top)
    ax.set_xticks(range(len(rows)), names)
    ax.tick_params(axis="x", labelcolor=palette.INK)
    ax.set_xlabel(below)
    ax.set_title("\n".join([*lines, _axis_title(ax.yaxis, layout.unit, title)]), loc="left",
                 fontsize=10)
    _legend(figure, rows)
    return Picture(figure, _in_words(rows, title, layout, note), data=rows)


def _draw_column(ax, place, row, layout, top):
    height = marks.draw_stack(ax, place, _parts(row, layout.size), upright=True)
    predicted = row.predicted_total and row.predicted_total / layout.size
    if not row.is_pale:
        marks.draw_tick(ax, predicted, place, palette.PREDICTED, upright=True)
    ax.text(place, max(height, predicted or 0) + 0.015 * top / layout.size,
            marks.format_number(height), ha="center", va="bottom", fontsize=10, zorder=3,
            color=palette.INK, bbox={"facecolor": palette.PAPER, "edgecolor": "none", "pad": 0.8})

