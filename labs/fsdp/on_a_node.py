"""The node preset: a transformer of a billion parameters on 2 to 8 GPUs, DDP beside FSDP, without
anybody watching. Where there are no GPUs it says so, and predicts."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from labs.exercises import shows
from labs.meters import throughput
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.memory import predict
from labs.training import data, models, strategies
from labs.training.categories import GB
from labs.training.presets import Preset, preset
from labs.workers import devices
from labs.workers.failures import OutOfMemory
from labs.workers.launcher import launch

GPU = "A100-80"


@dataclass(frozen=True)
class Job:
    """One row. strategy: name in the predictions room. dtype: what is gathered and computed in."""

    name: str
    strategy: str
    recipe: str = "fp32"
    checkpointing: str = "none"


def jobs() -> list:
    mixed = "bf16 policy"
    return [Job("DDP", "ddp"), Job("FSDP", "fsdp2"), Job("FSDP, bf16", "fsdp2", mixed),
            Job("FSDP, bf16, checkpointing", "fsdp2", mixed, "full")]


def billion(ranks: int = None) -> Preset:
    """GPT-2 with 20 layers of width 2048: 1.0 billion parameters."""
    found = devices.gpus()
    return replace(preset("node"), ranks=ranks or (found if found > 1 else 8), layers=20,
                   hidden=2048, heads=16, context=1024, batch=4)


def predicted(job: Job, size: Preset):
    """Memory of one rank at the peak of a step on GPUs."""
    with torch.device("meta"):
        config = _model(size).config
    return predict(config, batch=size.batch, sequence=size.context, ranks=size.ranks,
                   strategy=job.strategy, recipe=job.recipe, checkpointing=job.checkpointing,
                   device="cuda", inputs=True)["peak"]


def _model(size):
    return models.gpt2(size.layers, size.hidden, size.heads, size.context)


@shows("4.1")
def node(size: Preset = None, steps: int = 5) -> Table:
    """Runs every job on the GPUs of this machine and reports peak and throughput; a job that runs
    out of memory is a row like the others. With fewer than two GPUs it only predicts."""
    size = size or billion()
    run = devices.gpus() >= 2
    rows = []
    for job in jobs():
        found = _run(job, size, steps) if run else ("–", "–")
        want = predicted(job, size).total
        fits = hardware.fits(want, GPU, size.ranks)
        rows.append((job.name, f"{want / GB:.1f}", "yes" if fits else "no", *found))
    with torch.device("meta"):
        count = models.count(_model(size))
    note = "" if run else ("Predicted only: this machine has fewer than two GPUs, and NCCL wants "
                           "one for each rank.")
    return Table(f"{count / 1e9:.2f} billion parameters on {size.ranks} GPUs, {size.batch} × "
                 f"{size.context} tokens each", ("", "GB, predicted", f"fits {GPU}",
                                                 "GB, measured", "tokens/s"), rows, note=note)


def _run(job, size, steps) -> tuple:
    try:
        found = launch(_train, job, size, steps, ranks=size.ranks, quiet=True, verify=False,
                       hang_after=300)
    except OutOfMemory:
        return "out of memory", "–"
    rate = throughput.medians([seconds for _, seconds in found], size.tokens)["step"]
    return f"{max(peak for peak, _ in found) / GB:.1f}", f"{rate:,.0f}"


def _train(job, size, steps) -> tuple:
    """On a rank with a GPU of its own: (bytes at the peak, seconds of each step)."""
    model = _model(size).to(devices.device())
    if job.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    module, optimizer = _strategy(job)(model, torch.optim.AdamW, lr=1e-4)
    [batch] = data.lm_batches(1, size.batch, size.context, seed=1000 * dist.get_rank())
    batch = {name: value.to(devices.device()) for name, value in batch.items()}

    def step():
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    step()
    torch.cuda.reset_peak_memory_stats()
    seconds = throughput.race({"step": step}, rounds=steps, warmup=1)
    return torch.cuda.max_memory_allocated(), seconds


def _strategy(job):
    if job.strategy == "ddp":
        return strategies.ddp
    if job.recipe == "fp32":
        return strategies.fsdp2
    from labs.fsdp.precision import with_policy

    return with_policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
