"""A job that fails, restarts and saves, event by event: its wall time and where that goes.

The job computes for an interval, saves, and so on; the last piece of work may be shorter, and is
saved as well. A failure may come at any time, also during a save or a restart. What was computed
since the last finished save is lost, and a save that fails is worth nothing.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class FailingRun:
    """Wall time of a job and its parts, all in the unit of the arguments.

    work: what had to be computed. saving: in saves that finished. lost: computing and saving that
    a failure undid. restarting: restarts, interrupted ones included.
    """

    work: float
    saving: float
    lost: float
    restarting: float
    failures: int

    @property
    def wall(self) -> float:
        """From the first start to the end of the last save."""
        return self.work + self.saving + self.lost + self.restarting

    @property
    def goodput(self) -> float:
        """The share of the wall time in which something was computed that was kept."""
        return self.work / self.wall


def simulate(work: float, interval: float, save: float, restart: float,
             gaps: Iterable[float]) -> FailingRun:
    """One run of a job. gaps: the time from the start to the first failure, and from each failure
    to the next; after the last gap nothing fails any more."""
    gaps = iter(gaps)
    left = next(gaps, math.inf)  # until the next failure
    done = saving = lost = restarting = 0.0
    failures, starts = 0, False
    while done < work:
        waiting = restart if starts else 0.0
        piece = min(interval, work - done)
        # A piece counts only with its save: all of it fits before the next failure, or none is
        # kept.
        if left >= waiting + piece + save:
            left -= waiting + piece + save
            restarting, done, saving = restarting + waiting, done + piece, saving + save
            starts = False
            continue
        restarting += min(left, waiting)
        # What came after the restart: computing, and perhaps a part of the save.
        lost += max(0.0, left - waiting)
        left = next(gaps, math.inf)
        failures, starts = failures + 1, True
    return FailingRun(work, saving, lost, restarting, failures)


def exponential_gaps(mean: float, seed: int | None = None) -> Iterator[float]:
    """Gaps between failures that come independently of each other: a Poisson process."""
    rng = random.Random(seed)
    while True:
        yield rng.expovariate(1 / mean)


def weibull_gaps(mean: float, shape: float, seed: int | None = None) -> Iterator[float]:
    """Gaps with Weibull's distribution and this mean. With a shape below 1 failures come in
    clusters, as in Schroeder and Gibson, "A large-scale study of failures in high-performance
    computing systems", 2006 (shapes of 0.7 to 0.8); 1 is `exponential_gaps`."""
    rng, scale = random.Random(seed), mean / math.gamma(1 + 1 / shape)
    while True:
        yield rng.weibullvariate(scale, shape)


def best_interval(wall: Callable[[float], float], low: float, high: float,
                  tries: int = 60) -> float:
    """The interval from low to high with the minimum wall(interval), which has one minimum: golden
    section on a logarithmic scale."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = math.log(low), math.log(high)
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = wall(math.exp(c)), wall(math.exp(d))
    for _ in range(tries):
        if at_c <= at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = wall(math.exp(c))
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = wall(math.exp(d))
    return math.exp((a + b) / 2)
