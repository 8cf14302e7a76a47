"""A step over time, in milliseconds: what each rank computes and which collectives are in flight;
on one rank, when buckets leave and arrive, and when the layers of ZeRO-3 are gathered."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.meters import trace_units
from labs.meters.trace import PHASES, Trace, clip, subtract, union
from labs.pictures import palette
from labs.pictures.marks import (
    HEADLINE,
    NOTE_LINE,
    format_number,
    headline,
    legend_above,
    name_rows,
    note_below,
)
from labs.pictures.picture import WIDTH, Picture, canvas

MS = 1e3
_LANE, _HEAD = 0.27, 0.36  # inches: of a lane, and above a rank's lanes
_PLATE = {"facecolor": palette.PAPER, "alpha": 0.85, "edgecolor": "none", "pad": 0.6}
_LETTER = 0.068  # inches that a letter of a label takes
GATHERED, GATHERING = palette.MEMORY["parameters"], palette.PHASES["communication"]
EXPOSED = {"facecolor": palette.PHASES["exposed"], "edgecolor": palette.PAPER, "linewidth": 0,
           "hatch": palette.HATCHES["exposed"]}
ALL_PARAMETERS = {"color": palette.PREDICTED, "linestyle": (0, (3, 2)), "linewidth": 1}

Intervals = dict[str, list[tuple[float, float]]]  # unit name -> (begin, end)


def by_rank(runs: dict[str, list[Trace]], lesson: str = "", note: str = "") -> Picture:
    """Draws for each rank what it computes, and one lane for each kind of collective, red where the
    rank only waits for it. Under FSDP2, the units are named. runs: title -> one trace per rank.
    lesson: the picture's title, by default what is exposed. note: lines below; with one, times are
    those of the pace that it states, and nothing was recorded."""
    rows = [(title, trace) for title, traces in runs.items() for trace in traces]
    lanes = [list(dict.fromkeys(one.kind for one in trace.collectives)) for _, trace in rows]
    figure, ax = canvas(WIDTH, sum(_HEAD + _LANE * (1 + len(kinds)) for kinds in lanes) + 1.15
                        + HEADLINE + NOTE_LINE * len(note.splitlines()))
    lesson = lesson or _exposed_by_run(runs)
    headline(figure, lesson)
    note_below(figure, note)
    start = {title: min(trace.started for trace in traces) for title, traces in runs.items()}
    longest = max(end + trace.started - start[title] for title, trace in rows
                  for end in (trace.seconds, *(one.end for one in trace.collectives)))
    inch = longest * MS / (WIDTH - 1.35)  # milliseconds of an inch
    y, places, names = 0.0, [], []
    for (title, trace), kinds in zip(rows, lanes, strict=True):
        y += _HEAD
        ax.text(0, y - 0.09, _headline(title, trace), fontsize=9.5, weight="bold", va="bottom",
                color=palette.readable(palette.rank(trace.rank)))
        lane = _Lane(ax, y, (trace.started - start[title]) * MS, inch)
        _draw_computing(lane, trace)
        for number, kind in enumerate(kinds, 1):
            _draw_collectives(_Lane(ax, y + number * _LANE, lane.shift, inch), trace, kind)
        names += ["computes", *(kind.replace("_", "-") for kind in kinds)]
        places += [y + (number + 0.5) * _LANE for number in range(1 + len(kinds))]
        y += _LANE * (1 + len(kinds))
    name_rows(ax, names, places=places, size=9)
    ax.set_ylim(y + 0.04, 0)
    ax.set_xlim(0, longest * MS * 1.005)
    ax.set_xlabel("milliseconds since the step began"
                  + " (recording takes time, too)" * (not note))
    legend_above(figure, _handles(any(map(_has_units, (trace for _, trace in rows)))))
    return Picture(figure, "\n".join([lesson, *(_headline(*row) for row in rows),
                                      *note.splitlines()]), data=runs)


def _exposed_by_run(runs) -> str:
    """What the runs' communication costs, mean over the ranks that are drawn."""
    times = {title: [trace.seconds_of() for trace in traces] for title, traces in runs.items()}
    exposed = ", ".join(
        f"{title} {format_number(MS * fmean(one['exposed'] for one in found))} of "
        f"{format_number(MS * fmean(one['total'] for one in found))}"
        for title, found in times.items())
    return f"Milliseconds of communication exposed: {exposed}"


