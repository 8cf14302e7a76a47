"""What one rank did in its recorded steps: collectives, computing, and the labels around them.

A trace is read from the file that torch.profiler writes (`labs.meters.trace_file`), in the same way
for gloo and for NCCL. All times are seconds; an interval is (begin, end).
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import islice

from labs.words import counted

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
PHASES = ("forward", "backward", "optimizer")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Span:
    """Something that ran from `begin` to `end`. category: label, item, communication, or what the
    function that returns the span says."""

    name: str
    category: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Collective(Span):
    """A collective from when it begins to run (`begin`) to its completion (`end`): in between it is
    in flight.

    kind: all_gather, reduce_scatter, all_reduce or another. issued: when it was called. elements,
    bytes: of the full tensor, on all ranks together; 0 where shapes were not recorded. stack: the
    Python functions that led to the call, outermost first, as "file(line of its def): function";
    empty without with_stack. ranks: of its process group; 0 where the file does not say.
    """

    kind: str = ""
    issued: float = 0.0
    elements: int = 0
    bytes: int = 0
    stack: tuple[str, ...] = ()
    ranks: int = 0


@dataclass(frozen=True)
class Trace:
    """What one rank did. Times are seconds since `started`, when the first recorded step began.

    collectives: in the order in which they were issued. compute: disjoint intervals in which the
    rank computed. labels: named spans of the program, such as labs::forward (a phase), labs::ready
    (a gradient is complete) or FSDP::all_gather (unit). item_calls: calls of `.item()`. path: the
    file, if it was kept. executed_labels: on a GPU, which works on behind the program, the same
    labels at the times at which it ran what was launched in them; empty on a CPU.
    """

    rank: int
    backend: str
    collectives: tuple[Collective, ...]
    compute: tuple[Interval, ...]
    labels: tuple[Span, ...]
    item_calls: tuple[Span, ...] = ()
    started: float = 0.0
    path: str = ""
    executed_labels: tuple[Span, ...] = field(default=(), repr=False)
    ends: float = field(default=0.0, repr=False)

    def of(self, *kinds: str) -> list[Collective]:
        """Returns the collectives of these kinds."""
        return [one for one in self.collectives if one.kind in kinds]

    def labelled(self, beginning: str) -> list[Span]:
        """Returns the labels whose names begin with `beginning`."""
        return [label for label in self.labels if label.name.startswith(beginning)]

    def executed(self, beginning: str) -> list[Span]:
        """Returns the labels whose names begin with `beginning` at the times at which the device
        ran what they enclose: on a GPU later than `labelled`, on a CPU the same."""
        return [label for label in self.executed_labels or self.labels
                if label.name.startswith(beginning)]

    def enclosing(self, moment: float, beginning: str = "") -> list[Span]:
        """Returns the labels that contain `moment` (seconds) and whose names begin with
        `beginning`, outermost first."""
        return [label for label in self.labels
                if label.begin <= moment <= label.end and label.name.startswith(beginning)]

    @property
    def steps(self) -> list[Span]:
        return self.labelled("labs::step")

    @property
    def seconds(self) -> float:
        """The duration of all recorded steps together."""
        return sum(step.seconds for step in self.steps) or self.ends

    @property
    def exposed(self) -> list[Interval]:
        """Intervals of exposed communication: a collective is in flight and this rank does not
        compute."""
        return subtract(union(self.collectives), self.compute)

    @property
    def exposed_seconds(self) -> float:
        return total_seconds(self.exposed)

    @property
    def seconds_by_phase(self) -> dict[str, float]:
        """Seconds of each phase without exposed communication, and "exposed"."""
        phases = {phase: total_seconds(subtract(union(self.executed(f"labs::{phase}")),
                                                self.exposed)) for phase in PHASES}
        return {"forward": phases["forward"], "backward": phases["backward"],
                "exposed": self.exposed_seconds, "optimizer": phases["optimizer"]}

    def seconds_of(self, *kinds: str) -> dict[str, float]:
        """Returns the seconds in which a collective of these kinds (without any: of every kind) is
        in flight: "total", of which "exposed" and "overlapped" with computing."""
        in_flight = union(self.of(*kinds) if kinds else self.collectives)
        total, exposed = total_seconds(in_flight), total_seconds(subtract(in_flight, self.compute))
        return {"total": total, "exposed": exposed, "overlapped": total - exposed}

    def __repr__(self):
        counts = ", ".join(f"{len(self.of(kind))} {kind}" for kind in KINDS if self.of(kind))
        steps = len(self.steps)  # none in a file that somebody else recorded
        length = f"{1e3 * self.seconds / max(1, steps):.0f} ms"
        took = f"{counted(steps, 'step')} of {length}" if steps else f"{length} without step labels"
        return f"rank {self.rank} ({self.backend}): {took}; {counts or 'no collective'}"


def union(spans, gap: float = 0.0) -> list[Interval]:
    """Returns the disjoint intervals that spans, or intervals (begin, end), cover, in order; what
    ends before it begins covers nothing. Intervals at most `gap` seconds apart become one."""
    intervals = []
    for begin, end in sorted(filter(_lasts, map(as_interval, spans))):
        if intervals and begin <= intervals[-1][1] + gap:
            intervals[-1] = (intervals[-1][0], max(end, intervals[-1][1]))
        else:
            intervals.append((begin, end))
    return intervals


def as_interval(span: "Span | Interval") -> Interval:
    """Returns (begin, end) of a span; an interval as it is."""
    return (span.begin, span.end) if hasattr(span, "begin") else tuple(span)


def _lasts(interval) -> bool:
    return interval[0] <= interval[1]


def subtract(intervals, others) -> list[Interval]:
    """Returns the parts of disjoint intervals that none of the disjoint `others` covers."""
    rest, others = [], sorted(others)
    ends = [end for _, end in others]
    for begin, end in intervals:
        # those before are over: a GPU's trace has 10,000 of them
        for other_begin, other_end in islice(others, bisect_right(ends, begin), None):
            if other_begin >= end:
                break
            if other_begin > begin:
                rest.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            rest.append((begin, end))
    return rest


def clip(intervals, span: Span) -> list[Interval]:
    """Returns the parts of disjoint intervals that lie inside `span`."""
    return [(max(begin, span.begin), min(end, span.end)) for begin, end in intervals
            if end > span.begin and begin < span.end]


def total_seconds(intervals) -> float:
    """Returns the seconds that disjoint intervals last together."""
    return sum(end - begin for begin, end in intervals)
