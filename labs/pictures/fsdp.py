"""Several measures of the same variants side by side: one row for each variant, one panel for each
measure, with the formula's and the student's tick, and a limit that a bar may run into."""

from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.training.memory_categories import Memory

ROW = 0.5  # inches from one variant to the next
_LIMIT = {"color": palette.RANK_FAILED, "linestyle": (0, (4, 3)), "linewidth": 1.2, "zorder": 0.5}


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
        predicted, guessed = (panel.mark(kind, place) for kind in ("predicted", "guessed"))
        marks.draw_ticks(ax, predicted and predicted / panel.size, guessed and guessed / panel.size,
                   place)
        _words(ax, panel, place)
    if panel.limit:
        ax.axvline(panel.limit / panel.size, **_LIMIT)
    ax.set_xlim(0, 1.4 * panel.most / panel.size)
    ax.set_title(panel.title, fontsize=10, loc="left", color=palette.INK)
    marks.plain_numbers(ax.xaxis)
    ax.locator_params(axis="x", nbins=4)
    ax.set_xlabel(panel.unit)


def _bar(ax, panel, place):
    value = panel.values[place]
    if not isinstance(value, Memory):
        ax.barh(place, (value or 0) / panel.size, height=marks.BAR, color=panel.colour)
    else:
        marks.draw_stack(ax, place, ((nbytes / panel.size, {"color": palette.MEMORY[name]})
                               for name, nbytes in value.by_name().items()))
    if place in panel.died:
        marks.draw_out_of_memory(ax, panel.limit / panel.size, place)


def _words(ax, panel, place):
    died = place in panel.died
    end = max(panel.end(place), panel.limit if died else 0)
    room = 0.35 * panel.most
    end = marks.label_start(end, panel.mark("predicted", place), panel.mark("guessed", place), room)
    marks.draw_label(ax, place, end / panel.size, _said(panel, place),
               palette.RANK_FAILED if died else palette.INK, 9.5)


def _said(panel, place) -> str:
    if place in panel.died:
        return f"✗ {marks.format_number(panel.end(place) / panel.size)}"
    value = panel.values[place]
    return panel.missing if value is None else marks.format_number(panel.end(place) / panel.size)


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
    rows = 1 if len(handles) < 8 else 2
    marks.legend_above(figure, handles, -(-len(handles) // rows), columnspacing=1.1)


def _text(names, panels, note) -> str:
    lines = [_sentence(name, place, panels) for place, name in enumerate(names)]
    limits = [f"the limit is {marks.format_number(p.limit / p.size)} {p.unit}"
              for p in panels if p.limit]
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
        words += f", {label} {marks.format_number(value / panel.size)}" if value is not None else ""
    return words
