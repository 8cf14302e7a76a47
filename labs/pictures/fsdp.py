"""Several measures of the same variants side by side: one row for each variant, one panel for each
measure, with the formula's and the student's tick, and a limit that a bar may run into."""

from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.pictures import palette
from labs.pictures.marks import beside, number, tick
from labs.pictures.outcomes import FAILED
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.training.memory_categories import Memory

ROW = 0.5  # inches from one variant to the next
_HIGH = 0.62  # of a bar, in rows
_LIMIT = {"color": FAILED, "linestyle": (0, (4, 3)), "linewidth": 1.2, "zorder": 0.5}


@dataclass(frozen=True)
class Panel:
    """One measure. unit: its name, and size how much of what `values` count one unit is. values:
    one per variant, a number or a Memory in bytes (None: nothing to draw, and `missing` says why).
    predicted, guessed: ticks, one per variant, None where there is none. limit: a line across.
    died: variants that ran into it. colour: of numbers."""

    title: str
    unit: str
    values: list
    size: float = 1
    predicted: list = ()
    guessed: list = ()
    limit: float = None
    died: tuple = ()
    missing: str = "–"
    colour: str = palette.RANKS[0]

    def end(self, place) -> float:
        value = self.values[place]
        return value.total if isinstance(value, Memory) else (value or 0)

    def mark(self, kind, place):
        """The formula's ("predicted") or the student's ("guessed") tick of a variant, or None."""
        ticks = getattr(self, kind)
        return ticks[place] if ticks else None

    @property
    def most(self) -> float:
        """Where its rightmost mark is."""
        marks = [*self.predicted, *self.guessed, self.limit]
        return max([self.end(p) for p in range(len(self.values))] + [m for m in marks if m]) or 1


def side_by_side(names: list, panels: list, note: str = "") -> Picture:
    """A row for each name, a column for each Panel."""
    height = 1.45 + ROW * len(names) + (0.25 if note else 0)
    figure, grid = canvas(WIDTH, height, nrows=1, ncols=len(panels), sharey=True, squeeze=False)
    axes = grid[0]
    for ax, panel in zip(axes, panels, strict=True):
        _draw(ax, panel, len(names))
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(len(names) - 0.45, -0.55)
    for ax in axes:
        ax.tick_params(axis="y", labelcolor=palette.INK, length=0)
    if note:
        figure.supxlabel(note, fontsize=10, x=0.01, ha="left")
    _legend(figure, panels)
    return Picture(figure, _text(names, panels, note), data=dict(zip(
        [panel.title for panel in panels], panels, strict=True)))


def _draw(ax, panel, rows):
    for place in range(rows):
        _bar(ax, panel, place)
        for kind, colour in (("predicted", palette.PREDICTED), ("guessed", palette.GUESSED)):
            value = panel.mark(kind, place)
            tick(ax, value and value / panel.size, place, colour)
        _words(ax, panel, place)
    if panel.limit:
        ax.axvline(panel.limit / panel.size, **_LIMIT)
    ax.set_xlim(0, 1.4 * panel.most / panel.size)
    ax.set_title(panel.title, fontsize=10, loc="left", color=palette.INK)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.locator_params(axis="x", nbins=4)
    ax.set_xlabel(panel.unit)


def _bar(ax, panel, place):
    value, left = panel.values[place], 0.0
    if not isinstance(value, Memory):
        ax.barh(place, (value or 0) / panel.size, height=_HIGH, color=panel.colour)
    else:
        for name, nbytes in value.by_name().items():
            ax.barh(place, nbytes / panel.size, left=left, height=_HIGH,
                    color=palette.MEMORY[name])
            left += nbytes / panel.size
    if place in panel.died:
        ax.vlines(panel.limit / panel.size, place - 0.45, place + 0.45, color=FAILED, linewidth=5,
                  zorder=4)


def _words(ax, panel, place):
    died = place in panel.died
    end = max(panel.end(place), panel.limit if died else 0)
    room = 0.35 * panel.most
    end = beside(end, panel.mark("predicted", place), panel.mark("guessed", place), room)
    ax.annotate(_said(panel, place), (end / panel.size, place), xytext=(7, 0),
                textcoords="offset points", va="center", fontsize=9.5, zorder=3,
                color=FAILED if died else palette.INK,
                bbox={"facecolor": palette.PAPER, "edgecolor": "none", "pad": 1.2})


def _said(panel, place) -> str:
    if place in panel.died:
        return f"✗ {number(panel.end(place) / panel.size)}"
    value = panel.values[place]
    return panel.missing if value is None else number(panel.end(place) / panel.size)


def _legend(figure, panels):
    held = [v for panel in panels for v in panel.values if isinstance(v, Memory)]
    handles = [Patch(color=colour, label=name) for name, colour in palette.MEMORY.items()
               if any(value.by_name()[name] > 0.002 * value.total for value in held)]
    ticks = (("predicted", palette.PREDICTED, "predicted"),
             ("guessed", palette.GUESSED, "your guess"))
    handles += [Line2D([], [], color=colour, linewidth=3, label=label)
                for kind, colour, label in ticks
                if any(v is not None for panel in panels for v in getattr(panel, kind))]
    if any(panel.limit for panel in panels):
        handles.append(Line2D([], [], label="the limit", **_LIMIT))
    if handles:
        rows = 1 if len(handles) < 8 else 2
        figure.legend(handles=handles, loc="outside upper left", frameon=False, fontsize=9.5,
                      ncols=-(-len(handles) // rows), handlelength=1.3, columnspacing=1.1)


def _text(names, panels, note) -> str:
    lines = [_sentence(name, place, panels) for place, name in enumerate(names)]
    limits = [f"the limit is {number(p.limit / p.size)} {p.unit}" for p in panels if p.limit]
    return "\n".join([*lines, *limits, *([note] if note else [])])


def _sentence(name, place, panels) -> str:
    return f"{name}: " + "; ".join(_one(panel, place) for panel in panels)


def _one(panel, place) -> str:
    unit = "" if panel.values[place] is None else f" {panel.unit}"
    words = f"{panel.title} {_said(panel, place)}{unit}"
    if place in panel.died:
        words = f"{panel.title}: out of memory, needs {_said(panel, place)[2:]} {panel.unit}"
    for kind, label in (("predicted", "predicted"), ("guessed", "your guess")):
        value = panel.mark(kind, place)
        words += f", {label} {number(value / panel.size)}" if value is not None else ""
    return words
