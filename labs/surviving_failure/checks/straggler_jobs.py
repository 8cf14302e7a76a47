"""Synthetic timings of jobs in which one rank, its data or the link becomes slow, or nothing does.

A rank loads and computes; then its collectives begin, and end on all ranks at once, when the last
rank has come and the bytes are moved. So all ranks have the same step, whoever is slow.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from labs.surviving_failure.scaffold import StepSeconds

CAUSES = ("compute", "data", "link")
HEALTHY = 10  # steps at the beginning in which no link is slow
Timings = list[list[StepSeconds]]  # [rank][step]
Straggler = tuple[int | None, str, int]  # the rank, the cause, the first slow step


@dataclass(frozen=True)
class Job:
    """A job and what is wrong in it, in seconds.

    straggler: None where nothing is. extra: by how much it makes each step longer. all_slower: from
    this step on all ranks compute half as long again, as with longer sequences. outliers: (rank,
    step): single steps in which a rank computes for ten times as long. small_data: a rank whose
    data takes three times as long as that of the others, which is a hundredth of a step. recovers:
    the step from which on the straggler is healthy again.
    """

    ranks: int
    steps: int
    straggler: Straggler | None = None
    extra: float = 0.0
    all_slower: int | None = None
    outliers: tuple[tuple[int, int], ...] = ()
    small_data: int | None = None
    recovers: int | None = None
    noise: float = 0.02
    data: float = 0.002
    compute: float = 0.2
    transfer: float = 0.05

    def timings(self, seed: float) -> Timings:
        """What the ranks measured."""
        dice = random.Random(seed)
        steps = [self._step(step, dice) for step in range(self.steps)]
        return [list(own) for own in zip(*steps, strict=True)]

    def _step(self, step, dice) -> list[StepSeconds]:
        rank, cause, since = self.straggler or (None, "", self.steps)
        is_slow = since <= step < (self.recovers or self.steps)
        later = self.extra if is_slow else 0.0

        def noisy(seconds):
            return seconds * max(0.5, dice.gauss(1, self.noise))

        own = []
        for each in range(self.ranks):
            data = noisy(self.data * (3 if each == self.small_data else 1))
            compute = noisy(self.compute * (1.5 if self._is_longer(step) else 1))
            compute *= 10 if (each, step) in self.outliers else 1
            own.append(StepSeconds(data + later * (cause == "data" and each == rank),
                                   compute + later * (cause == "compute" and each == rank), 0.0))
        end = max(each.data + each.compute for each in own)
        end += noisy(self.transfer) + later * (cause == "link")
        return [replace(each, collectives=end - each.data - each.compute) for each in own]

    def _is_longer(self, step) -> bool:
        return self.all_slower is not None and step >= self.all_slower

    def __str__(self) -> str:
        found = [f"{self.ranks} ranks, {self.steps} steps of {1e3 * self._seconds:.0f} ms"]
        if self.straggler:
            rank, cause, since = self.straggler
            who = "the link is slower" if cause == "link" else \
                f"rank {rank} computes longer" if cause == "compute" else \
                f"rank {rank} waits longer for its data"
            found.append(f"{who} by {1e3 * self.extra:.0f} ms from step {since} on"
                         + (f", until step {self.recovers}" if self.recovers else ""))
        if self.all_slower is not None:
            found.append(f"all ranks compute 1.5 times as long from step {self.all_slower} on")
        if self.outliers:
            rank, step = self.outliers[0]
            found.append(f"rank {rank} computes 10 times as long in step {step}"
                         + f" and {len(self.outliers) - 1} more such steps"
                         * (len(self.outliers) > 1))
        if self.small_data is not None:
            found.append(f"rank {self.small_data} takes 6 ms for its data, the others 2 ms")
        return "; ".join(found)

    @property
    def _seconds(self) -> float:
        return self.data + self.compute + self.transfer


def jobs(dice: random.Random) -> list[Job]:
    """Jobs on every number of ranks from 2 to 16, the laziest answer's first."""
    found = [Job(4, 40, (2, "compute", 20), 0.15), Job(4, 40), Job(3, 40, (1, "data", 15), 0.15),
             Job(4, 40, (None, "link", 20), 0.15)]
    for ranks in range(2, 17):
        steps = dice.randrange(40, 61)
        for cause in CAUSES:
            since = dice.choice((0, dice.randrange(12, steps - 12)))
            rank = dice.choice((0, ranks - 1, dice.randrange(ranks)))
            job = Job(ranks, steps, (rank, cause, since), dice.uniform(0.1, 0.5))
            if cause == "link":
                job = replace(job, straggler=(None, cause, dice.randrange(12, steps - 12)))
            found.append(_with_more(job, dice))
        found.append(_with_more(Job(ranks, steps), dice))
        found.append(_with_more(Job(ranks, steps, all_slower=dice.randrange(12, steps - 12)), dice))
    steps = 45
    found.append(Job(5, steps, (3, "compute", 12), 0.2, recovers=25))
    found.append(Job(6, steps, (None, "link", 14), 0.2, recovers=27))
    return found


def _with_more(job, dice) -> Job:
    """The job, in two of three cases with what is no straggler, far from where one begins."""
    kind = dice.randrange(3)
    if kind == 1:
        return replace(job, small_data=dice.randrange(job.ranks))
    if kind == 2:
        return replace(job, outliers=tuple(_outliers(job, dice)))
    return job


def _outliers(job, dice) -> Iterator[tuple[int, int]]:
    """Single steps, four at least from each other, from the ends and from where a fault begins."""
    begins = job.straggler[2] if job.straggler else job.all_slower
    last = 0
    for step in range(4, job.steps - 5):
        far = begins is None or abs(step - begins) > 4
        if far and step - last > 4 and dice.random() < 0.2:
            last = step
            yield dice.randrange(job.ranks), step
