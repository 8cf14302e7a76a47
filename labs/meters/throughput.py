"""How fast variants of the same work are, measured in turns on the ranks."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from labs.workers import cuda, devices

# On a GPU the first steps load kernels, connect NCCL's ranks and fill the allocator's cache.
WARMUP_ON_GPU = 5


@dataclass(frozen=True)
class Timing:
    """Seconds of a step over several rounds: the median, the minimum and the maximum."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        """Returns the timing of some rounds."""
        return cls(statistics.median(seconds), min(seconds), max(seconds))

    def __str__(self):
        return (f"{1e3 * self.median:.3g} ms ({1e3 * self.least:.3g} to {1e3 * self.most:.3g} by "
                "round)")


def seconds_per_step(steps: Mapping[str, Callable[[], object]], rounds: int = 7, warmup: int = 2,
                     repeat: int = 1) -> dict[str, list[float]]:
    """On a rank: the seconds per step of each variant, one value per round.

    steps: name -> function that does one step. The variants take turns, so that a machine that
    slows down slows down all of them; each turn begins with a barrier and takes `repeat` steps.
    warmup: rounds before those that count, on a GPU at least 5. Compare medians, as ratios. On a
    GPU the seconds are those between two CUDA events, the GPU's own.
    """
    warmup = warmup_rounds(warmup)
    seconds = {name: [] for name in steps}
    for round_ in range(warmup + rounds):
        for name, step in steps.items():
            dist.barrier()
            taken = timed(lambda step=step: [step() for _ in range(repeat)]) / repeat
            if round_ >= warmup:
                seconds[name].append(taken)
    return seconds


def warmup_rounds(least: int = 2) -> int:
    """Returns how many rounds come before those that count: on a GPU at least 5."""
    return max(least, WARMUP_ON_GPU) if devices.device().type == "cuda" else least


def timed(work: Callable[[], object]) -> float:
    """Returns the seconds that work() takes on this rank's device."""
    return cuda.seconds(work) if devices.device().type == "cuda" else _seconds(work)


def _seconds(work) -> float:
    """The seconds that work() took by the CPU's clock."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def tokens_per_second(results: Sequence[Mapping[str, list[float]]], tokens: int
                      ) -> dict[str, float]:
    """Tokens per second of all ranks together, by variant: the median step of the slowest rank.

    results: what `seconds_per_step` returned on each rank. tokens: what all ranks together process
    in one step.
    """
    return {name: tokens / max(statistics.median(result[name]) for result in results)
            for name in results[0]}