def _headline(title, trace) -> str:
    times = trace.seconds_of()
    return (f"{title}, rank {trace.rank}: {format_number(times['total'] * MS)} ms of "
            f"communication, {format_number(times['exposed'] * MS)} ms exposed")


def _has_units(trace) -> bool:
    return bool(trace.labelled("FSDP::"))


def _handles(units) -> list:
    frame = Patch(facecolor="none", edgecolor=palette.INK, label="a unit at work")
    return [*(Patch(color=palette.PHASES[name], label=name) for name in PHASES),
            Patch(color=palette.PHASES["communication"], label="communication, overlapped"),
            Patch(**EXPOSED, label="exposed"), *([frame] if units else []),
            Line2D([], [], marker="|", linestyle="none", markersize=11, color=palette.INK,
                   label="a collective is issued")]


class _Lane:
    """A row of bars. y: its top, in inches. shift: milliseconds by which the rank began later than
    the first one. inch: milliseconds of an inch."""

    def __init__(self, ax, y, shift, inch):
        self.ax, self.y, self.shift, self.inch = ax, y, shift, inch

    def bars(self, intervals, height=_LANE - 0.07, **style):
        """One artist for all of them: on a node's 8 ranks there are thousands."""
        self.ax.broken_barh([(begin * MS + self.shift, (end - begin) * MS)
                             for begin, end in intervals],
                            (self.y + (_LANE - height) / 2, height), **style)

    def name(self, named, behind=True, ticks=()):
        """named: (span, its name). Writes each name into its bar; behind a bar that is too narrow,
        if there is room before the next bar and the next tick."""
        named = sorted(named, key=lambda pair: pair[0].begin)
        nexts = [span.begin for span, _ in named[1:]] + [float("inf")]
        for (span, words), following in zip(named, nexts, strict=False):
            wide = (len(words) * _LETTER + 0.05) * self.inch
            following = min([following, *(tick for tick in ticks if tick > span.end)])
            if wide <= span.seconds * MS:
                x = (span.begin + span.end) / 2 * MS
            elif behind and wide <= (following - span.end) * MS:
                x = span.end * MS + wide / 2
            else:
                continue
            self.ax.text(x + self.shift, self.y + _LANE / 2, words, ha="center", va="center",
                         fontsize=8.5, color=palette.INK, zorder=4, bbox=_PLATE)


def _draw_computing(lane, trace):
    """What the rank computes, by phase; frames around what each unit does, waiting included."""
    # Without units all of a phase but what is exposed, as in the seconds by phase of the trace.
    computing = trace.compute if _has_units(trace) else [(0, float("inf"))]
    for phase in PHASES:
        lane.bars([interval for label in trace.executed(f"labs::{phase}")
                   for interval in subtract(clip(computing, label), trace.exposed)],
                  color=palette.PHASES[phase])
    loading = trace.labelled("enumerate(DataLoader)")
    lane.bars([(label.begin, label.end) for label in loading], color=palette.PHASES["other"])
    work = trace_units.unit_spans(trace)
    lane.bars([(span.begin, span.end) for span in work], height=_LANE - 0.03, facecolor="none",
              edgecolor=palette.INK, linewidth=0.7)
    lane.name([(label, "data loader") for label in loading], behind=False)
    lane.name([(span, _short(span.name)) for span in work])


def _draw_collectives(lane, trace, kind):
    collectives = trace.of(kind)
    lane.bars([(one.begin, one.end) for one in collectives],
              facecolor=palette.PHASES["communication"], edgecolor="white", linewidth=0.6)
    lane.bars(subtract(union(collectives), trace.compute), **EXPOSED)
    lane.ax.vlines([one.issued * MS + lane.shift for one in collectives], lane.y + 0.02,
                   lane.y + _LANE - 0.02, linewidth=1, color=palette.INK)
    if _has_units(trace):
        units = [trace_units.owner(trace, one).unit for one in collectives]
        lane.name([(one, _short(unit) if unit else "not FSDP's")
                   for one, unit in zip(collectives, units, strict=True)],
                  ticks=[one.issued for one in collectives])


