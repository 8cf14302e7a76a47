"""Records steps of FSDP2 on real ranks, healthy or slowed down on purpose, and keeps the traces."""

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from labs.fsdp_profiling import planted
from labs.meters.trace_file import load
from labs.training import models, presets
from labs.training.presets import Preset
from labs.workers import devices
from labs.workers.launcher import launch

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "fsdp_profiling"
WARM_UP = 2  # steps before those that are recorded


@dataclass(frozen=True)
class Job:
    """What is trained and recorded. units: "blocks", "layers" (every module that has parameters of
    its own) or "model" (one unit). prefetch: "default" or "off". fault: what slows it down, one of
    "", "item", "data", "rank" (that is `slow_rank`). tap: runs on a rank with the model before it
    is sharded."""

    preset: Preset
    name: str = "healthy"
    units: str = "blocks"
    prefetch: str = "default"
    fault: str = ""
    slow_rank: int = 0
    steps: int = 1
    stacks: bool = False
    configure: object = None
    tap: object = None


class Recorded(list):
    """One trace per rank, of a job; says where the files are."""

    def __init__(self, traces, job):
        super().__init__(traces)
        self.job = job

    def __repr__(self):
        return "\n".join([*map(repr, self), self.files])

    @property
    def files(self) -> str:
        """Where they are, and what opens them: one line."""
        where = Path(self[0].path)
        with contextlib.suppress(ValueError):
            where = where.relative_to(FOLDER.parents[1])
        return f"{where} …: open it at ui.perfetto.dev (Open trace file)"


def preset(**changes) -> Preset:
    """The preset of this machine, with a model as small as recording on a laptop wants it."""
    chosen = presets.preset()
    if chosen.name == "laptop":
        chosen = replace(chosen, layers=4, batch=4)
    return replace(chosen, **changes)


def run(job: Job) -> Recorded:
    """The traces of a job, read back from the files that the ranks wrote."""
    return run_all([job])[0]


def run_all(jobs: list) -> list:
    """`run` for several jobs of one preset, one after the other on the same ranks."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    by_rank = launch(lambda: [_recorded(job) for job in jobs], ranks=jobs[0].preset.ranks,
                     quiet=True, verify=False, hang_after=60)
    return [Recorded(traces, job) for traces, job in
            zip(zip(*by_rank, strict=True), jobs, strict=True)]


def _recorded(job):
    """On a rank: its trace, as its file has it."""
    model, optimizer = build(job)
    slow = job.fault == "rank" and dist.get_rank() == job.slow_rank and planted.SlowRank(model)
    dataset = planted.Batches(job.preset, WARM_UP + job.steps)
    batches = dataset.loader()
    for _ in range(WARM_UP):
        began = time.perf_counter()
        _step(model, optimizer, batches, job)
    if job.fault == "data":
        dataset.delay = planted.LOADING * planted.agreed(time.perf_counter() - began)
    if slow:
        slow.on = True
    activities = [ProfilerActivity.CPU]
    if devices.device().type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True, with_stack=job.stacks) as recorded:
        dist.barrier()
        for _ in range(job.steps):
            with record_function("labs::step"):
                _step(model, optimizer, batches, job)
        if activities[1:]:
            torch.cuda.synchronize()
    file = FOLDER / f"{job.name.replace(' ', '_')}_rank{dist.get_rank()}.json.gz"
    recorded.export_chrome_trace(str(file))
    return load(file)


def _step(model, optimizer, batches, job):
    batch = {name: value.to(devices.device()) for name, value in next(batches).items()}
    with record_function("labs::forward"):
        loss = model(**batch).loss
        if job.fault == "item":
            loss.item()
    with record_function("labs::backward"):
        loss.backward()
    with record_function("labs::optimizer"):
        optimizer.step()
        optimizer.zero_grad()


def build(job):
    """On a rank: (model under FSDP2, optimizer)."""
    sizes = job.preset
    model = models.gpt2(sizes.layers, sizes.hidden, sizes.heads, sizes.context)
    model = model.to(devices.device())
    if job.tap:
        job.tap(model)
    blocks = shard(model, job.units)
    if job.prefetch == "off":
        for block in [*blocks, model]:
            block.set_modules_to_backward_prefetch([block])
    if job.configure:
        job.configure(blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def shard(model, units: str = "blocks") -> list:
    """fully_shard on each unit and on the model; the units in forward order, without the model.

    A GPU has a stream for all-gathers, and issuing one does not stop the computing. A CPU has no
    streams: there FSDP is told to issue them asynchronously, by a method that is torch's own.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(devices.device().type, (dist.get_world_size(),))
    chosen = {"blocks": lambda: list(models.blocks(model)), "model": list,
              "layers": lambda: [m for block in models.blocks(model) for m in block.modules()
                                 if any(True for _ in m.parameters(recurse=False))]}[units]()
    for unit in [*chosen, model]:
        fully_shard(unit, mesh=mesh)
    if devices.device().type == "cpu":
        model._set_unshard_async_op(True)
    return chosen
