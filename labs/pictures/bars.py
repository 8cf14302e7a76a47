"""Guess, predict, measure: bars with the prediction's tick and the student's; one chart, or a panel
for each of several measures."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.meters.metrics import Metric, name_of
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.training.memory_categories import Memory


@dataclass(frozen=True)
class Bar:
    """One bar and its ticks; measured, predicted and guessed share a unit, and None is not
    drawn."""

    name: str
    measured: float
    predicted: float | None = None
    guessed: float | None = None
    colour: str = palette.PHASES["communication"]


def bars(rows: list[Bar], unit: str, title: str = "", limit: tuple[float, str] | None = None,
         note: str = "", source: str = "measured", lesson: str = "",
         answer: str | None = None) -> Picture:
    """A picture of horizontal bars with ticks. title: what the axis counts, after its unit; limit:
    (value, name) of a line across all bars; note: lines below, after the guesses' answers; source:
    where the numbers are from; lesson: the picture's title; answer: to the guess, where that is
    another quantity than the bars'."""
    drawn = [marks.LabelledBar({source: row.measured},
                               f"{marks.format_number(row.measured)} {unit}", row.predicted,
                               row.guessed, colour=row.colour) for row in rows]
    axis_title = f"{unit} {title}".strip()
    names = [row.name for row in rows]
    said = marks.answers(zip(names, drawn, strict=True), unit) if answer is None else [answer]
    note = "\n".join([*filter(None, said), *note.splitlines()])
    figure, [ax] = marks.bar_chart(names, [drawn], [axis_title], 1.05 + 0.46 * len(rows)
                                   + marks.NOTE_LINE * len(note.splitlines())
                                   + marks.HEADLINE * bool(lesson))
    marks.headline(figure, lesson)
    if all(row.measured == int(row.measured) for row in rows):
        marks.whole_numbers(ax.xaxis)
    if limit:
        marks.draw_limit(ax, limit[0])
        ax.text(limit[0], -0.55, limit[1], ha="center", va="bottom", color=palette.MUTED)
    marks.note_below(figure, note)
    marks.draw_legend(figure, drawn)
    words = [", ".join([f"{row.name}: {source} {bar.label}", *bar.tick_words()])
             for row, bar in zip(rows, drawn, strict=True)]
    return Picture(figure, "\n".join(
        [*filter(None, [lesson]), axis_title, *words, *note.splitlines()]), data=rows,
                   metrics=[Metric(name_of(row.name, title), row.measured, unit, row.predicted)
                            for row in rows])


@dataclass(frozen=True)
class Panel:
    """One measure. unit: its name; size: what one unit is in `values` (1e6 where bytes are drawn as
    MB). values: one per strategy: a number, a Memory in bytes, or a number for each kind of
    collective; None draws nothing, and `missing` is its label. predicted, guessed: ticks, one per
    strategy, None where there is none. limit: a line across; out_of_memory: places of the
    strategies that exceeded it; pale: of those whose value was not measured but predicted. colour:
    of numbers. whiskers: (low, high) of predictions, one per strategy."""

    title: str
    unit: str
    values: Sequence[float | dict[str, float] | Memory | None]
    size: float = 1
    predicted: Sequence[float | None] = ()
    guessed: Sequence[float | None] = ()
    limit: float | None = None
    out_of_memory: tuple[int, ...] = ()
    missing: str = "–"
    colour: str = palette.PLAIN
    pale: tuple[int, ...] = ()
    whiskers: Sequence[tuple[float, float] | None] = ()

    def drawn(self, place: int) -> marks.LabelledBar:
        """The bar at this place, in the panel's unit."""
        value, failed = self.values[place], place in self.out_of_memory
        named = value.by_name() if isinstance(value, Memory) else value
        parts = named if isinstance(named, dict) else {"": value or 0}
        total = marks.format_number(sum(parts.values()) / self.size)
        label = self.missing if value is None else f"{'✗ ' * failed}{total}"
        whisker = self.whiskers[place] if self.whiskers else None
        ticks = (ticks[place] if ticks else None for ticks in (self.predicted, self.guessed))
        return marks.LabelledBar(
            {name: size / self.size for name, size in parts.items()}, label,
            *(value and value / self.size for value in (*ticks, self.limit if failed else None)),
            palette.BORDER if isinstance(value, dict) else self.colour, place in self.pale,
            tuple(end / self.size for end in whisker) if whisker else None)

    def metric(self, place: int, name: str) -> Metric:
        """The value at this place, in the panel's unit."""
        bar = self.drawn(place)
        return Metric(name_of(name, self.title), sum(bar.parts.values()), self.unit, bar.predicted)

    def words(self, place: int) -> str:
        """What the panel says of this place, in a sentence."""
        bar = self.drawn(place)
        unit = "" if self.values[place] is None else f" {self.unit}"
        words = f"{self.title}{' predicted' * bar.is_pale} {bar.label}{unit}"
        if place in self.out_of_memory:
            words = f"{self.title}: out of memory, needs {bar.label[2:]}{unit}"
        return ", ".join([words + bar.by_part(), *bar.tick_words()])


