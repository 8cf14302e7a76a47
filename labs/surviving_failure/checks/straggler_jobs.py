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
LATE = 1.8  # seconds by which an outlier is longer: nine times what a rank computes
Timings = list[list[StepSeconds]]  # [rank][step]
Straggler = tuple[int | None, str, int]  # the rank, the cause, the first slow step


@dataclass(frozen=True)
class Job:
    """A job and what is wrong in it, in seconds.

    straggler: None where nothing is. extra: by how much it makes each step longer. all_slower: from
    this step on all ranks compute half as long again, as with longer sequences. outliers: the rank,
    the cause and the step of single steps that are LATE seconds longer. small_data: a rank whose
    data takes three times as long as that of the others, which is a hundredth of a step. recovers:
    the step from which on the straggler is healthy again.
    """

    ranks: int
    steps: int
    straggler: Straggler | None = None
    extra: float = 0.0
    all_slower: int | None = None
    outliers: tuple[Straggler, ...] = ()
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
        later = {(rank, cause): LATE for rank, cause, at in self.outliers if at == step}
        if self.straggler and self.straggler[2] <= step < (self.recovers or self.steps):
            later[self.straggler[:2]] = self.extra + later.get(self.straggler[:2], 0.0)

        def noisy(seconds):
            return seconds * max(0.5, dice.gauss(1, self.noise))

        own = []
        for each in range(self.ranks):
            data = noisy(self.data * (3 if each == self.small_data else 1))
            compute = noisy(self.compute * (1.5 if self._is_longer(step) else 1))
            own.append(StepSeconds(data + later.get((each, "data"), 0.0),
                                   compute + later.get((each, "compute"), 0.0), 0.0))
        end = max(each.data + each.compute for each in own)
        end += noisy(self.transfer) + later.get((None, "link"), 0.0)
        return [replace(each, collectives=end - each.data - each.compute) for each in own]

    def _is_longer(self, step) -> bool:
        return self.all_slower is not None and step >= self.all_slower

    def __str__(self) -> str:
        found = [f"{self.ranks} ranks, {self.steps} steps of {1e3 * self._seconds:.0f} ms"]
        if self.straggler:
            found.append(f"{_who(self.straggler)} by {1e3 * self.extra:.0f} ms from step "
                         f"{self.straggler[2]} on"
                         + (f", until step {self.recovers}" if self.recovers else ""))
        if self.all_slower is not None:
            found.append(f"all ranks compute 1.5 times as long from step {self.all_slower} on")
        if self.outliers:
            found.append(f"{_who(self.outliers[0])} by {LATE} s in step {self.outliers[0][2]}, once"
                         + f", and {len(self.outliers) - 1} more such steps"
                         * (len(self.outliers) > 1))
        if self.small_data is not None:
            found.append(f"rank {self.small_data} takes 6 ms for its data, the others 2 ms")
        return "; ".join(found)

    @property
    def _seconds(self) -> float:
        return self.data + self.compute + self.transfer


def _who(found: Straggler) -> str:
    rank, cause, _ = found
    return {"link": "the link is slower", "compute": f"rank {rank} computes longer",
            "data": f"rank {rank} waits longer for its data"}[cause]


def jobs(dice: random.Random) -> list[Job]:
    """Jobs on every number of ranks from 2 to 16, the laziest answer's first. Which causes, first
    steps and further events come together is not left to the dice: each pair comes in every run."""
    found = [Job(4, 40, (2, "compute", 20), 0.15), Job(4, 40), Job(3, 40, (1, "data", 15), 0.15),
             Job(4, 40, (None, "link", 20), 0.15)]
    for ranks in range(2, 17):
        steps = dice.randrange(40, 61)
        for at, cause in enumerate(CAUSES):
            since = dice.randrange(12, steps - 12) if ranks % 2 or cause == "link" else 0
            rank = None if cause == "link" else dice.choice((0, ranks - 1, dice.randrange(ranks)))
            job = Job(ranks, steps, (rank, cause, since), dice.uniform(0.1, 0.5))
            found.append(_with_more(job, ranks + at, dice))
        found.append(_with_more(Job(ranks, steps), ranks, dice))
        longer = Job(ranks, steps, all_slower=dice.randrange(12, steps - 12))
        found.append(_with_more(longer, ranks + 1, dice))
    steps = 45
    found.append(Job(5, steps, (3, "compute", 12), 0.2, recovers=25))
    found.append(Job(6, steps, (None, "link", 14), 0.2, recovers=27))
    return found


def _with_more(job, kind, dice) -> Job:
    """The job, in two of three kinds with what is no straggler, far from where one begins."""
    if kind % 3 == 1:
        return replace(job, small_data=dice.randrange(job.ranks))
    if kind % 3 == 2:
        return replace(job, outliers=tuple(_outliers(job, dice)))
    return job


def _outliers(job, dice) -> Iterator[Straggler]:
    """Single steps, five at least from each other, from the ends and from where a fault begins.
    The first of them is the straggler's own, and early, so that it looks like the beginning."""
    begins = job.straggler[2] if job.straggler else job.all_slower
    last = dice.randrange(5, 8)
    yield *(job.straggler or _anybody(job, dice))[:2], last
    for step in range(last + 5, job.steps - 5):
        far = begins is None or abs(step - begins) > 4
        if far and step - last > 4 and dice.random() < 0.2:
            last = step
            yield *_anybody(job, dice), step


def _anybody(job, dice) -> tuple[int | None, str]:
    cause = dice.choice(CAUSES)
    return None if cause == "link" else dice.randrange(job.ranks), cause
