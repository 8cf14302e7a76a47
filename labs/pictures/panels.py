"""Several measures of the same strategies in one chart: a row per strategy and a panel per measure,
with the predicted and the student's tick, and a limit that a bar may exceed."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.training.memory_categories import Memory

ROW = 0.5  # inches from one strategy to the next
_LIMIT = {"color": palette.RANK_FAILED, "linestyle": (0, (4, 3)), "linewidth": 1.2, "zorder": 0.5}


@dataclass(frozen=True)
class Panel:
    """One measure. unit: its name; size: what one unit is in `values` (1e6 where bytes are drawn as
    MB). values: one per strategy, a number or a Memory in bytes; None draws nothing, and `missing`
    is its label. predicted, guessed: ticks, one per strategy, None where there is none. limit: a
    line across; out_of_memory: places of the strategies that exceeded it. colour: of numbers."""

    title: str
    unit: str
    values: Sequence[float | Memory | None]
    size: float = 1
    predicted: Sequence[float | None] = ()
    guessed: Sequence[float | None] = ()
    limit: float | None = None
    out_of_memory: tuple[int, ...] = ()
    missing: str = "–"
    colour: str = palette.RANKS[0]

    def end(self, place: int) -> float:
        """Where the bar at this place ends; 0 without a bar."""
        value = self.values[place]
        return value.total if isinstance(value, Memory) else (value or 0)

    def drawn(self, place: int) -> marks.LabelledBar:
        """The bar at this place, in the panel's unit."""
        value = self.values[place]
        sizes = value.by_name() if isinstance(value, Memory) else {None: value or 0}
        parts = [(size / self.size, {"color": palette.MEMORY.get(name, self.colour)})
                 for name, size in sizes.items()]
        failed = place in self.out_of_memory
        ticks = (ticks[place] if ticks else None for ticks in (self.predicted, self.guessed))
        return marks.LabelledBar(parts, self.label(place), *(
            value and value / self.size for value in (*ticks, self.limit if failed else None)))

    def label(self, place: int) -> str:
        """The words to the right of a bar."""
        if self.values[place] is None:
            return self.missing
        sign = "✗ " * (place in self.out_of_memory)
        return f"{sign}{marks.format_number(self.end(place) / self.size)}"


def side_by_side(names: Sequence[str], panels: Sequence[Panel], note: str = "") -> Picture:
    """A row for each name, a column for each Panel; its `data` is title -> Panel."""
    height = 1.45 + ROW * len(names) + (0.25 if note else 0)
    figure, grid = canvas(WIDTH, height, nrows=1, ncols=len(panels), sharey=True, squeeze=False)
    figure.get_layout_engine().set(wspace=0.05)  # the numbers of two axes must not touch
    axes = grid[0]
    inches = marks.axis_inches(names) / len(panels) - 0.25
    for ax, panel in zip(axes, panels, strict=True):
        _draw(ax, panel, len(names), inches)
    marks.name_rows(axes[0], list(names))
    if note:
        figure.supxlabel(note, fontsize=10, x=0.01, ha="left")
    _legend(figure, panels)
    return Picture(figure, _text(names, panels, note), data={p.title: p for p in panels})


def _draw(ax, panel, rows, inches):
    limit = panel.limit and panel.limit / panel.size
    marks.draw_bars(ax, [panel.drawn(place) for place in range(rows)], inches,
                    right=1.05 * limit if limit else 0, size=9.5)
    if limit:
        ax.axvline(limit, **_LIMIT)
    ax.set_title(panel.title, fontsize=10, loc="left", color=palette.INK)
    ax.locator_params(axis="x", nbins=4)
    ax.set_xlabel(panel.unit)


def _legend(figure, panels):
    held = [v for panel in panels for v in panel.values if isinstance(v, Memory)]
    handles = [Patch(color=colour, label=name) for name, colour in palette.MEMORY.items()
               if any(value.by_name()[name] > 0.002 * value.total for value in held)]
    handles += marks.tick_handles(panel.drawn(place) for panel in panels
                                  for place in range(len(panel.values)))
    if any(panel.limit for panel in panels):
        handles.append(Line2D([], [], label="the limit", **_LIMIT))
    rows = 1 if len(handles) < 8 else 2
    marks.legend_above(figure, handles, -(-len(handles) // rows), columnspacing=1.1)


def _text(names, panels, note) -> str:
    lines = [f"{name}: " + "; ".join(_sentence(panel, place) for panel in panels)
             for place, name in enumerate(names)]
    limits = [f"the limit is {marks.format_number(p.limit / p.size)} {p.unit}"
              for p in panels if p.limit]
    return "\n".join([*lines, *limits, *([note] if note else [])])


def _sentence(panel, place) -> str:
    bar = panel.drawn(place)
    unit = "" if panel.values[place] is None else f" {panel.unit}"
    words = f"{panel.title} {bar.label}{unit}"
    if place in panel.out_of_memory:
        words = f"{panel.title}: out of memory, needs {bar.label[2:]} {panel.unit}"
    return ", ".join([words, *marks.tick_words(bar.predicted, bar.guessed)])
