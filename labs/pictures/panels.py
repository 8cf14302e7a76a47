"""Several measures of the same strategies in one chart: a row per strategy and a panel per measure,
with the predicted and the student's tick, and a limit that a bar may exceed."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.lines import Line2D

from labs.pictures import marks, palette
from labs.pictures.picture import Picture
from labs.training.memory_categories import Memory

ROW = 0.5  # inches from one strategy to the next


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

    def drawn(self, place: int) -> marks.LabelledBar:
        """The bar at this place, in the panel's unit."""
        value = self.values[place]
        sizes = value.by_name() if isinstance(value, Memory) else {"": value or 0}
        failed = place in self.out_of_memory
        ticks = (ticks[place] if ticks else None for ticks in (self.predicted, self.guessed))
        return marks.LabelledBar(
            {name: size / self.size for name, size in sizes.items()}, self.label(place),
            *(value and value / self.size for value in (*ticks, self.limit if failed else None)),
            self.colour)

    def label(self, place: int) -> str:
        """The words to the right of a bar."""
        value = self.values[place]
        if value is None:
            return self.missing
        total = value.total if isinstance(value, Memory) else value
        return f"{'✗ ' * (place in self.out_of_memory)}{marks.format_number(total / self.size)}"

    def words(self, place: int) -> str:
        """What the panel says of this place, in a sentence."""
        bar = self.drawn(place)
        unit = "" if self.values[place] is None else f" {self.unit}"
        words = f"{self.title} {bar.label}{unit}"
        if place in self.out_of_memory:
            words = f"{self.title}: out of memory, needs {bar.label[2:]}{unit}"
        return ", ".join([words, *bar.tick_words()])


def side_by_side(names: Sequence[str], panels: Sequence[Panel], note: str = "") -> Picture:
    """A row for each name, a column for each Panel; its `data` is title -> Panel."""
    bars = [[panel.drawn(place) for place in range(len(names))] for panel in panels]
    figure, axes = marks.bar_chart(names, bars, [panel.unit for panel in panels],
                                   1.45 + ROW * len(names) + (0.25 if note else 0), size=9.5)
    handles, lines = [], [f"{name}: " + "; ".join(panel.words(place) for panel in panels)
                          for place, name in enumerate(names)]
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_title(panel.title, fontsize=10, loc="left", color=palette.INK)
        ax.locator_params(axis="x", nbins=4)
        if panel.limit:
            style = marks.draw_limit(ax, panel.limit / panel.size, palette.RANK_FAILED)
            handles = [Line2D([], [], label="the limit", **style)]
            limit = marks.format_number(panel.limit / panel.size)
            lines.append(f"the limit is {limit} {panel.unit}")
    if note:
        figure.supxlabel(note, fontsize=10, x=0.01, ha="left")
        lines.append(note)
    marks.draw_legend(figure, sum(bars, []), *handles)
    return Picture(figure, "\n".join(lines), data={panel.title: panel for panel in panels})