def side_by_side(names: Sequence[str], panels: Sequence[Panel], note: str = "",
                 lesson: str = "", answer: str | None = None) -> Picture:
    """A row for each name, a column for each Panel; its `data` is title -> Panel. note: lines
    below, after the guesses' answers; lesson: the picture's title; answer: to the guess, where that
    is another quantity than the bars'."""
    bars = [[panel.drawn(place) for place in range(len(names))] for panel in panels]
    said = [answer] if answer is not None else sum((
        _answers(names, panel, row) for panel, row in zip(panels, bars, strict=True)), [])
    note = "\n".join([*filter(None, said), *note.splitlines()])
    figure, axes = marks.bar_chart(names, bars, [panel.unit for panel in panels],
                                   1.45 + 0.5 * len(names)
                                   + marks.NOTE_LINE * len(note.splitlines())
                                   + marks.HEADLINE * bool(lesson), size=9.5)
    marks.headline(figure, lesson)
    handles, lines = [], [f"{name}: " + "; ".join(panel.words(place) for panel in panels)
                          for place, name in enumerate(names)]
    for ax, panel in zip(axes, panels, strict=True):
        ax.set_title(panel.title, fontsize=10, loc="left", color=palette.INK)
        ax.locator_params(axis="x", nbins=4)
        if all(isinstance(value, int) for value in panel.values if value is not None):
            marks.whole_numbers(ax.xaxis)
        if panel.limit:
            style = marks.draw_limit(ax, panel.limit / panel.size, palette.RANK_FAILED)
            marks.clear_of(ax, panel.limit / panel.size, marks.axis_inches(names) / len(panels))
            handles = [Line2D([], [], label="the limit", **style)]
            limit = marks.format_number(panel.limit / panel.size)
            lines.append(f"the limit is {limit} {panel.unit}")
    marks.note_below(figure, note)
    lines += [note] if note else []
    marks.draw_legend(figure, sum(bars, []), *handles)
    return Picture(figure, "\n".join([*filter(None, [lesson]), *lines]),
                   data={panel.title: panel for panel in panels},
                   metrics=[panel.metric(place, name) for place, name in enumerate(names)
                            for panel in panels if panel.values[place] is not None
                            and place not in panel.pale])


def _answers(names, panel, bars) -> list[str]:
    """The answers to a panel's guesses; none where there is nothing to compare one with."""
    return marks.answers([(name, bar) for name, bar, value in
                          zip(names, bars, panel.values, strict=True) if value is not None],
                         panel.unit)


def numbers_before_and_after(before: list[float], after: list[float],
                             guessed: float | None = None) -> Picture:
    """A picture of one number per rank: a pale bar before, a full line after, and the guess as a
    dashed line across."""
    same = len(set(after)) == 1
    lesson = (f"After: every rank has {after[0]:g}" if same else
              "After: the ranks have different numbers")
    answer = _compared(guessed, after[0]) if same else ""
    figure, ax = canvas(WIDTH, 2.0 + marks.HEADLINE + marks.NOTE_LINE * bool(answer))
    marks.headline(figure, lesson)
    marks.note_below(figure, answer)
    words = ["the number of each rank, before → after"]
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        words.append(f"rank {rank}: {old:g} → {new:g}")
        ax.bar(rank, old, width=0.62, color=palette.rank(rank), alpha=0.45)
        # Beside a sum, a rank's own number may be less than a pixel high: its line and its number
        # are seen all the same.
        ax.hlines(old, rank - 0.31, rank + 0.31, color=palette.rank(rank), linewidth=2)
        ax.annotate(f"{old:g}", (rank, old), xytext=(0, 3), textcoords="offset points",
                    ha="center", va="bottom", fontsize=10, color=palette.INK)
        ax.hlines(new, rank - 0.36, rank + 0.36, color=palette.rank(rank), linewidth=5)
        ax.text(rank + 0.4, new, f"{new:g}", va="center", fontsize=11, weight="bold",
                color=palette.readable(palette.rank(rank)), **marks.ON_PAPER)
    handles = [Patch(color=palette.MUTED, alpha=0.45, label="before"),
               Line2D([], [], color=palette.MUTED, linewidth=5, label="after")]
    if guessed is not None:
        words.append(f"your guess: {guessed:g}")
        handles.append(ax.axhline(guessed, color=palette.GUESSED, linestyle=(0, (3, 2)), zorder=0,
                                  label=words[-1]))
    ax.set_xticks(range(len(before)), [f"rank {rank}" for rank in range(len(before))])
    ax.tick_params(axis="x", labelcolor=palette.INK)
    ax.set_yticks([])
    ax.set_xlim(-0.6, len(before) - 0.2)
    marks.legend_above(figure, handles)
    return Picture(figure, "\n".join(filter(None, [*words, answer])), data=(before, after, guessed))


def _compared(guessed, found) -> str:
    """The guess beside what each rank has; "" without a guess."""
    if guessed is None:
        return ""
    words = f"You guessed {marks.format_number(guessed)}, and it is {marks.format_number(found)}"
    return words + (": right." if abs(guessed - found) <= 0.05 * abs(found) else ".")
