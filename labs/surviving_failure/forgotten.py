"""What ranks do for the pictures of part A: jobs that continue without a part of their state."""

import copy
import random
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from labs.surviving_failure.killed_runs import Answer
from labs.surviving_failure.resumable_job import ResumableJob, ShuffledText, new_job
from labs.surviving_failure.scaffold import shard_file, step_folder
from labs.workers.devices import random_states, set_random_states

COPIED = 7  # steps before the copy: in the middle of the second epoch
STEPS_AFTER_RESUME = 6
REST = "all but the model"
LEFT_OUT = ("nothing", "the moments", "the schedule", "torch's random numbers",
            "Python's random numbers", "the epoch", "the position in it", REST)


def distances_forgetting_each() -> dict[str, list[float]]:
    """On a rank: what was left out -> distances of the losses."""
    job = new_job("DDP")
    job.train(COPIED)
    kept = _Copy(job)
    losses, found = job.train(STEPS_AFTER_RESUME), {}
    for what in LEFT_OUT:
        resumed = new_job("DDP", seed=1)
        kept.put_into(resumed, what)
        found[what] = [abs(loss - right) for loss, right in
                       zip(resumed.train(STEPS_AFTER_RESUME), losses, strict=True)]
    return found


def without_moments(answer: Answer, folder: Path, step: int, steps: int) -> list[float]:
    """On a rank: the losses of a job that has loaded a step's state, but its moments."""
    job = new_job("DDP", seed=1)
    file = shard_file(step_folder(folder, step), dist.get_rank())
    saved = torch.load(file, weights_only=False)
    answer.load_job_state(job, torch.load(saved["state"], weights_only=False))
    # AdamW makes new moments, of zeros, in its next step.
    job.optimizer.state.clear()
    return job.train(steps - step)


def load_with_gradients(save_dcp: Callable, load_dcp: Callable,
                        folder: Path) -> dict[str, list[float]]:
    """On a rank: what the new job had -> differences of the losses."""
    job = new_job("FSDP2", noisy=False)
    job.train(COPIED)
    save_dcp(job, folder)
    losses, found = job.train(STEPS_AFTER_RESUME), {}
    for what in ("no gradients", "gradients"):
        resumed = new_job("FSDP2", seed=1, noisy=False)
        if what == "gradients":
            # Where any parameter has a gradient, get_state_dict makes no moments for a fresh
            # optimizer (torch's _init_optim_state returns early). DCP then loads none, without an
            # error.
            resumed.module(**ShuffledText(noisy=False).next_batch()).loss.backward()
        load_dcp(resumed, folder)
        resumed.optimizer.zero_grad()
        found[what] = [abs(loss - right) for loss, right in
                       zip(resumed.train(STEPS_AFTER_RESUME), losses, strict=True)]
    return found


class _Copy:
    """A job's state in memory, of which a part can be left out."""

    def __init__(self, job: ResumableJob):
        self.tensors, self.optimizer = copy.deepcopy((job.tensors(), job.optimizer.state_dict()))
        self.schedule = job.scheduler.state_dict()
        self.random_numbers = random_states(), random.getstate()
        self.epoch, self.position = job.data.epoch, job.data.position

    def put_into(self, job: ResumableJob, without: str) -> None:
        """Loads all but one part into a new job."""
        for name, tensor in job.tensors().items():
            tensor.copy_(self.tensors[name])
        if without == REST:
            return
        # load_state_dict of an optimizer keeps the given tensors where dtype and device fit:
        # without a copy, the next job's steps would change those of this copy in place.
        state = {} if without == "the moments" else self.optimizer["state"]
        job.optimizer.load_state_dict(copy.deepcopy({**self.optimizer, "state": state}))
        if without != "the schedule":
            job.scheduler.load_state_dict(self.schedule)
        if without != "torch's random numbers":
            set_random_states(self.random_numbers[0])
        if without != "Python's random numbers":
            random.setstate(self.random_numbers[1])
        job.data.epoch = 0 if without == "the epoch" else self.epoch
        job.data.position = 0 if without == "the position in it" else self.position
