"""What a job is made of, part by part, as short texts that can be compared: where they are equal,
the part is equal to the last bit."""

import hashlib
import random
from collections.abc import Iterable

import torch

from labs.surviving_failure.resumable_job import ResumableJob
from labs.training.models import local_shard
from labs.workers.devices import random_states

NONE = "none"
# part -> what a hint says where it is not what was saved
HINTS = {
    "parameters": "job.tensors() has them; `tensor.copy_(saved)` fills one in place.",
    "frozen parameters": "A new job begins with others: job.tensors() has those, too, that are not "
                         "trained.",
    "buffers": "They change in training, and no optimizer has them: job.tensors() does.",
    "exp_avg": "job.optimizer.state_dict() has the moments, of this rank's shards.",
    "exp_avg_sq": "job.optimizer.state_dict() has the moments, of this rank's shards.",
    "the optimizer's step": "AdamW corrects the moments by its own count of steps: "
                            "job.optimizer.state_dict() has it.",
    "learning rate": "It stands in the optimizer's groups: load_state_dict puts it there.",
    "schedule": "job.scheduler.state_dict() counts the steps. Without it, the learning rate of the "
                "next step is still right, and those after it are not.",
    "torch's random numbers": "Dropout draws them, on each rank others: lab.random_states() and "
                              "lab.set_random_states(saved), and nothing that draws after it.",
    "Python's random numbers": "The data draws them: random.getstate() and random.setstate(saved).",
    "epoch": "Each epoch has another order: job.data.epoch.",
    "position": "The batches of this epoch that were taken: job.data.position.",
    "step": "job.step is a number that you set.",
}
PARTS = tuple(HINTS)


def fingerprint(job: ResumableJob) -> dict[str, str]:
    """part -> a text for what the job has there, on this rank; NONE where it has nothing."""
    # Only this rank's shards are read: a fingerprint needs no collective, and gathers nothing.
    tensors = job.tensors()
    buffers = [name for name, _ in job.model.named_buffers()]
    frozen = [name for name, p in job.model.named_parameters() if not p.requires_grad]
    trained = [value for name, value in tensors.items() if name not in (*buffers, *frozen)]
    return {
        "parameters": _digest(trained),
        "frozen parameters": _digest(tensors[name] for name in frozen),
        "buffers": _digest(tensors[name] for name in buffers),
        "exp_avg": _of_optimizer(job, "exp_avg"),
        "exp_avg_sq": _of_optimizer(job, "exp_avg_sq"),
        "the optimizer's step": _of_optimizer(job, "step"),
        "learning rate": ", ".join(
            repr(float(group["lr"])) for group in job.optimizer.param_groups),
        "schedule": f"step {job.scheduler.last_epoch}",
        "torch's random numbers": _digest(random_states()),
        "Python's random numbers": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "epoch": repr(job.data.epoch), "position": repr(job.data.position), "step": repr(job.step)}


def unlike(found: dict[str, str], want: dict[str, str]) -> list[str]:
    """The parts that differ."""
    return [part for part in PARTS if found[part] != want[part]]


def _of_optimizer(job, name) -> str:
    """Of the moments or the steps of all that is trained, in the order of the groups."""
    states = [job.optimizer.state.get(parameter, {}) for group in job.optimizer.param_groups
              for parameter in group["params"]]
    values = [torch.as_tensor(state[name]) for state in states if name in state]
    if name == "step" and values and len({float(value) for value in values}) == 1:
        return f"{float(values[0]):g} in {len(values)} tensors"
    return _digest(values)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    count = 0
    for tensor in tensors:
        array = local_shard(tensor.detach()).contiguous().cpu()
        # Dtype and shape belong to it: the same bytes may be another tensor.
        found.update(f"{array.dtype}{tuple(array.shape)}".encode())
        # view(-1), because a tensor without dimensions has no view in a dtype of another size.
        found.update(array.view(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"")
        count += 1
    return found.hexdigest() if count else NONE