def _short(unit) -> str:
    """A block's number; else the last part of the module's name."""
    numbers = [part for part in unit.split(".") if part.isdigit()]
    last = unit.rsplit(".", 1)[-1]
    return last if last.isdigit() or not numbers else f"{numbers[-1]}.{last}"


def buckets_in_flight(trace: Trace, buckets: list[list[str]]) -> Picture:
    """Draws one rank's backward, a row for each bucket: when its gradients were ready (dots), when
    it left (the bar's begin) and arrived (its end). buckets: the parameter names in each."""
    ready = {span.name.removeprefix("labs::ready ").removeprefix("transformer."): span.begin
             for span in trace.executed("labs::ready")}
    [backward] = trace.executed("labs::backward")
    # on a GPU the call comes long before the gradients, which its kernel waits for
    rows = [(names, one.begin if trace.executed_labels else one.issued, one.end)
            for names, one in zip(buckets, trace.collectives, strict=False)]
    figure, ax = canvas(WIDTH, 1.3 + HEADLINE + 0.42 * len(buckets))
    computed = max((*ready.values(), *(left for _, left, _ in rows)), default=backward.end)
    early = sum(left < computed for _, left, _ in rows)
    lesson = f"{early} of {len(rows)} buckets leave while backward still computes"
    headline(figure, lesson)
    shade(ax, "backward", backward.begin, computed, "backward computes")
    shade(ax, "exposed", computed, backward.end, "waits")
    for row, (names, left, arrived) in enumerate(rows):
        times = [ready[name] * MS for name in names if name in ready]
        ax.barh(row, (arrived - left) * MS, left=left * MS, height=0.5,
                color=palette.PHASES["communication"])
        ax.plot(times, [row] * len(times), "o", markersize=5.5, color=palette.PHASES["backward"],
                markeredgecolor="white", markeredgewidth=0.7)
        ax.vlines(left * MS, row - 0.36, row + 0.36, color=palette.INK, linewidth=2, zorder=1.9)
    name_rows(ax, [_bucket_label(number, names) for number, names in enumerate(buckets)],
              above=0.9, size=9)
    ax.set_xlabel("milliseconds since the step began")
    legend_above(figure, [Line2D([], [], marker="o", linestyle="none", label="a gradient is ready",
                                 color=palette.PHASES["backward"]),
                          Line2D([], [], marker="|", linestyle="none", markersize=12,
                                 markeredgewidth=2, color=palette.INK, label="its bucket leaves"),
                          Patch(color=palette.PHASES["communication"], label="and is in flight")])
    words = (f"{len(rows)} buckets; the first leaves {(rows[0][1] - backward.begin) * MS:.1f} ms "
             f"into a backward of {backward.seconds * MS:.1f} ms")
    return Picture(figure, f"{lesson}\n{words}", data={"rows": rows, "backward": backward})


def shade(ax: Axes, phase: str, begin: float, end: float, label: str = "") -> None:
    """Shades the seconds from `begin` to `end` in the phase's colour; label: above the rows."""
    ax.axvspan(begin * MS, end * MS, color=palette.PHASES[phase], alpha=0.12, linewidth=0)
    if label:  # an empty text outside of the axes would take room from them
        ax.text(begin * MS, -0.65, f" {label}", fontsize=10,
                color=palette.readable(palette.PHASES[phase]))


def _bucket_label(number, names) -> str:
    return f"bucket {number}: {names[0]}" + (f" … +{len(names) - 1}" if len(names) > 1 else "")


