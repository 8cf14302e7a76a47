"""The node preset: a transformer of a billion parameters on 2 to 8 GPUs, DDP beside FSDP, without
anybody watching. On one GPU one rank of it is run alone, and its memory measured; without a GPU it
is predicted; each says so."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from labs.exercises.verdicts import shows
from labs.meters import memory, throughput
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.dryrun import ddp, fake
from labs.predictions.memory import predict
from labs.training import data, models, strategies
from labs.training.memory_categories import GB
from labs.training.presets import Preset, preset
from labs.workers import devices
from labs.workers.failures import OutOfMemory
from labs.workers.launcher import launch

GPU = "A100-80"


@dataclass(frozen=True)
class Job:
    """One row. strategy, recipe and checkpointing are those of labs.predictions.memory.predict."""

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


def predicted(job: Job, size: Preset, device: str = "cuda"):
    """Memory of one rank at the peak of a step; on GPUs NCCL keeps no copies of what it carries."""
    with torch.device("meta"):
        config = _model(size).config
    return predict(config, batch=size.batch, sequence=size.context, ranks=size.ranks,
                   strategy=job.strategy, recipe=job.recipe, checkpointing=job.checkpointing,
                   device=device, backend="nccl", inputs=True)["peak"]


def _model(size):
    return models.gpt2(size.layers, size.hidden, size.heads, size.context)


@shows("4.1")
def node(size: Preset = None, steps: int = 5) -> Table:
    """Runs every job on the GPUs of this machine and reports peak and throughput; a job that runs
    out of memory is a row like the others. On one GPU each job's rank 0 runs alone (see `alone`),
    without one all is predicted."""
    size = size or billion()
    found = devices.gpus()
    run = _run if found > 1 else _run_alone if found else _run_nothing
    rows = []
    for job in jobs():
        measured = run(job, size, steps)
        want = predicted(job, size).total
        fits = hardware.fits(want, GPU, size.ranks)
        rows.append((job.name, f"{want / GB:.1f}", "yes" if fits else "no", *measured))
    with torch.device("meta"):
        count = models.count_trainable(_model(size))
    return Table(f"{count / 1e9:.2f} billion parameters on {size.ranks} GPUs, {size.batch} × "
                 f"{size.context} tokens each", ("", "GB, predicted", f"fits {GPU}",
                                                 "GB, measured", "tokens/s"), rows,
                 note=_note(found, size))


def _note(found, size) -> str:
    if found > 1:
        return ""
    if found:
        return (f"Measured on one GPU, as rank 0 of {size.ranks} in a fake process group: its "
                "tensors are real, and so is their memory. Nothing travels, so there is no loss "
                "and no speed to report.")
    return "Predicted only: this machine has no GPU."


def _run_nothing(job, size, steps) -> tuple:
    return "–", "–"


def _run_alone(job, size, steps) -> tuple:
    try:
        [peak] = launch(alone, job, size, ranks=1, quiet=True, verify=False, hang_after=300)
    except OutOfMemory:
        return "out of memory", "–"
    return f"{peak / GB:.1f}", "–"


def alone(job: Job, size: Preset) -> int:
    """On a single rank: bytes at the peak of the second step, as rank 0 of a job whose other ranks
    are not there. What it gathers and reduces is allocated, and nobody fills it."""
    dist.destroy_process_group()
    torch.set_num_threads(max(1, devices.cores() // size.ranks))  # each keeps buffers of kernels
    with fake.ranks(size.ranks):
        [batch] = data.lm_batches(1, size.batch, size.context)
        batch = {name: value.to(devices.device()) for name, value in batch.items()}
        if devices.device().type == "cpu":
            inputs = sum(value.nbytes for value in batch.values())
            return memory.record(lambda: _build(job, size), [batch] * 2).step_peak.total + inputs
        module, optimizer = _build(job, size)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            _step(module, optimizer, batch)
        return torch.cuda.max_memory_allocated()


def _run(job, size, steps) -> tuple:
    try:
        found = launch(_train, job, size, steps, ranks=size.ranks, quiet=True, verify=False,
                       hang_after=300)
    except OutOfMemory:
        return "out of memory", "–"
    rate = throughput.tokens_per_second([seconds for _, seconds in found], size.tokens)["step"]
    return f"{max(peak for peak, _ in found) / GB:.1f}", f"{rate:,.0f}"


def _train(job, size, steps) -> tuple:
    """On a rank with a GPU of its own: (bytes at the peak, seconds of each step)."""
    module, optimizer = _build(job, size)
    [batch] = data.lm_batches(1, size.batch, size.context, seed=1000 * dist.get_rank())
    batch = {name: value.to(devices.device()) for name, value in batch.items()}

    def step():
        _step(module, optimizer, batch)

    step()
    torch.cuda.reset_peak_memory_stats()
    seconds = throughput.seconds_per_step({"step": step}, rounds=steps, warmup=1)
    return torch.cuda.max_memory_allocated(), seconds


def _build(job, size) -> tuple:
    model = _model(size).to(devices.device())
    if job.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    module, optimizer = _strategy(job)(model, torch.optim.AdamW, lr=1e-4)
    if dist.get_backend() == "fake":
        ddp.answer(module)
    return module, optimizer


def _step(module, optimizer, batch):
    module(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _strategy(job):
    if job.strategy == "ddp":
        return strategies.ddp
    if job.recipe == "fp32":
        return strategies.fsdp2
    from labs.fsdp.precision import with_policy

    return with_policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
