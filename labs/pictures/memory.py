"""What a rank's memory holds, by category: stacked bars with the formula's and the student's tick,
the capacities of GPUs, and columns for the phases of a step or for numbers of ranks."""

import textwrap
from dataclasses import dataclass, replace

from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from labs.pictures import capacities as lines
from labs.pictures import palette
from labs.pictures.marks import CHARACTER, beside, number, tick, tick_handles, unit_for
from labs.pictures.outcomes import FAILED
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.training.memory_categories import Memory

ROW = 0.46  # inches from one bar to the next
_HIGH = 0.62  # of a bar, in rows
_BESIDE = {"facecolor": palette.PAPER, "edgecolor": palette.MUTED, "linewidth": 1,
           "linestyle": (0, (2, 1.5))}


@dataclass(frozen=True)
class Row:
    """One rank's memory, in bytes. measured is drawn in full colours; where there is none, the
    predicted Memory in pale ones. predicted, a Memory or a number, is the formula's tick; guessed
    the student's. overhead: held beside the tensors, by CUDA and NCCL. died: it ran out of memory
    at `limit` bytes (None: at the chart's first capacity) and the bar, if any, is what it held or
    would have needed."""

    name: str
    measured: Memory = None
    predicted: Memory | float = None
    guessed: float = None
    overhead: float = 0
    died: bool = False
    limit: float = None
    source: str = "measured"

    @property
    def bar(self) -> Memory:
        """What is drawn by category."""
        found = self.measured if self.measured is not None else self.predicted
        return found if isinstance(found, Memory) else Memory()

    @property
    def formula(self) -> float:
        """The predicted bytes together, or None."""
        whole = isinstance(self.predicted, Memory)
        return self.predicted.total if whole else self.predicted

    @property
    def end(self) -> float:
        """Where the row's rightmost mark is."""
        return max(self.bar.total + self.overhead, self.formula or 0, self.limit or 0)


def stacked(rows: list, title: str = "", capacities=(), unit: str = None,
            note: str = "") -> Picture:
    """A horizontal bar for each Row, by category. title: what the axis counts, after its unit, e.g.
    "of one rank at the peak". capacities: (bytes, name) of lines across all bars; those far beyond
    the longest bar are left out. unit: "GB" (10^9 bytes), "MB" ...; None: what is handy. note: a
    sentence above the chart."""
    rows = [_with_limit(row, capacities) for row in rows]
    room = _Room(rows, capacities, unit)
    said = textwrap.wrap(note, int(room.wide / 0.075))
    figure, ax = canvas(WIDTH, 1.05 + ROW * len(rows) + room.heads + 0.22 * len(said))
    ax.set_title("\n".join(said), loc="left", fontsize=10)
    ax.set_ylim(len(rows) - 0.5, -0.55 - room.heads / ROW)
    ax.set_xlim(0, room.right / room.size)
    for place, row in enumerate(rows):
        _bar(ax, place, row, room.size)
        _words_beside(ax, place, row, room)
    lines.upright(ax, room.lines, room.size, -0.5, ROW)
    ax.set_yticks(range(len(rows)), [row.name for row in rows])
    ax.tick_params(axis="y", labelcolor=palette.INK)
    ax.set_xlabel(_scale(ax.xaxis, room.unit, title))
    _legend(figure, rows)
    words = _text(rows, title, room) + (f"\n{note}" if note else "")
    return Picture(figure, words, data=rows)


class _Room:
    """How the axis of a chart is laid out. most: bytes of the longest bar or tick; unit, size: its
    name and bytes; right: bytes at the axis's end; wide: inches of it; lines: capacities with the
    level of their names; heads: inches that the names take."""

    def __init__(self, rows, capacities, unit=None):
        self.most = (max((max(row.end, row.guessed or 0) for row in rows), default=0)
                     or min(capacities, default=(1,))[0])
        self.unit, self.size = unit_for(self.most, unit)
        self.wide = WIDTH - 0.35 - CHARACTER * max(
            len(line) for row in rows for line in row.name.splitlines())
        self.seen = lines.shown(capacities, self.most)
        self.right = self._right(rows)
        self.lines = lines.levels(lines.merged(self.seen, 0.012 * self.right),
                                  self.right / self.wide)
        levels = [level for *_, level in self.lines]
        self.heads = 0.17 + lines.LEVEL * max(levels) if levels else 0

    def beside(self, row) -> float:
        """Inches that the words beside a bar take."""
        return CHARACTER * len(f"   {_said(row, self)}")

    def _right(self, rows) -> float:
        """Room for bars, the words beside them and the lines' names."""
        def end(row):
            words = self.beside(row) * self.most / self.wide
            return beside(row.end, row.formula, row.guessed, words) + 1.12 * words

        names = [line[0] + len(line[1]) * lines.SIZE * self.most / self.wide
                 for line in self.seen[-1:]]
        return max([1.03 * self.most, *map(end, rows), *(1.12 * name for name in names)])


