"""Whether the recorded step that a picture shows is a usual one: recorded steps and steps without
the profiler take turns, and a picture is refused whose step is far from their median.

The house's rule for every picture that shows seconds of one step: without it, two pictures of one
run can contradict each other, because another program disturbed one of them.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labs.meters import throughput
from labs.meters.trace import Trace
from labs.meters.trace_file import RecordedStep, record_step
from labs.words import counted, listed
from labs.workers import devices

MAX_DEVIATION = 1 / 3  # of the usual seconds: how far a step may be from them and still be drawn
KEPT_RECORDINGS = 2  # recordings of each variant that stay in memory


class NotTypical(RuntimeError):
    """Raised where a picture would show a step that is not like the others; the message, one
    sentence, says what to do."""

    def _render_traceback_(self):  # IPython's hook
        return [str(self)]


@dataclass(frozen=True)
class TypicalStep:
    """The recorded step of one rank that is nearest to the usual one.

    recorded, measured: seconds of each recorded step and of each step without the profiler, of the
    slowest rank; they took turns. chosen: which recorded step `trace` is of.
    """

    trace: Trace
    recorded: list[float]
    measured: list[float]
    chosen: int

    @property
    def seconds(self) -> float:
        """Of the step that is drawn."""
        return self.recorded[self.chosen]

    @property
    def usual(self) -> float:
        """The median that this step is compared with, in seconds."""
        return usual_seconds(self.recorded, self.measured)


def usual_seconds(recorded: Sequence[float], measured: Sequence[float]) -> float:
    """Returns the median of the steps without the profiler. On GPUs, or without any such step, that
    of the recorded ones: there the profiler makes a short step longer, each time by as much."""
    return statistics.median(recorded if devices.gpus() or not measured else measured)


def is_typical(seconds: float, usual: float) -> bool:
    """Returns whether a step differs from the usual seconds by at most a third of them."""
    return abs(seconds - usual) <= MAX_DEVIATION * usual


def require_typical(steps: Mapping[str, tuple[float, float]], again: str) -> None:
    """Raises NotTypical where a step that is to be drawn differs too much from the usual one.

    steps: title -> (its seconds, the usual seconds). again: what to run again, for example "the
    cell with lab.compare".
    """
    if odd := {title: pair for title, pair in steps.items() if not is_typical(*pair)}:
        words = [f"{title}: {1e3 * seconds:.0f} ms, but usually {1e3 * usual:.0f} ms"
                 for title, (seconds, usual) in odd.items()]
        raise NotTypical(
            f"not drawn, because {counted(len(odd), 'recorded step')} took over a third longer or "
            f"shorter than usual ({listed(words)}): another program disturbed this machine, so run "
            f"{again} again when it is quieter")


def record_in_turns(steps: Mapping[str, Callable[[], object]],
                    labelled: Mapping[str, Callable[[], object]], rounds: int
                    ) -> dict[str, TypicalStep]:
    """On a rank: in each round every variant takes a step without the profiler, and then one with
    it, so that what disturbs this machine for a while disturbs all alike.

    steps: name -> function that does one step; labelled: the same with a label around each phase.
    Before the rounds that count, one warms up, or as many as a GPU needs.
    """
    found = {name: _Recordings() for name in steps}
    warmup = throughput.warmup_rounds(1)  # of three steps each
    for round_ in range(warmup + rounds):
        for name, step in steps.items():
            # Not timed: the profiler's stop and the variant before gave memory back to the system,
            # and the first step that takes it again pays for each page.
            step()
            dist.barrier()
            measured, recorded = throughput.timed(step), record_step(labelled[name])
            if round_ >= warmup:
                found[name].add(recorded, measured)
    return {name: one.typical() for name, one in found.items()}


class _Recordings:
    """On a rank: the seconds of all steps of one variant, and of its recordings the KEPT_RECORDINGS
    ones that are nearest to the median so far. With all of them in memory (20 were enough), page
    faults made every later step up to twice as long."""

    def __init__(self):
        self.recorded: list[float] = []
        self.measured: list[float] = []
        self.kept: dict[int, RecordedStep] = {}

    def add(self, recording: RecordedStep, measured: float) -> None:
        """Adds a step of each kind. All ranks keep the same ones: they know the same seconds."""
        recorded, measured = of_slowest_rank([recording.seconds, measured])
        self.recorded.append(recorded)
        self.measured.append(measured)
        self.kept[len(self.recorded) - 1] = recording
        while len(self.kept) > KEPT_RECORDINGS:
            del self.kept[max(self.kept, key=self._distance)]

    def typical(self) -> TypicalStep:
        """Reads the recording that is nearest to the median: only this one, because to write and to
        read one takes longer than the step."""
        chosen = min(self.kept, key=self._distance)
        return TypicalStep(self.kept[chosen].write(), self.recorded, self.measured, chosen)

    def _distance(self, number) -> float:
        return abs(self.recorded[number] - usual_seconds(self.recorded, self.measured))


def of_slowest_rank(seconds: Sequence[float]) -> list[float]:
    """On a rank: of each step the seconds of the slowest rank, which the others wait for."""
    # (2,): float64, because float32 has seven digits only
    found = torch.tensor(list(seconds), dtype=torch.float64, device=devices.device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()
