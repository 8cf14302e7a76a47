"""Records what ranks measure of each step, while one of them, its data or the link is really slow
from some step on."""

import contextlib
import functools
import time
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from labs.faults.injector import FaultInjector
from labs.surviving_failure.scaffold import StepSeconds, smooth
from labs.training import data, models
from labs.workers import devices
from labs.workers.launcher import launch
from labs.workers.other_load import name_load
from labs.workers.progress import status
from labs.workers.slow_link import Link, slow_link

RANKS, STEPS, WARM_UP = 3, 26, 3
TRIES, TIME_BUDGET = 3, 9  # recordings; no further one begins after so many seconds
SLOWER = 10  # times as long: the slow rank's forward and backward
LINK = 0.03  # seconds of each collective on the healthy link: more than what a busy machine adds
LATER = 1.0  # steps: by how much slow data and a slow link make each step longer
CLEAR, QUIET = 0.2, 0.08  # of a step: what a fault adds at least, and anything else at most
FAULTS = {"healthy": None, "slow rank": (1, "compute", 12), "slow data": (2, "data", 14),
          "slow link": (None, "link", 13)}
"""Run -> the rank, the cause and the first slow step."""


@dataclass(frozen=True)
class RecordedRun:
    """timings[rank][step], and what was slowed down: (rank, cause, first slow step) or None."""

    timings: list[list[StepSeconds]]
    straggler: tuple[int | None, str, int] | None

    def __str__(self):
        return f"{len(self.timings)} ranks, {len(self.timings[0])} steps"

    @property
    def is_clear(self) -> bool:
        """Whether nothing else that the machine did looks like a fault, and the fault does."""
        rank, cause, since = self.straggler or (None, "", len(self.timings[0]))
        usual = median(step.data + step.compute + step.collectives
                       for own in self.timings for step in own)
        for (who, what), extra in self._extras().items():
            share = [each / usual for each in smooth(extra)]
            begins = since if (who, what) == (rank, cause) else len(extra)
            if max(share[:max(0, begins - 1)], default=0) > QUIET:
                return False
            if begins < len(extra) and min(share[begins + 1:]) < CLEAR:
                return False
        return True

    def _extras(self) -> dict[tuple[int | None, str], list[float]]:
        """(rank, cause) -> by how much that made each step longer, compared with the other ranks;
        for the link, with the first steps."""
        # The rank that comes last does not wait for others: its collectives are the transfer alone.
        least = [min(step.collectives for step in same)
                 for same in zip(*self.timings, strict=True)]
        found = {(None, "link"): [each - median(least[:10]) for each in least]}
        for cause in ("compute", "data"):
            seconds = [[getattr(step, cause) for step in own] for own in self.timings]
            for rank, own in enumerate(seconds):
                others = zip(*seconds[:rank], *seconds[rank + 1:], strict=True)
                found[rank, cause] = [mine - median(same)
                                      for mine, same in zip(own, others, strict=True)]
        return found


@functools.cache
def recorded_stragglers() -> dict[str, RecordedRun]:
    """Run -> what was recorded of it, once in a process. What a busy machine has disturbed is
    recorded again, a few times at most."""
    found: dict[str, RecordedRun] = {}
    began = time.monotonic()
    for _ in range(TRIES):
        names = [name for name in FAULTS if name not in found or not found[name].is_clear]
        if not names or time.monotonic() - began > TIME_BUDGET:
            break
        with status(f"recording {', '.join(names)}"):
            name_load()
            by_rank = launch(_record, names, ranks=RANKS, quiet=True, hang_after=20)
        found |= {name: RecordedRun([own[name] for own in by_rank], FAULTS[name])
                  for name in names}
    return {name: found[name] for name in FAULTS}


def _record(names) -> dict[str, list[StepSeconds]]:
    """On a rank: run -> what it measured of each step."""
    torch.set_num_threads(1)
    job = _Job()
    with slow_link(Link(latency=LINK)):
        for _ in range(WARM_UP):
            job.step()
        healthy = [sum(vars(job.step()).values()) for _ in range(5)]
        seconds = torch.tensor(median(healthy), device=devices.device())
        # The delays are multiples of a healthy step, the same ones on all ranks.
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return {name: _run(job, FAULTS[name], seconds.item()) for name in names}


def _run(job, fault, seconds) -> list[StepSeconds]:
    injector, measured = FaultInjector(), []
    job.times, job.delay = 1, 0.0
    with contextlib.ExitStack() as slower:
        if fault:
            rank, cause, since = fault
            injector.fail_at(rank, since, partial(_slow_down, job, cause, seconds, slower))
        for step in range(STEPS):
            injector.check(dist.get_rank(), step)
            measured.append(job.step())
    return measured


def _slow_down(job, cause, seconds, stack):
    """From now on. seconds: of a healthy step. stack: is closed when the link is fast again."""
    if cause == "compute":
        job.times = SLOWER
    elif cause == "data":
        job.delay = LATER * seconds
    else:
        stack.enter_context(slow_link(Link(latency=LINK + LATER * seconds)))


class _Job:
    """Data-parallel training by hand, so that collectives do not run beside backward. times: how
    often forward and backward are done; delay: seconds that each batch comes later."""

    def __init__(self):
        self.model = models.move_to_rank(models.gpt2(layers=1, hidden=64, context=32))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.times, self.delay = 1, 0.0
        [self.batch] = data.lm_batches(1, 2, 32, seed=dist.get_rank())

    def step(self) -> StepSeconds:
        """One step, measured."""
        loading, computing = _timed(self._load), _timed(self._compute)
        moving = _timed(self._reduce)
        computing += _timed(self.optimizer.step)
        return StepSeconds(loading, computing, moving)

    def _load(self):
        if self.delay:  # a sleep of 0 s gives the core away
            time.sleep(self.delay)
        self.inputs = {name: value.to(devices.device()) for name, value in self.batch.items()}

    def _compute(self):
        for _ in range(self.times):
            self.optimizer.zero_grad()
            self.model(**self.inputs).loss.backward()

    def _reduce(self):
        flat = torch.cat([each.grad.flatten() for each in self.model.parameters()])  # (parameters,)
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([each.numel() for each in self.model.parameters()])
        for parameter, part in zip(self.model.parameters(), parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))


def _timed(function) -> float:
    """Seconds on this rank's clock, until its device has done what `function` gave it."""
    began = time.perf_counter()
    function()
    devices.synchronize()
    return time.perf_counter() - began
