"""The jobs of the billion-parameter lab at a laptop's size, on real ranks: memory, calls and bytes
are real, and seconds are those of a node that is slowed down (`slowed_node`)."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from labs.checks import comparison
from labs.checks.verdicts import shows
from labs.fsdp import memory_limits, slowed_node
from labs.fsdp.node_jobs import Checkpointing, Node, NodeJob, step_seconds
from labs.fsdp.node_run import Measured, NodeRun, Row
from labs.fsdp.slowed_node import HOP, NodeLink, set_pace
from labs.meters import memory
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.training import presets, strategies
from labs.training.memory_categories import Memory
from labs.words import counted
from labs.workers import memory as process_memory
from labs.workers.failures import OutOfMemory
from labs.workers.launcher import launch
from labs.workers.other_load import name_load
from labs.workers.progress import status
from labs.workers.slow_link import slow_link

BLOCK = 0.02  # seconds of a block's forward
WARM_UP, STEPS = 1, 2  # steps: those that are not timed, and those that are
SCALED_LAYERS = 4  # of the model that one rank holds alone
BEYOND = 1.02  # times the limit: what states need that DDP could never hold


@dataclass(frozen=True)
class SlowedNode:
    """A node of A100s and the same node at a laptop's pace. block: seconds of a block's forward.
    ratios: seconds of collectives over seconds of computing, of the real model on the real node and
    of the small one on the slowed node."""

    real: Node
    slowed: Node
    block: float
    ratios: tuple[float, float]

    def __repr__(self):
        return f"{self.real.card.name}s, slowed down: {1e3 * self.block:g} ms for a block's forward"


def size_of(layers: int | None = None, ranks: int | None = None) -> presets.Preset:
    """Returns what a laptop trains under the limit of 4.1, with so many layers and ranks."""
    changes = {"layers": layers, "ranks": ranks}
    return presets.preset("laptop", "limit",
                          **{name: n for name, n in changes.items() if n is not None})


@shows("Training a billion parameters")
def slow_down(shard: Callable, block: float = BLOCK) -> SlowedNode:
    """Returns a node of A100s on which a block's forward of the laptop's model takes `block`
    seconds, and communication the share of computing that it has of the billion-parameter model's
    on as many A100s."""
    node, small = Node(hardware.gpu("A100-80")), NodeJob("FSDP", shard, size_of())
    real = NodeJob("FSDP", shard, presets.preset("billion", ranks=small.size.ranks))
    slow = slowed_node.slowed(node, real, small, block)
    return SlowedNode(node, slow, block, (slowed_node.communication_ratio(real, node),
                                          slowed_node.communication_ratio(small, slow)))


@shows("Training a billion parameters")
def show_pace(node: SlowedNode) -> Table:
    """Returns a table of what the real and the slowed node compute and carry, and of the share that
    communication has of computing on both."""
    real, slow = node.real.card, node.slowed.card
    rates = [("products in 16 bits, GFLOP/s", real.flops, slow.flops),
             ("NVLink, GB/s", real.nvlink, slow.nvlink), ("PCIe, GB/s", real.pcie, slow.pcie),
             ("the card's memory, GB/s", real.bandwidth, slow.bandwidth),
             ("the host's memory, GB/s", node.real.host_bandwidth, node.slowed.host_bandwidth)]
    rows = [(name, f"{usual / 1e9:,.0f}", f"{slowed / 1e9:.3g}", f"{usual / slowed:,.0f}x")
            for name, usual, slowed in rates]
    rows.append(("collectives, for each second of computing",
                 *(f"{ratio:.3f} s" for ratio in node.ratios), ""))
    return Table("A node of A100s, and the same node slowed down",
                 ("", "A100 node", "slowed node", "slower"), rows,
                 note=f"On the slowed node a block's forward takes {1e3 * node.block:g} ms, and "
                      f"each step of a ring {1e3 * HOP:g} ms besides its bytes. The last row: the "
                      "billion-parameter model on 4 A100s, and the laptop's on 4 ranks.")


@shows("Training a billion parameters")
def laptop_steps(node: SlowedNode, billion: NodeRun, shard: Callable, checkpointed: Callable,
                 offloaded: Callable) -> NodeRun:
    """Runs the five steps, and one job on 1, 2, 4 ranks, on CPU ranks at the node's pace, under the
    memory limit of 4.1. Where GPUs have measured all that, returns what they did."""
    if billion.source == "measured":
        return billion
    jobs = laptop_jobs(shard, checkpointed, offloaded)
    scaling = scaled_jobs(checkpointed)
    limit, rows = memory_limits.CPU_LIMIT, []
    for number, job in enumerate(jobs + scaling, 1):
        with status(f"row {number} of {len(jobs + scaling)}: {job.name}"):
            rows.append(Row(job, predicted_peak(job), step_seconds(job, node.slowed),
                            measure(job, node.slowed, limit)))
    card = replace(node.slowed.card, usable=limit)
    return NodeRun(card, jobs[0].size.ranks, "paced", rows, rows[len(jobs):])


def laptop_jobs(shard: Callable, checkpointed: Callable, offloaded: Callable) -> list[NodeJob]:
    """Returns the rows before those of scaling."""
    small = size_of()
    large = replace(small, layers=next(
        layers for layers in range(small.layers, 1000)
        # Parameter, gradient and two moments in fp32: DDP has all of them on each rank.
        if 16 * replace(small, layers=layers).parameters
        > BEYOND * memory_limits.CPU_LIMIT))
    return [NodeJob("DDP", strategies.ddp, small, "ddp"), NodeJob("FSDP", shard, small),
            NodeJob("larger, FSDP", shard, large),
            NodeJob("… + checkpointing", checkpointed, large, checkpointing="full"),
            NodeJob("… + CPU offload", Checkpointing(offloaded), large, checkpointing="full",
                offload=True)]


def scaled_jobs(checkpointed: Callable) -> list[NodeJob]:
    """Returns one job on 1, 2, 4 ranks, which one of them holds alone."""
    return [NodeJob(f"checkpointed, {counted(count, 'rank')}", checkpointed,
                size_of(SCALED_LAYERS, count), checkpointing="full") for count in (1, 2, 4)]


def predicted_peak(job: NodeJob) -> Memory:
    """Returns the memory of one CPU rank at the peak of a step. Under offload states are on the
    host, as if they were sharded over very many ranks."""
    size = replace(job.size, ranks=job.size.hidden) if job.offload else job.size
    return memory_limits.predicted_peak_of(size, strategy=job.formula, device="cpu",
                                           checkpointing=job.checkpointing, backend="gloo")


def measure(job: NodeJob, node: Node, limit: float) -> Measured:
    """Trains the job on real ranks, each under the limit where this system has one."""
    limited = {"memory_limit": limit} if memory_limits.can_limit() else {}
    if not limited and predicted_peak(job).total > limit:
        return Measured(failure="out of memory, by formula: this system limits no process")
    name_load()
    try:
        found = launch(run, job, node, ranks=job.size.ranks, device="cpu", quiet=True,
                       verify=False, hang_after=60, **limited)
    except OutOfMemory:
        return Measured(failure="out of memory")
    slowest = [max(step) for step in zip(*(seconds for seconds, _ in found), strict=True)]
    peak = comparison.fullest([report for _, report in found]).step_peak
    # On CPU ranks the host's memory and the device's are one: what offload puts on the host is
    # taken away by its category.
    on_host = (peak.parameters + peak.gradients + peak.optimizer_state) * job.offload
    return Measured(peak.total - on_host, slowest)


def run(job: NodeJob, node: Node) -> tuple[list[float], memory.Report]:
    """On a rank: trains at the node's pace, and returns the seconds of each step; then records
    memory, which takes more than the limit leaves."""
    memory_limits.return_freed_memory()
    torch.set_num_threads(1)  # CPU kernels hold a buffer for each thread
    seconds = _trained(job, node)
    gc.collect()  # modules hold themselves in cycles
    process_memory.lift()
    return seconds, memory.record(lambda: comparison.build(job.strategy, job.size, _FusedAdamW),
                                  comparison.batches(job.size, 2),
                                  held=strategies.resident_tensors)


class _FusedAdamW(torch.optim.AdamW):
    """On a CPU the usual one calls eight operations for each tensor: four ranks on two cores would
    fall behind the pace, and what DTensor works out for each of them is most of a recording."""

    def __init__(self, params, **settings):
        super().__init__(params, fused=True, **settings)


def _trained(job, node) -> list[float]:
    """Seconds of each timed step."""
    module, optimizer = job.strategy(comparison.model_of(job.size), _FusedAdamW,
                                     **comparison.SETTINGS)
    [batch] = comparison.batches(job.size, 1)
    link, seconds = NodeLink.of(job, node), []
    with slow_link(link):
        pace = set_pace(module, optimizer, job, node, link)
        for number in range(WARM_UP + STEPS):
            # The steps before, which make the optimizer's state, fell far behind.
            if number == WARM_UP:
                dist.barrier()
                pace.restart()
            began = time.perf_counter()
            module(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP:]