@dataclass(frozen=True)
class Lifecycle:
    """When the layers of ZeRO-3 were gathered: one step of one rank, in seconds from its start.

    phases: name -> (begin, end). gathered: when a unit's full parameters have memory. gathering:
    when their all-gather is in flight. sizes: unit name -> bytes of its full parameters. waiting:
    when the rank does nothing but wait for a gather. recorded: the seconds of all steps of which
    this is one.
    """

    phases: dict[str, tuple[float, float]]
    gathered: Intervals
    gathering: Intervals
    sizes: dict[str, int]
    waiting: Sequence[tuple[float, float]] = ()
    recorded: Sequence[float] = ()

    @property
    def waited(self) -> float:
        """Seconds in which the rank only waited for a gather."""
        return sum(end - begin for begin, end in self.waiting)

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return max(end for _, end in self.phases.values())

    def most_gathered(self) -> int:
        """The largest number of units that are gathered at the same time."""
        return max(total for _, total in self.totals(dict.fromkeys(self.sizes, 1)))

    def peak(self) -> int:
        """The most bytes of full parameters at any moment."""
        return max(total for _, total in self.totals(self.sizes))

    def totals(self, sizes: dict[str, int]) -> list[tuple[float, int]]:
        """(time, sum of the sizes of all units gathered from then on), in order, from time 0."""
        changes = sorted((time, sign * sizes[name]) for name, intervals in self.gathered.items()
                         # sorted by time, then by size: at the same time what is freed goes first
                         for begin, end in intervals for time, sign in ((begin, 1), (end, -1)))
        times, steps = zip((0.0, 0), *changes, strict=True)
        return list(zip(times, accumulate(steps), strict=True))


def gathered_layers(lifecycle: Lifecycle, note: str = "") -> Picture:
    """Draws a row for each unit, below them the bytes of all gathered parameters, and the note."""
    names = list(lifecycle.gathered)
    high = 0.27 * (len(names) + 1)
    figure, (ax, below) = canvas(WIDTH, 1.9 + HEADLINE + high
                                 + NOTE_LINE * len(note.splitlines()), nrows=2, sharex=True,
                                 gridspec_kw={"height_ratios": [high, 0.75]})
    waits = f"the rank waits in {lifecycle.waited / lifecycle.seconds:.0%} of the step"
    headline(figure, f"At most {lifecycle.most_gathered()} of {len(names)} units are gathered at a "
                     f"time; {waits}")
    note_below(figure, note)
    draw_units(ax, lifecycle)
    for phase, (begin, end) in lifecycle.phases.items():
        shade(below, phase, begin, end)
    ax.set_xlim(0, lifecycle.seconds * MS)
    _draw_total(below, lifecycle)
    legend_above(figure, [*units_legend(),
                          Line2D([], [], **ALL_PARAMETERS, label="all parameters")])
    text = (f"at most {lifecycle.most_gathered()} of {len(names)} units are gathered at a time: "
            f"{lifecycle.peak() / 1e6:.2f} of {sum(lifecycle.sizes.values()) / 1e6:.2f} MB; "
            f"{lifecycle.waited * MS:.0f} of {lifecycle.seconds * MS:.0f} ms the rank waits")
    return Picture(figure, "\n".join([text, *note.splitlines()]), data=lifecycle)


def draw_units(ax: Axes, lifecycle: Lifecycle) -> None:
    """A row for each unit, when it is gathered, and one for when the rank only waits."""
    for phase, (begin, end) in lifecycle.phases.items():
        wide = end - begin > 0.1 * lifecycle.seconds  # a shorter phase has no room for its name
        shade(ax, phase, begin, end, phase if wide else "")
    names = list(lifecycle.gathered)
    for row, name in enumerate(names):
        for intervals, colour in ((lifecycle.gathered, GATHERED), (lifecycle.gathering, GATHERING)):
            for begin, end in intervals[name]:
                ax.barh(row, (end - begin) * MS, left=begin * MS, height=0.66, color=colour)
    for begin, end in lifecycle.waiting:
        ax.barh(len(names), (end - begin) * MS, left=begin * MS, height=0.66, **EXPOSED)
    name_rows(ax, [*names, "the rank waits"], above=1.1, size=9)


def units_legend() -> list[Patch]:
    """What the bars of `draw_units` mean."""
    return [Patch(color=GATHERING, label="being gathered"), Patch(color=GATHERED, label="gathered"),
            Patch(**EXPOSED, label="waiting for a gather")]


def _draw_total(ax, lifecycle):
    times, totals = zip(*lifecycle.totals(lifecycle.sizes), strict=True)
    ax.fill_between([time * MS for time in times], [total / 1e6 for total in totals], step="post",
                    color=GATHERED, alpha=0.75, linewidth=0)
    everything = sum(lifecycle.sizes.values()) / 1e6
    ax.axhline(everything, **ALL_PARAMETERS)
    ax.set_ylim(0, everything * 1.12)
    ax.set_ylabel("MB gathered", fontsize=9)
    ax.set_xlabel("milliseconds since the step began")
