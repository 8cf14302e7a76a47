"""A step under FSDP2, rank by rank: which unit computes, whose collectives are under way, and
what of them is exposed. Colours as in `labs.pictures.timelines`."""

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.meters import trace_units as units
from labs.meters.trace import KINDS, PHASES, clip, subtract, union
from labs.pictures import palette
from labs.pictures.marks import legend_above
from labs.pictures.picture import WIDTH, Picture, canvas

MS = 1e3
_LANE, _HEAD = 0.27, 0.36  # inches: of a lane, and above a rank's lanes
_NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
          "all_reduce": "all-reduce"}
_LETTER = 0.068  # inches that a letter of a label takes


def by_rank(runs: dict) -> Picture:
    """runs: title -> one trace per rank. For each rank what it computes, unit by unit, and one lane
    for each kind of collective; red where the rank only waits for it."""
    rows = [(title, trace) for title, traces in runs.items() for trace in traces]
    lanes = [_kinds(trace) for _, trace in rows]
    height = sum(_HEAD + _LANE * (1 + len(kinds)) for kinds in lanes) + 1.15
    figure, ax = canvas(WIDTH, height)
    start = {title: min(trace.started for trace in traces) for title, traces in runs.items()}
    longest = max(_end(trace) + trace.started - start[title] for title, trace in rows)
    y, ticks = 0.0, []
    for (title, trace), kinds in zip(rows, lanes, strict=True):
        y += _HEAD
        ax.text(0, y - 0.09, _headline(title, trace), fontsize=9.5, weight="bold", va="bottom",
                color=palette.rank(trace.rank))
        shift = (trace.started - start[title]) * MS
        room = longest * MS / (WIDTH - 1.35)
        _computing(ax, y, trace, shift, room)
        ticks.append((y + _LANE / 2, "computes"))
        for kind in kinds:
            y += _LANE
            _flights(ax, y, trace, kind, shift, room)
            ticks.append((y + _LANE / 2, _NAMES[kind]))
        y += _LANE
    ax.set_yticks(*zip(*ticks, strict=True))
    ax.tick_params(axis="y", labelcolor=palette.INK, labelsize=9)
    ax.set_ylim(y + 0.04, 0)
    ax.set_xlim(0, longest * MS * 1.005)
    ax.set_xlabel("milliseconds since the step began (recording takes time, too)")
    legend_above(figure, _handles(), columns=4)
    words = [_headline(title, trace) for title, trace in rows]
    return Picture(figure, "\n".join(words), data=runs)


def _kinds(trace) -> list:
    return [kind for kind in KINDS if trace.of(kind)]


def _end(trace) -> float:
    return max([trace.seconds, *(one.end for one in trace.collectives)])


def _headline(title, trace) -> str:
    times = trace.seconds_of()
    return (f"{title}, rank {trace.rank}: {times['total'] * MS:.0f} ms of communication, "
            f"{times['exposed'] * MS:.0f} ms exposed")


def _handles() -> list:
    phases = [Patch(color=palette.PHASES[name], label=words) for name, words in
              (("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"),
               ("communication", "communication, hidden"), ("exposed", "exposed"))]
    return [*phases, Patch(facecolor="none", edgecolor=palette.INK, label="a unit at work"),
            Line2D([], [], marker="|", linestyle="none", markersize=11, color=palette.INK,
                   label="a collective is called")]


def _computing(ax, y, trace, shift, room):
    """What the rank computes, by phase; frames around what each unit does, waiting included."""
    for phase in PHASES:
        for label in trace.labelled(f"labs::{phase}"):
            busy = clip(trace.compute, label)
            for begin, end in subtract(busy, trace.exposed):
                _bar(ax, y, begin, end, shift, palette.PHASES[phase])
    loading = trace.labelled("enumerate(DataLoader)")
    for label in loading:
        _bar(ax, y, label.begin, label.end, shift, palette.PHASES["other"])
    work = units.unit_spans(trace)
    for span in work:
        ax.barh(y + _LANE / 2, span.seconds * MS, left=span.begin * MS + shift,
                height=_LANE - 0.03, fill=False, edgecolor=palette.INK, linewidth=0.7)
    _names(ax, y, [(span, "data loader") for span in loading], shift, room, behind=False)
    _names(ax, y, [(span, _short(span.name)) for span in work], shift, room)


def _flights(ax, y, trace, kind, shift, room):
    flights = trace.of(kind)
    for one in flights:
        _bar(ax, y, one.begin, one.end, shift, palette.PHASES["communication"], edge=True)
    for begin, end in subtract(union(flights), trace.compute):
        _bar(ax, y, begin, end, shift, palette.PHASES["exposed"])
    for one in flights:
        ax.plot([one.issued * MS + shift] * 2, [y + 0.02, y + _LANE - 0.02], linewidth=1,
                color=palette.INK)
    owners = [units.owner(trace, one).unit for one in flights]
    _names(ax, y, [(one, _short(unit) if unit else "not FSDP's")
                   for one, unit in zip(flights, owners, strict=True)], shift, room,
           ticks=[one.issued for one in flights])


def _short(unit) -> str:
    """A block's number; else the last part of the module's name."""
    numbers = [part for part in unit.split(".") if part.isdigit()]
    last = unit.rsplit(".", 1)[-1]
    return last if last.isdigit() or not numbers else f"{numbers[-1]}.{last}"


def _names(ax, y, named, shift, room, behind=True, ticks=()):
    """Each name in its bar; of one too narrow, behind it, if there is place before the next bar and
    the next tick."""
    named = sorted(named, key=lambda pair: pair[0].begin)
    nexts = [span.begin for span, _ in named[1:]] + [float("inf")]
    for (span, words), following in zip(named, nexts, strict=False):
        wide = (len(words) * _LETTER + 0.05) * room
        following = min([following, *(tick for tick in ticks if tick > span.end)])
        if wide <= span.seconds * MS:
            x = (span.begin + span.end) / 2 * MS
        elif behind and wide <= (following - span.end) * MS:
            x = span.end * MS + wide / 2
        else:
            continue
        ax.text(x + shift, y + _LANE / 2, words, ha="center", va="center", fontsize=8.5,
                color=palette.INK)


def _bar(ax, y, begin, end, shift, colour, edge=False):
    ax.barh(y + _LANE / 2, (end - begin) * MS, left=begin * MS + shift, height=_LANE - 0.07,
            color=colour, **({"edgecolor": "white", "linewidth": 0.6} if edge else {}))
