"""Pipeline schedules over time, simulated or measured: a row for each rank, a box for each action
with its micro-batch's number, and beside it the activations in flight."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from labs.meters.metrics import Metric
from labs.pictures import palette
from labs.pictures.marks import (
    GUESS_MARKER,
    draw_tick,
    format_number,
    legend_above,
    name_rows,
)
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.pipelines.simulate import CLUSTER, RANK, Timeline

_ROW, _HEAD = 0.27, 0.72  # inches: of a rank, and of a schedule's headline and axis
_WIDE, _NARROW = 5.2, 1.0  # shares of the width: the timeline, the activations
_LETTER = 0.075  # inches that a digit takes in a box
_KINDS = {"F": ("forward", palette.PHASES["forward"]),
          "B": ("backward", palette.PHASES["backward"]),
          "W": ("W: gradient of the weights", palette.BUCKETS[1])}
_SPLIT = "backward (where there is a W: gradient of the input)"


@dataclass(frozen=True)
class DrawnSchedule:
    """A timeline and what its formulas say.

    unit: of its times, such as "slots"; seconds are drawn as milliseconds. bubble: the share of the
    step that the formula gives for `clock`. held: what each rank holds at its peak, in `held_unit`;
    without it, the micro-batches whose activations are in flight, counted on the timeline (with v
    chunks a chunk's activations are 1/v of a micro-batch's). peaks: the same by the formula.
    guessed_bubble, guessed_peak: the student's guesses, of the share and of rank 0's peak.
    """

    title: str
    timeline: Timeline
    unit: str = "slots"
    bubble: float | None = None
    peaks: Sequence[float] | None = None
    held: Sequence[float] | None = None
    held_unit: str = "micro-batches"
    clock: str = CLUSTER
    guessed_bubble: float | None = None
    guessed_peak: float | None = None

    @property
    def scale(self) -> float:
        """What a time is multiplied by on the axis."""
        return 1e3 if self.unit == "seconds" else 1.0

    @property
    def axis_unit(self) -> str:
        """The unit of the times that are drawn."""
        return "milliseconds" if self.unit == "seconds" else self.unit

    @property
    def at_peak(self) -> list[float]:
        """What each rank holds at its peak."""
        if self.held is not None:
            return list(self.held)
        return [peak / self.chunks for peak in self.timeline.peaks()]

    @property
    def chunks(self) -> int:
        """How many stages a rank has."""
        return max(1, *(len({span.action.stage for span in spans})
                        for spans in self.timeline.spans))

    def headline(self) -> str:
        """The length, and the bubble beside its formula."""
        length = f"{format_number(self.timeline.length(self.clock) * self.scale)} {self.axis_unit}"
        if self.clock == RANK:
            whole = format_number(self.timeline.makespan * self.scale)
            length += f" by the clock of one rank ({whole} by the cluster's)"
        bubble = _with_expected(f"{self.timeline.bubble(self.clock):.1%}", {
            "formula": self.bubble, "your guess": self.guessed_bubble}, "{:.1%}".format)
        return f"{self.title}: {length}, bubble {bubble}"

    def words(self) -> str:
        """The headline, and the highest peak beside its formula."""
        peak = _with_expected(f"{format_number(max(self.at_peak))} {self.held_unit}", {
            "formula": self.peaks and max(self.peaks)}, format_number)
        return f"{self.headline()}, at most {peak} on a rank"


def _with_expected(text, others: dict, write) -> str:
    """`27.3% (formula 27.3%, your guess 25.0%)`, of those that there are."""
    words = [f"{name} {write(value)}" for name, value in others.items() if value is not None]
    return f"{text} ({', '.join(words)})" if words else text


def timelines(schedules: Sequence[DrawnSchedule], metrics: Sequence[Metric] = ()) -> Picture:
    """Draws schedules one below the other. Those with the same unit have the same time axis, so
    that the shorter one is seen to be shorter. metrics: what was measured of them."""
    heights = [_HEAD + _ROW * len(one.timeline.spans) for one in schedules]
    figure, grid = canvas(WIDTH, 0.45 + sum(heights), nrows=len(schedules), ncols=2, squeeze=False,
                          gridspec_kw={"width_ratios": [_WIDE, _NARROW], "height_ratios": heights})
    figure.get_layout_engine().set(hspace=0.02, wspace=0.02)
    for (ax, beside), one in zip(grid, schedules, strict=True):
        longest = max(other.timeline.makespan * other.scale for other in schedules
                      if other.axis_unit == one.axis_unit)
        _draw_ranks(ax, one, longest)
        _draw_peaks(beside, one, max(_highest(other) for other in schedules
                                     if other.held_unit == one.held_unit))
    legend_above(figure, _handles(schedules))
    return Picture(figure, "\n".join(one.words() for one in schedules), data=list(schedules),
                   metrics=metrics)


def _draw_ranks(ax: Axes, one: DrawnSchedule, longest: float):
    ranks = len(one.timeline.spans)
    inch = longest / (WIDTH * _WIDE / (_WIDE + _NARROW) - 0.9)
    ax.set_title(one.headline(), loc="left", fontsize=9, color=palette.INK, pad=4)
    for rank, spans in enumerate(one.timeline.spans):
        ax.add_patch(Rectangle((0, rank - 0.42), one.timeline.makespan * one.scale, 0.84,
                               facecolor=palette.IDLE, linewidth=0))
        for span in spans:
            _draw_box(ax, one, rank, span, inch)
    name_rows(ax, [f"rank {rank}" for rank in range(ranks)], size=9)
    ax.set_xlim(0, longest)
    ax.set_xlabel(one.axis_unit, fontsize=9, labelpad=1)
    ax.tick_params(axis="x", labelsize=8, pad=1)


def _draw_box(ax, one, rank, span, inch):
    begin, wide = span.begin * one.scale, span.duration * one.scale
    colour = _KINDS[span.action.kind][1]
    ax.add_patch(Rectangle((begin, rank - 0.42), wide, 0.84, facecolor=colour, linewidth=0.5,
                           edgecolor=palette.PAPER))
    _underline(ax, begin, rank, wide, span.action.stage // len(one.timeline.spans))
    text = str(span.action.micro_batch)
    if wide > _LETTER * len(text) * inch:
        ax.text(begin + wide / 2, rank, text, ha="center", va="center_baseline", fontsize=8,
                color=palette.text_on(colour), zorder=4)


def _underline(ax, begin, rank, wide, chunk):
    """A line at the bottom of the box for each chunk before this one, three at most."""
    for line in range(min(chunk, 3)):
        y = rank + 0.36 - 0.12 * line
        ax.plot([begin + 0.12 * wide, begin + 0.88 * wide], [y, y], color=palette.INK,
                linewidth=1.1, solid_capstyle="butt", zorder=3)


def _draw_peaks(ax: Axes, one: DrawnSchedule, highest: float):
    """Bars of what each rank holds at its peak, and the formula's tick."""
    for rank, held in enumerate(one.at_peak):
        formula = one.peaks[rank] if one.peaks is not None else None
        guess = one.guessed_peak if rank == 0 else None
        ax.barh(rank, held, height=0.7, color=palette.MEMORY["activations"])
        draw_tick(ax, formula, rank, palette.PREDICTED, width=2.2)
        draw_tick(ax, guess, rank, palette.GUESSED, width=2.2)
        end = max(held, formula or 0)
        if guess and end < guess < end + 0.6 * highest:  # the number would lie under it
            end = guess
        ax.annotate(format_number(held), (end, rank), xytext=(4, 0), textcoords="offset points",
                    va="center", fontsize=8)
    ax.set_xlim(0, highest * 1.6)
    ax.set_ylim(len(one.at_peak) - 0.5, -0.55)
    ax.set_yticks([])
    ax.set_xticks([])
    ax.set_xlabel(f"peak, {one.held_unit}", fontsize=9, labelpad=1)


def _highest(one) -> float:
    return max([*one.at_peak, *(one.peaks or []), one.guessed_peak or 0]) or 1


def _handles(schedules) -> list:
    drawn = {span.action.kind for one in schedules for spans in one.timeline.spans
             for span in spans}
    handles = [Patch(color=colour, label=_SPLIT if kind == "B" and "W" in drawn else name)
               for kind, (name, colour) in _KINDS.items() if kind in drawn]
    handles.append(Patch(color=palette.IDLE, label="idle"))
    if any(one.chunks > 1 for one in schedules):
        handles.append(Line2D([], [], color=palette.INK, linewidth=1.1,
                              label="underlined: second chunk, third …"))
    if any(one.peaks is not None for one in schedules):
        handles.append(Line2D([], [], color=palette.PREDICTED, linewidth=2.2, label="formula"))
    if any(one.guessed_peak is not None for one in schedules):
        handles.append(Line2D([], [], linewidth=2.2, label="your guess", **GUESS_MARKER))
    return handles