def _with_limit(row, capacities) -> Row:
    if not row.died or row.limit is not None:
        return row
    if not capacities:
        raise ValueError(f"{row.name!r} died, but at how many bytes? Give the row a limit, or the "
                         "picture a capacity")
    return replace(row, limit=min(capacities)[0])


def _pale(row) -> bool:
    return row.measured is None and isinstance(row.predicted, Memory)


def _said(row, room) -> str:
    """The words beside a bar."""
    unit, size = room.unit, room.size
    if row.died:
        return f"✗ out of memory at {number(row.limit / size)} {unit}"
    if not row.bar.total:
        return "" if row.formula is None else f"{number(row.formula / size)} {unit}"
    beside_it = f" + {number(row.overhead / size)}" if row.overhead else ""
    return f"{number(row.bar.total / size)}{beside_it} {unit}"


def _bar(ax, place, row, size):
    left = 0.0
    for name, nbytes in row.bar.by_name().items():
        if nbytes:
            ax.barh(place, nbytes / size, left=left / size, height=_HIGH,
                    **_fill(name, _pale(row)))
            left += nbytes
    if row.overhead:
        ax.barh(place, row.overhead / size, left=left / size, height=_HIGH, **_BESIDE)
    if row.died:
        _death(ax, place, row, left, size)
    if not _pale(row):
        tick(ax, row.formula and row.formula / size, place, palette.PREDICTED)
    tick(ax, row.guessed and row.guessed / size, place, palette.GUESSED)


def _fill(name, pale) -> dict:
    """The colour of a category, or a pale hatching of it where nothing was measured."""
    colour = palette.MEMORY[name]
    if not pale:
        return {"facecolor": colour, "edgecolor": "white", "linewidth": 0.5}
    mixed = tuple(0.45 * part + 0.55 for part in to_rgb(colour))
    return {"facecolor": mixed, "edgecolor": colour, "linewidth": 0.0, "hatch": "////"}


def _death(ax, place, row, end, size):
    """A grey bar where nothing else is drawn, up to the limit, and a red wall there."""
    if not end:
        ax.barh(place, row.limit / size, height=_HIGH, color=palette.MEMORY["other"], alpha=0.5)
    ax.vlines(row.limit / size, place - 0.45, place + 0.45, color=FAILED, linewidth=5, zorder=4)


def _words_beside(ax, place, row, room):
    start = beside(row.end, row.formula, row.guessed, room.beside(row) * room.right / room.wide)
    ax.annotate(_said(row, room), (start / room.size, place), xytext=(8, 0),
                textcoords="offset points", va="center", fontsize=10, zorder=3,
                color=FAILED if row.died else palette.INK,
                bbox={"facecolor": palette.PAPER, "edgecolor": "none", "pad": 1.5})


def _scale(axis, unit, title) -> str:
    """Plain numbers on the axis; what it counts, in words."""
    axis.set_major_formatter(lambda value, _: f"{value:,g}")
    powers = {"GB": " (10⁹ bytes)", "MB": " (10⁶ bytes)", "kB": " (10³ bytes)"}
    return f"{unit}{powers.get(unit, '')} {title}".strip()


def _legend(figure, rows):
    """Categories that occur, then what the marks mean; in two rows where one is too long."""
    pale, full = any(map(_pale, rows)), any(row.measured for row in rows)
    names = [name for name in palette.MEMORY if any(row.bar.by_name()[name] for row in rows)]
    first = [Patch(label=name, **_fill(name, pale and not full)) for name in names]
    second = tick_handles([replace(row, predicted=None) if _pale(row) else row for row in rows])
    if any(row.overhead for row in rows):
        second.append(Patch(label="CUDA, NCCL", **_BESIDE))
    if pale and full:
        second.append(Patch(label="formula only", **_fill("other", True)))
    handles = first + second
    if len(first) + 1.2 * len(second) > 7.45:
        empty = [Patch(alpha=0, label=" ")] * (len(first) - len(second))
        handles = [one for pair in zip(first, second + empty, strict=False) for one in pair]
    figure.legend(handles=handles, loc="outside upper left", frameon=False, fontsize=9.5,
                  ncols=len(first) if len(handles) > len(first + second) else len(handles) or 1,
                  handlelength=1.4, columnspacing=1.3)


