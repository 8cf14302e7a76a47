"""A transformer of a billion parameters on a node's GPUs: DDP and three forms of FSDP, unattended.

On one GPU a single rank of it runs alone, and its memory is measured; without a GPU everything is
predicted. The table says which.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from labs.exercises import comparison
from labs.exercises.verdicts import shows
from labs.fsdp.memory_limits import predicted_peak_of
from labs.fsdp.scaffold import shard_mixed
from labs.meters import memory
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.dryrun import ddp, fake
from labs.training import models, strategies
from labs.training.loop import train
from labs.training.memory_categories import GB, Memory
from labs.training.presets import Preset, preset
from labs.workers import cuda, devices
from labs.workers.failures import OutOfMemory
from labs.workers.launcher import launch

GPU = "A100-80"
_MIXED = partial(shard_mixed, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Job:
    """One row. train: its strategy; strategy, recipe and checkpointing: what
    labs.predictions.memory.predict calls it."""

    name: str
    train: Callable
    strategy: str
    recipe: str = "fp32"
    checkpointing: str = "none"

    def build(self, model: torch.nn.Module, optimizer_class, **settings) -> tuple:
        """A strategy: the job's, with activation checkpointing where the job has it."""
        if self.checkpointing == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return self.train(model, optimizer_class, **settings)


def jobs() -> list[Job]:
    """Returns the rows of the table."""
    return [Job("DDP", strategies.ddp, "ddp"), Job("FSDP", strategies.fsdp2, "fsdp2"),
            Job("FSDP, bf16", _MIXED, "fsdp2", "bf16 policy"),
            Job("FSDP, bf16, checkpointing", _MIXED, "fsdp2", "bf16 policy", "full")]


def billion(ranks: int | None = None) -> Preset:
    """Returns GPT-2 with 20 layers of width 2048: 1.0 billion parameters."""
    found = cuda.count()
    return replace(preset("node"), ranks=ranks or (found if found > 1 else 8), layers=20,
                   hidden=2048, heads=16, context=1024, batch=4)


def predicted_peak(job: Job, size: Preset, device: str = "cuda") -> Memory:
    """Returns the memory of one rank at the peak of a step, under NCCL."""
    return predicted_peak_of(size, strategy=job.strategy, recipe=job.recipe,
                             checkpointing=job.checkpointing, device=device, backend="nccl")


@shows("A billion parameters")
def billion_parameters(size: Preset | None = None, steps: int = 5) -> Table:
    """Runs every job on this machine's GPUs; returns a table of predicted and measured peaks and
    throughput. A job that runs out of memory is a row like the others."""
    size = size or billion()
    found = cuda.count()
    measure = _measure if found > 1 else _measure_alone if found else _predict_only
    rows = []
    for job in jobs():
        measured = measure(job, size, steps)
        peak = predicted_peak(job, size)
        fits = hardware.fits(peak.total, GPU, size.ranks)
        rows.append((job.name, f"{peak.total / GB:.1f}", f"{peak.activations / GB:.1f}",
                     "yes" if fits else "no", *measured))
    with torch.device("meta"):
        count = models.count_trainable(comparison.model_of(size))
    return Table(f"{count / 1e9:.2f} billion parameters on {size.ranks} GPUs, {size.batch} × "
                 f"{size.context} tokens each", ("", "GB, predicted", "of it activations",
                                                 f"fits {GPU}", "GB, measured", "tokens/s"),
                 rows,
                 note=_note(found, size))


def _note(found, size) -> str:
    if found > 1:
        return ""
    if found:
        return (f"Measured on one GPU, as rank 0 of {size.ranks} in a fake process group: its "
                "tensors are real, and so is their memory. Nothing travels, so there is no loss "
                "and no speed to report.")
    return "Predicted only: this machine has no GPU."


def _predict_only(job, size, steps) -> tuple[str, str]:
    return "–", "–"


def _measure_alone(job, size, steps) -> tuple[str, str]:
    try:
        [peak] = launch(peak_alone, job, size, ranks=1, quiet=True, verify=False, hang_after=300)
    except OutOfMemory:
        return "out of memory", "–"
    return f"{peak / GB:.1f}", "–"


def peak_alone(job: Job, size: Preset) -> int:
    """On a single rank: returns the bytes at the peak of the second step, as rank 0 of a job whose
    other ranks do not exist. What it gathers and reduces is allocated, and nobody fills it."""
    dist.destroy_process_group()
    # CPU kernels hold buffers for each thread: as many as one of all ranks would have.
    torch.set_num_threads(max(1, devices.cores() // size.ranks))
    with fake.ranks(size.ranks):
        [batch] = comparison.batches(size, 1)
        if devices.device().type == "cpu":
            inputs = sum(value.nbytes for value in batch.values())
            return memory.record(lambda: _build(job, size), [batch] * 2).step_peak.total + inputs
        module, optimizer = _build(job, size)
        train(module, optimizer, [batch])
        return _peak_of_step(module, optimizer, batch)


def _build(job, size) -> tuple:
    module, optimizer = comparison.build(job.build, size)
    ddp.complete_all_reduces(module)
    return module, optimizer


def _peak_of_step(module, optimizer, batch) -> int:
    """On a rank with a GPU, after the first step: returns the bytes at the peak of another."""
    cuda.reset_peak()
    train(module, optimizer, [batch])
    return cuda.memory().peak


def _measure(job, size, steps) -> tuple[str, str]:
    try:
        found = comparison.compare({job.name: job.build}, size, measure_memory=False,
                                   rounds=steps, observe=_peak_of_step, quiet=True)
    except OutOfMemory:
        return "out of memory", "–"
    peak = max(found.results[job.name].observed)
    return f"{peak / GB:.1f}", f"{found.tokens_per_second(job.name):,.0f}"
