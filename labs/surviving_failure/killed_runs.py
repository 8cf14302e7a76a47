"""Jobs of all kinds that save after each step, are killed with SIGKILL, and are resumed by new
ranks."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from labs.checks.verdicts import Wrong
from labs.faults.injector import FaultInjector
from labs.surviving_failure.fingerprints import fingerprint, unlike
from labs.surviving_failure.resumable_job import KINDS, ResumableJob, new_job
from labs.surviving_failure.scaffold import shard_file, step_folder, to_bytes
from labs.workers.devices import random_states, set_random_states
from labs.workers.failures import RankFailed
from labs.workers.launcher import launch
from labs.workers.outcomes import Kind

Curves = dict[str, list[float]]  # kind of job -> losses of one rank


class Answer(NamedTuple):
    """The student's functions: job_state(job) and load_job_state(job, state), and a ZeRO-3."""

    job_state: Callable
    load_job_state: Callable
    zero3: Callable


class Kill(NamedTuple):
    """Rank `victim` is killed in step `step`, before the job of kind number `turn` has begun it."""

    victim: int
    step: int
    turn: int


def killed_and_resumed(answer: Answer, ranks: int, kills: list[Kill], steps: int, folder: Path,
                       kinds: tuple[str, ...] = KINDS) -> list[tuple[Curves, Curves]]:
    """The losses of `steps` steps on each rank: of jobs that were killed so many times and resumed
    from files each time, and of those that never were. Raises RankFailed where a job ends by
    something else."""
    for kill in kills:
        try:
            launch(_run, answer, folder, kinds, newest(folder, kinds, ranks), kill.step + 1, kill,
                   ranks=ranks, quiet=True)
        except RankFailed as error:
            # The other ranks fail too, because their connections close: the victim's outcome
            # decides.
            if error.outcomes[kill.victim].kind is not Kind.KILLED:
                raise
    # Nobody is killed now, so this launch alone comes to the jobs without interruption in _run.
    return launch(_run, answer, folder, kinds, newest(folder, kinds, ranks), steps, None,
                  ranks=ranks, quiet=True)


def newest(folder: Path, kinds: tuple[str, ...], ranks: int) -> dict[str, int]:
    """Kind of job -> the newest step that all ranks have saved; 0 if there is none."""
    def is_whole(path):
        return all(shard_file(path, rank).exists() for rank in range(ranks))

    return {kind: max((int(path.name.split("_")[1]) for path in (folder / kind).glob("step_*")
                       if is_whole(path)), default=0) for kind in kinds}


def _run(answer, folder, kinds, begin, steps, kill) -> tuple[Curves, Curves] | None:
    """On a rank: jobs of all kinds take turns, step by step, from where they were saved."""
    turns = [_Turns(answer, folder / kind, kind, begin[kind]) for kind in kinds]
    injector = FaultInjector()
    if kill:
        injector.fail_at(kill.victim, (kill.step, kill.turn))
    for step in range(min(begin.values()) + 1, steps + 1):
        for number, turn in enumerate(turns):
            injector.check(dist.get_rank(), (step, number))
            if turn.job.step < step:
                turn.take(save=kill is not None)
    resumed = {turn.job.kind: turn.losses for turn in turns}
    return resumed, {kind: new_job(kind, zero3=answer.zero3).train(steps) for kind in kinds}


class _Turns:
    """A job that takes turns with others on one rank: each has random numbers of its own."""

    def __init__(self, answer: Answer, folder: Path, kind: str, saved_step: int):
        self.answer, self.folder, self.losses = answer, folder, []
        # A new process: what is not loaded is not what it was.
        self.job = new_job(kind, seed=saved_step, zero3=answer.zero3)
        if saved_step:
            file = shard_file(step_folder(folder, saved_step), dist.get_rank())
            saved = torch.load(file, weights_only=False)
            self.losses = saved["losses"]
            answer.load_job_state(self.job, torch.load(saved["state"], weights_only=False))
            _judge_loaded(self.job, saved["fingerprint"])
        self.random_numbers = random_states(), random.getstate()

    def take(self, save: bool) -> None:
        """One step, and its state into a file."""
        # All jobs of this process share torch's and Python's generators: each turn begins with its
        # own state.
        set_random_states(self.random_numbers[0])
        random.setstate(self.random_numbers[1])
        self.losses += self.job.train()
        if save:
            _write(self.folder, self.job, self.losses, self.answer.job_state(self.job))
        self.random_numbers = random_states(), random.getstate()


def _write(folder, job: ResumableJob, losses, state):
    path = step_folder(folder, job.step)
    path.mkdir(parents=True, exist_ok=True)
    file = shard_file(path, dist.get_rank())
    temporary, its_state = file.with_suffix(".part"), file.with_suffix(".state")
    its_state.write_bytes(to_bytes(state))
    temporary.write_bytes(to_bytes({"losses": losses, "state": str(its_state),
                                    "fingerprint": fingerprint(job)}))
    # Last: `newest` takes a step for saved where this name exists on all ranks.
    os.replace(temporary, file)


def _judge_loaded(job: ResumableJob, saved: dict[str, str]):
    if parts := unlike(fingerprint(job), saved):
        raise Wrong(f"{job.kind} on {dist.get_world_size()} ranks: after the kill, rank "
                    f"{dist.get_rank()} has loaded step {saved['step']}, and differs in "
                    f"{', '.join(parts)}", "A new process has nothing but the file: the state "
                    "must hold all that is needed, by value.", code="state_not_restored")