def _text(rows, title, room) -> str:
    return "\n".join([f"{room.unit} {title}".strip(), *(_sentence(row, room) for row in rows),
                      *(f"{name} has {number(at / room.size)} {room.unit}"
                        for at, name in room.seen)])


def _sentence(row, room) -> str:
    unit, size = room.unit, room.size
    parts = [f"out of memory at {number(row.limit / size)} {unit}"] if row.died else []
    if row.measured is not None:
        parts.append(f"{row.source} {in_words(row.measured, unit)}")
    elif isinstance(row.predicted, Memory):
        parts.append(f"predicted {in_words(row.predicted, unit)}")
    if row.overhead:
        parts.append(f"and {number(row.overhead / size)} {unit} beside its tensors")
    if row.formula is not None and not _pale(row):
        parts.append(f"the formula {number(row.formula / size)}")
    parts += [f"your guess {number(row.guessed / size)}"] if row.guessed is not None else []
    return f"{', '.join(row.name.splitlines())}: " + (", ".join(parts) or "nothing yet")


def in_words(memory: Memory, unit: str) -> str:
    """`1.2 GB (parameters 0.4, activations 0.8)`."""
    _, size = unit_for(memory.total, unit)
    parts = ", ".join(f"{name} {number(nbytes / size)}" for name, nbytes in memory.by_name().items()
                      if nbytes > 1e-4 * memory.total)
    return f"{number(memory.total / size)} {unit}" + (f" ({parts})" if parts else "")


def phases(named: dict, predicted: dict = None, title: str = "of one rank") -> Picture:
    """named: phase ("build", "forward", "backward", "step", "peak") -> Memory; a column each.
    predicted: phase -> bytes (or a Memory), the formula's tick."""
    return columns(named, predicted, title)


def columns(named: dict, predicted: dict = None, title: str = "", capacities=(), unit: str = None,
            below: str = "", source: str = "measured", note: str = "") -> Picture:
    """A column for each name -> Memory, by category. predicted: name -> bytes or Memory, the
    formula's tick; a name that is only there gets a pale column. capacities: (bytes, name) of
    lines across. below: what the names are. source: how the Memory of `named` was found."""
    predicted = predicted or {}
    names = list(predicted if set(named) <= set(predicted) else {**named, **predicted})
    rows = [Row(name, named.get(name), predicted.get(name), source=source) for name in names]
    room = _Room(rows, capacities, unit)
    top = 1.12 * max([room.most, *(line[0] for line in room.seen)])
    said = textwrap.wrap(note, 112)
    figure, ax = canvas(WIDTH, 3.6 + 0.2 * len(said))
    for place, row in enumerate(rows):
        _column(ax, place, row, room.size, top)
    ax.set_ylim(0, top / room.size)
    ax.set_xlim(-0.6, len(rows) - 0.4 + (0.03 + 0.13 * len(rows) if room.seen else 0))
    lines.lying(ax, lines.merged(room.seen, 0.012 * top), room.size, len(rows) - 0.45, 0.065 * top)
    ax.set_xticks(range(len(rows)), names)
    ax.tick_params(axis="x", labelcolor=palette.INK)
    ax.set_xlabel(below)
    ax.set_title("\n".join([*said, _scale(ax.yaxis, room.unit, title)]), loc="left", fontsize=10)
    _legend(figure, rows)
    words = _text(rows, title, room) + (f"\n{note}" if note else "")
    return Picture(figure, words, data=rows)


def _column(ax, place, row, size, top):
    height = 0.0
    for name, nbytes in row.bar.by_name().items():
        if nbytes:
            ax.bar(place, nbytes / size, bottom=height / size, width=_HIGH,
                   **_fill(name, _pale(row)))
            height += nbytes
    if not _pale(row):
        tick(ax, row.formula and row.formula / size, place, palette.PREDICTED, upright=True)
    ax.text(place, (max(height, row.formula or 0) + 0.015 * top) / size, number(height / size),
            ha="center", va="bottom", fontsize=10, zorder=3, color=palette.INK,
            bbox={"facecolor": palette.PAPER, "edgecolor": "none", "pad": 0.8})
