"""Runs the jobs of the billion-parameter lab on a node's GPUs: one launch for each row.

On one GPU a single rank of each job runs alone in a fake process group, and its memory is measured;
without a GPU everything is predicted for a node of A100s.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from labs.checks import comparison
from labs.checks.verdicts import shows
from labs.fsdp.node_jobs import (
    Node,
    NodeJob,
    StepSeconds,
    jobs_for,
    predicted_peak,
    scaling_jobs,
    step_seconds,
)
from labs.meters import memory, throughput
from labs.meters.host_copies import HostCopies
from labs.meters.metrics import Metric
from labs.predictions import hardware
from labs.predictions.dryrun import ddp, fake
from labs.predictions.hardware import GPU
from labs.training import strategies
from labs.training.loop import train
from labs.training.memory_categories import Memory
from labs.training.presets import machine
from labs.workers import cuda, devices
from labs.workers.failures import OutOfMemory, RanksStuck
from labs.workers.launcher import launch
from labs.workers.other_load import name_load
from labs.workers.progress import status

START = 12  # seconds from a launch to the first step, in order of magnitude
BUDGET = 30  # seconds of timed steps in a row
STOPPED = 100  # seconds after which a row is stopped
FEWEST, MOST = 2, 7  # timed steps


@dataclass(frozen=True)
class Measured:
    """What a job did. peak: bytes of the rank that held most. seconds: of a step, by round, those
    of the slowest rank; empty where no other rank existed. pinned, copied: bytes of the host's
    pinned memory, and between host and GPU in a step, of one rank. failure: why there is no more,
    such as "out of memory"."""

    peak: int | None = None
    seconds: list[float] = field(default_factory=list)
    pinned: int = 0
    copied: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Row:
    """A job, its predicted peak and step, and what was measured, if anything."""

    job: NodeJob
    peak: Memory
    step: StepSeconds
    measured: Measured | None = None

    @property
    def seconds(self) -> float:
        """Of a step, predicted."""
        return self.step.total


@dataclass(frozen=True)
class NodeRun:
    """All rows. source: "measured", "alone" (rank 0 of each job in a fake process group),
    "predicted", or "paced" (CPU ranks at a slowed node's pace). scaling: those of `rows` that are
    one job on more and more ranks."""

    card: GPU
    ranks: int
    source: str
    rows: list[Row]
    scaling: list[Row]

    @property
    def rank(self) -> str:
        """What a rank is called in tables."""
        return "rank" if self.source == "paced" else "GPU"

    def metrics(self) -> list[Metric]:
        """Peak and seconds of a step of every row that was measured."""
        return [metric for row in self.rows if row.measured for metric in _metrics_of(row)]

    def __repr__(self):
        return f"{len(self.rows)} rows on {self.card.name}, {self.source}"


def _metrics_of(row) -> list[Metric]:
    metrics = []
    if row.measured.peak is not None:
        metrics.append(Metric(f"{row.job.name}: peak", row.measured.peak, "bytes", row.peak.total))
    if row.measured.seconds:
        metrics.append(Metric.of_rounds(f"{row.job.name}: step", row.measured.seconds, "s",
                                        row.seconds))
    return metrics


def predicted_minutes(rows: list[Row]) -> float:
    """Returns the minutes that all rows take together, starts included."""
    # 3: the two steps of `_started`, and the one that decides how many are timed.
    return sum(START + min(BUDGET, MOST * row.seconds) + 3 * row.seconds for row in rows) / 60


@shows("Training a billion parameters")
def billion_parameters(shard: Callable, mixed: Callable, checkpointed: Callable,
                       offloaded: Callable, fsdp1: Callable) -> NodeRun:
    """Runs every job on this machine's GPUs. A job that runs out of memory is a row like the
    others, and so is one that takes too long."""
    card, ranks = find_card()
    chosen = {"shard": shard, "mixed": mixed, "checkpointed": checkpointed,
              "offloaded": offloaded, "fsdp1": fsdp1}
    jobs, scaling = jobs_for(card, ranks, chosen), scaling_jobs(ranks, checkpointed)
    node = Node(card)
    rows = [Row(job, predicted_peak(job), step_seconds(job, node)) for job in jobs + scaling]
    source = {"laptop": "predicted", "one-gpu": "alone", "node": "measured"}[machine()]
    if source == "predicted":
        return NodeRun(card, ranks, source, rows, rows[len(jobs):])
    minutes = predicted_minutes(rows)
    for number, row in enumerate(rows):
        with status(f"row {number + 1} of {len(rows)}: {row.job.name}; all of them take about "
                    f"{minutes:.0f} minutes, predicted"):
            rows[number] = replace(row, measured=measure(row.job, alone=source == "alone"))
    return NodeRun(card, ranks, source, rows, rows[len(jobs):])


def find_card() -> tuple[GPU, int]:
    """Returns this machine's GPU and the ranks of a job on its node: those that there are, or 8.
    Without a GPU, an A100."""
    if not devices.gpus():
        return hardware.gpu("A100-80"), 8
    [found] = launch(_name_and_memory, ranks=1, quiet=True)
    return hardware.recognised(*found), devices.gpus() if devices.gpus() > 1 else 8


def _name_and_memory() -> tuple[str, int]:
    return cuda.name(), cuda.total_memory()


def measure(job: NodeJob, alone: bool = False) -> Measured:
    """Runs one job on as many ranks as it has, or rank 0 of it alone."""
    # Parameter, gradient and two moments in fp32, of all ranks of the host; rank 0 alone has its
    # share.
    needs = 16 * job.parameters * job.offload / (job.size.ranks if alone else 1)
    if needs > 0.8 * host_memory():
        return Measured(failure=f"the host has only {host_memory() / 1e9:.0f} GB")
    name_load()
    try:
        found = launch(run_alone if alone else run, job, ranks=1 if alone else job.size.ranks,
                       quiet=True, verify=False, hang_after=60, timeout=STOPPED)
    except OutOfMemory:
        return Measured(failure="out of memory")
    except RanksStuck as error:
        # Only the row's own limit is a result. Ranks that wait for one another are a fault of the
        # job.
        if error.code != "timed_out":
            raise
        return Measured(failure=f"stopped after {STOPPED} s")
    slowest = [max(step) for step in zip(*(one.seconds for one in found), strict=True)]
    return replace(max(found, key=lambda one: one.peak), seconds=slowest)


def host_memory() -> int:
    """Returns the bytes that the host's programs may still take."""
    import psutil

    return psutil.virtual_memory().available


def run(job: NodeJob) -> Measured:
    """On a rank: trains some steps, and returns what they took and held."""
    step, batch = _started(job)
    # All ranks must time as many steps, so the slowest rank's first one decides for all.
    [first] = throughput.seconds_per_step({"": step}, rounds=1, warmup=0)[""]
    slowest = torch.tensor(first, device=devices.device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    rounds = min(MOST, max(FEWEST, int(BUDGET / slowest.item())))
    seconds = throughput.seconds_per_step({"": step}, rounds, warmup=0)[""]
    return replace(_held(job, step, batch), seconds=seconds)


def run_alone(job: NodeJob) -> Measured:
    """On a single rank: returns what rank 0 of the job holds, whose other ranks do not exist. What
    it gathers and reduces is allocated, and nobody fills it."""
    # The launch made a real group of one rank; a fake one of all ranks takes its place.
    dist.destroy_process_group()
    if devices.device().type == "cpu":
        # CPU kernels hold buffers for each thread: as many as one of all ranks would have.
        torch.set_num_threads(max(1, devices.cores() // job.size.ranks))
    with fake.ranks(job.size.ranks):
        step, batch = _started(job)
        return _held(job, step, batch)


def _started(job) -> tuple:
    """(function that trains one step, its batch), after the steps that are not like later ones."""
    # In TF32, as is usual from Ampere on; an older GPU computes in fp32.
    torch.set_float32_matmul_precision("high")
    [batch] = comparison.batches(job.size, 1)
    step = partial(train, *_build(job), [batch])
    step()  # makes the optimizer's state
    step()
    return step, batch


def _build(job) -> tuple:
    module, optimizer = comparison.build(job.strategy, job.size)
    if dist.get_backend() == "fake":
        ddp.complete_all_reduces(module)
    return module, optimizer


def _held(job, step, batch) -> Measured:
    """On a rank: what one step holds at its peak, and copies between GPU and host."""
    if devices.device().type == "cpu":  # its allocator keeps no peak, so a step is recorded
        inputs = sum(value.nbytes for value in batch.values())
        return Measured(memory.record(lambda: _build(job), [batch] * 2,
                                      held=strategies.resident_tensors).step_peak.total + inputs)
    cuda.reset_peak()
    with HostCopies() as copies:
        step()
    return Measured(cuda.memory().peak, pinned=cuda.pinned_memory(), copied=copies.bytes)
