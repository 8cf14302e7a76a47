"""An event simulation of a pipeline schedule: when each action begins and ends on each rank.

A rank runs its list in order. An action begins as soon as the rank is free and what it receives has
arrived, `transfer` after the other stage's action has ended; sending blocks nobody. Between two
stages of one rank nothing is sent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from labs.predictions.pipelines.legality import execution_order, require_legal
from labs.predictions.pipelines.schedule import Action, Schedule

# The two ways to say how long a step of the pipeline takes.
CLUSTER = "cluster"  # from the first begin to the last end, of all ranks together
RANK = "rank"  # the longest span of one rank, from its own first begin to its own last end
# The Zero Bubble paper (arXiv 2401.10241): one step's idle ranks begin the next step, so a
# schedule in the shape of a parallelogram has no bubble (section 2.2).
PAPERS_CLOCK = RANK

PerStage = float | Sequence[float]  # one number for all stages, or one for each


@dataclass(frozen=True)
class Times:
    """How long each action of a stage takes, in any one unit; each for all stages or by stage.

    B: the gradient of the input; W: of the weights. A backward that is not split takes B + W.
    transfer: until what a stage computed is at the next one, or at the one before.
    """

    F: PerStage = 1.0
    B: PerStage = 1.0
    W: PerStage = 1.0
    transfer: PerStage = 0.0

    def of(self, kind: str, stage: int) -> float:
        """The time of one kind of action, "F", "B" or "W", or of a "transfer"."""
        return at_stage(getattr(self, kind), stage)

    def chunked(self, chunks: int) -> "Times":
        """Of stages that are chunks of these: 1/chunks of the computation, the same transfer."""
        def part(time):
            return time / chunks if isinstance(time, int | float) else [t / chunks for t in time]

        return Times(part(self.F), part(self.B), part(self.W), self.transfer)


def at_stage(value: PerStage, stage: int) -> float:
    """The number of this stage."""
    return value if isinstance(value, int | float) else value[stage]


@dataclass(frozen=True)
class Span:
    """An action from its begin to its end."""

    action: Action
    begin: float
    end: float

    @property
    def duration(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """When each rank ran its actions: simulated, or measured on real ranks.

    spans: of each rank, in order; measured ones in seconds, simulated ones in the unit of `Times`.
    """

    spans: tuple[tuple[Span, ...], ...]

    @classmethod
    def from_measured(cls, spans: Sequence[tuple[int, Action, float, float]]) -> "Timeline":
        """Of (rank, action, begin, end), in any order; time 0 becomes the first begin."""
        ranks = 1 + max(rank for rank, *_ in spans)
        first = min(begin for _, _, begin, _ in spans)
        found = [[] for _ in range(ranks)]
        for rank, action, begin, end in sorted(spans, key=lambda span: span[2]):
            found[rank].append(Span(action, begin - first, end - first))
        return cls(tuple(map(tuple, found)))

    @property
    def makespan(self) -> float:
        """From the first begin to the last end, of all ranks together."""
        everything = [span for spans in self.spans for span in spans]
        return max(span.end for span in everything) - min(span.begin for span in everything)

    @property
    def longest_rank_span(self) -> float:
        """The longest time from a rank's own first begin to its own last end."""
        return max(spans[-1].end - spans[0].begin for spans in self.spans if spans)

    def length(self, clock: str = CLUSTER) -> float:
        """The time of the step by one of the two clocks, CLUSTER or RANK."""
        return {CLUSTER: self.makespan, RANK: self.longest_rank_span}[clock]

    def bubble(self, clock: str = CLUSTER) -> float:
        """The share of the step in which a rank computes nothing, the mean over ranks: from 0 to 1.
        With equal stages 1 - m(F + B + W) / length (arXiv 2401.10241, section 5.3)."""
        busy = sum(span.duration for spans in self.spans for span in spans) / len(self.spans)
        return 1 - busy / self.length(clock)

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """(time, number of activations that the rank holds from then on), in order. An activation
        of a stage and micro-batch is held from the begin of its F to the end of its last action:
        W where the backward is split, else B."""
        return [(time, round(count)) for time, count in self._held(rank, 1, 1)]

    def peaks(self) -> list[int]:
        """The most activations in flight on each rank. With v chunks each is 1/v of a rank's."""
        return [max((count for _, count in self.in_flight(rank)), default=0)
                for rank in range(len(self.spans))]

    def peak_bytes(self, activation_bytes: PerStage, kept_for_weights: float = 1.0) -> list[float]:
        """The most bytes of activations in flight on each rank. activation_bytes: of a stage and
        micro-batch; kept_for_weights: the share of them that W needs, and so stays after B."""
        return [max((held for _, held in self._held(rank, activation_bytes, kept_for_weights)),
                    default=0.0) for rank in range(len(self.spans))]

    def _held(self, rank, size, kept) -> list[tuple[float, float]]:
        changes = sorted(self._changes(rank, size, kept))  # at one time, what is freed comes first
        totals = accumulate(change for _, change in changes)
        return [(time, total) for (time, _), total in zip(changes, totals, strict=True)]

    def _changes(self, rank, size, kept) -> Iterator[tuple[float, float]]:
        spans = self.spans[rank]
        split = {(span.action.stage, span.action.micro_batch) for span in spans
                 if span.action.kind == "W"}
        for span in spans:
            own = at_stage(size, span.action.stage)
            if span.action.kind == "F":
                yield span.begin, own
            elif span.action.kind == "W":
                yield span.end, -own * kept
            elif (span.action.stage, span.action.micro_batch) in split:
                yield span.end, -own * (1 - kept)
            else:
                yield span.end, -own


def simulate(schedule: Schedule, times: Times | None = None,
             waits: Callable[[Action], bool] = lambda action: True) -> Timeline:
    """When each action runs. times: of stages, so of chunks where a rank has several; without, 1
    for each of F, B and W, and 0 for transfers. waits: whether an action waits for what it
    receives; False only to repeat a simulation that left some out. Raises IllegalSchedule."""
    times = times or Times()
    order = execution_order(require_legal(schedule))
    spans: list[list[Span]] = [[] for _ in schedule.ranks]
    ends: dict[Action, float] = {}
    for rank, action in order:
        # The order is one of execution: what an action receives has its end here already.
        begin = spans[rank][-1].end if spans[rank] else 0.0
        source = schedule.source(action)
        if source and waits(action):
            is_sent = schedule.rank_of(source.stage) != rank
            begin = max(begin, ends[source] + is_sent * times.of("transfer", source.stage))
        ends[action] = begin + _duration(schedule, action, times)
        spans[rank].append(Span(action, begin, ends[action]))
    return Timeline(tuple(map(tuple, spans)))


def _duration(schedule, action, times) -> float:
    """A backward that is not split computes both gradients."""
    is_whole = action.kind == "B" and not schedule.is_split(action.stage, action.micro_batch)
    return times.of(action.kind, action.stage) + is_whole * times.of("W", action.stage)
