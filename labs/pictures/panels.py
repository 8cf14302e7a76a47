"""Several measures of the same strategies in one chart: a row per strategy and a panel per measure,
with the formula's and the student's tick, and a limit that a bar may exceed."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.training.memory_categories import Memory

ROW = 0.5  # inches from one strategy to the next
TICKS = {"predicted": "predicted", "guessed": "your guess"}
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

    def tick(self, kind: str, place: int) -> float | None:
        """The "predicted" or "guessed" tick of a strategy, or None."""
        ticks = getattr(self, kind)
        return ticks[place] if ticks else None

    @property
    def largest(self) -> float:
        """Where the rightmost mark is."""
        ends = [self.end(place) for place in range(len(self.values))]
        return max([*ends, *filter(None, [*self.predicted, *self.guessed, self.limit])]) or 1

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
    return Picture(figure, _text(names, panels, note), data={p.title: p for p in panels})


def _draw(ax, panel, rows):
    for place in range(rows):
        _bar(ax, panel, place)
        predicted, guessed = (panel.tick(kind, place) for kind in TICKS)
        marks.draw_ticks(ax, predicted and predicted / panel.size, guessed and guessed / panel.size,
                         place)
        _label(ax, panel, place)
    if panel.limit:
        ax.axvline(panel.limit / panel.size, **_LIMIT)
    ax.set_xlim(0, 1.4 * panel.largest / panel.size)
    ax.set_title(panel.title, fontsize=10, loc="left", color=palette.INK)
    marks.plain_numbers(ax.xaxis)
    ax.locator_params(axis="x", nbins=4)
    ax.set_xlabel(panel.unit)


def _bar(ax, panel, place):
    value = panel.values[place]
    if isinstance(value, Memory):
        marks.draw_stack(ax, place, ((nbytes / panel.size, {"color": palette.MEMORY[name]})
                                     for name, nbytes in value.by_name().items()))
    else:
        ax.barh(place, (value or 0) / panel.size, height=marks.BAR, color=panel.colour)
    if place in panel.out_of_memory:
        marks.draw_out_of_memory(ax, panel.limit / panel.size, place)


def _label(ax, panel, place):
    failed = place in panel.out_of_memory
    end = marks.label_start(max(panel.end(place), panel.limit if failed else 0),
                            panel.tick("predicted", place), panel.tick("guessed", place),
                            0.35 * panel.largest)
    marks.draw_label(ax, place, end / panel.size, panel.label(place),
                     palette.RANK_FAILED if failed else palette.INK, 9.5)


def _legend(figure, panels):
    held = [v for panel in panels for v in panel.values if isinstance(v, Memory)]
    handles = [Patch(color=colour, label=name) for name, colour in palette.MEMORY.items()
               if any(value.by_name()[name] > 0.002 * value.total for value in held)]
    colours = {"predicted": palette.PREDICTED, "guessed": palette.GUESSED}
    handles += [Line2D([], [], color=colours[kind], linewidth=3, label=label)
                for kind, label in TICKS.items()
                if any(v is not None for panel in panels for v in getattr(panel, kind))]
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
    unit = "" if panel.values[place] is None else f" {panel.unit}"
    words = f"{panel.title} {panel.label(place)}{unit}"
    if place in panel.out_of_memory:
        words = f"{panel.title}: out of memory, needs {panel.label(place)[2:]} {panel.unit}"
    for kind, label in TICKS.items():
        value = panel.tick(kind, place)
        words += f", {label} {marks.format_number(value / panel.size)}" if value is not None else ""
    return words
