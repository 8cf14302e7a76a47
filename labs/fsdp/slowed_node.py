"""A node of GPUs, slowed down until CPU ranks keep up with it: its rates, its links, and computing
at its pace.

One factor slows what is computed, so that a block of a small model takes the stated seconds; one
slows all that carries bytes, so that collectives take the same share of computing as the real
model's do on the real node. On a rank, each block of a real model takes the seconds that a GPU's
stream would: the rank sleeps for what the CPU did not need of them.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from labs.fsdp.node_jobs import Node, NodeJob, communication_seconds, step_seconds, training_run
from labs.predictions.hardware import GPU
from labs.predictions.step_time.communication import link_rate
from labs.predictions.step_time.computation import head_times, layer_times, optimizer_seconds
from labs.predictions.step_time.constants import LINK_SHARE, Overheads
from labs.training import models
from labs.training.strategies.asynchronous_fsdp2 import make_asynchronous
from labs.workers.slow_link import Link

HOP = 2e-4  # seconds of a step of a ring
LEAST = 1e-3  # seconds of a block's forward


def slowed(node: Node, real: NodeJob, small: NodeJob, block: float) -> Node:
    """Returns the node on which a block's forward of `small` takes `block` seconds, and
    `communication_ratio` is that of `real` on `node`.

    Products of the small model are taken to reach the rate of large ones."""
    constants = replace(node.constants, half_size=0.0, hop=HOP)
    # A sleeping rank starts no kernels, so no host is waited for.
    code = replace(node.code, constants=constants, overheads=Overheads())
    usual = replace(node, code=code)
    free = replace(node, code=replace(code, constants=replace(constants, hop=0.0)))
    layer = layer_times(training_run(small, usual), constants)[0]
    sends = communication_seconds(small, free)
    hops = communication_seconds(small, usual) - sends
    computing = 3 * block * small.size.layers  # backward computes twice what forward does
    for _ in range(4):  # the head, which counts too, is slowed down with the blocks
        share = communication_ratio(real, node) * computing
        # Of a real model so small that hops alone take longer, bytes keep a tenth of its share.
        slower = max(share - hops, 0.1 * share) / sends
        traffic = min(slower * layer.memory, block / 2)
        computes = (block - traffic) / (layer.matmul + layer.attention)
        if block < LEAST:
            raise ValueError(f"{block:g} s for a block are too few: a laptop's link has a latency, "
                             "and memory traffic takes its time")
        found = Node(_slower(node.card, computes, slower), code)
        computing = step_seconds(small, found).computing
    return found


def _slower(card, computes, carries) -> GPU:
    """The card with its FLOP/s divided by one factor, and all bytes/s, also its host's, by
    another."""
    host = card.generation.host_bandwidth / carries
    return replace(card, generation=replace(card.generation, host_bandwidth=host),
                   flops=card.flops / computes, nvlink=card.nvlink and card.nvlink / carries,
                   bandwidth=card.bandwidth / carries, pcie=card.pcie / carries)


def communication_ratio(job: NodeJob, node: Node) -> float:
    """Returns the seconds of a step's collectives, hidden or not, over those of its computing."""
    return communication_seconds(job, node) / step_seconds(job, node).computing


class OnLink(NamedTuple):
    """When a collective of a kind is on a link, by the device's clock; copies before and after it
    are not."""

    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class NodeLink(Link):
    """A rank's link on a slowed node. pcie: bytes/s of copies between host and device, which pass
    before a gather and after a reduction of shards that live on the host; 0 where none do. On a
    rank: carried, the last collectives; computed, until when the device has something to compute,
    by time.perf_counter(); free, when the link is."""

    pcie: float = 0.0
    carried: deque[OnLink] = field(default_factory=partial(deque, maxlen=8), compare=False)
    computed: list[float] = field(default_factory=lambda: [math.inf], compare=False)
    free: list[float] = field(default_factory=lambda: [0.0], compare=False)

    @classmethod
    def of(cls, job: NodeJob, node: Node) -> "NodeLink":
        """Returns the link of the job's ranks on the node."""
        ranks = job.size.ranks
        return cls(link_rate(training_run(job, node), max(2, ranks)), (ranks - 1) * HOP,
                   node.card.pcie * LINK_SHARE * job.offload)

    def seconds(self, kind: str, nbytes: int, ranks: int) -> float:
        """Returns how long a collective and its copies are in flight, and notes when it is on the
        link, which carries one after the other. A CPU that has fallen behind calls it late; on a
        GPU it would follow what was computed before it."""
        sends = super().seconds(kind, nbytes, ranks) if ranks > 1 else 0.0
        copies = (nbytes / ranks / self.pcie
                  if self.pcie and kind in ("all_gather", "reduce_scatter") else 0.0)
        begin = max(min(time.perf_counter(), self.computed[0]), self.free[0])
        self.free[0] = begin + copies + sends
        begin += copies * (kind == "all_gather")
        self.carried.append(OnLink(kind, begin, begin + sends))
        return sends + copies

    def ended(self, kind: str = "") -> float:
        """When the last collective (of this kind) ended that has ended by now; 0 where none has."""
        now = time.perf_counter()
        return max((one.end for one in self.carried
                    if kind in ("", one.kind) and one.end <= now), default=0.0)

    def busy(self, begin: float, end: float) -> float:
        """For how many seconds of an interval collectives are on the link."""
        return sum(max(0.0, min(end, one.end) - max(begin, one.begin)) for one in self.carried)


class Pace:
    """What a rank's device computes, one thing after the other. unhidden: seconds by which a second
    of communication makes longer what is computed meanwhile."""

    def __init__(self, link: NodeLink, unhidden: float):
        self._link, self._unhidden = link, unhidden
        self.restart()

    def restart(self) -> None:
        """Has nothing to compute and nothing to catch up with."""
        self._begun = time.perf_counter()
        self._extend(self._begun)

    def begin(self, seconds: float, after: str = "") -> None:
        """Computes for so long, once what is computed now and the collectives of this kind (of any)
        that the caller has waited for are done."""
        self.finish()
        self._begun = max(self._end, self._link.ended(after))
        self._extend(self._begun + seconds)

    def finish(self) -> None:
        """Returns when what is computed now is done."""
        _sleep_until(self._end)
        self._extend(self._end + self._unhidden * self._link.busy(self._begun, self._end))
        _sleep_until(self._end)
        self._begun = self._end

    def _extend(self, end):
        self._end = self._link.computed[0] = end


def _sleep_until(when):
    time.sleep(max(0.0, when - time.perf_counter()))


def set_pace(module: nn.Module, optimizer: torch.optim.Optimizer, job: NodeJob, node: Node,
             link: NodeLink) -> Pace:
    """Lets each block of the job's module, its head and its optimizer take the node's seconds, and
    FSDP2's collectives be in flight meanwhile."""
    run = training_run(job, node)
    forward, backward = layer_times(run, node.constants)
    pace, blocks = Pace(link, node.constants.unhidden), list(models.blocks(module))
    for block in blocks:
        _pace_block(block, pace, forward.total, backward.total)
    # The blocks' hooks have run by then: the loss follows the last one.
    module.register_forward_hook(
        lambda *_: pace.begin(head_times(run, node.constants).total))
    if isinstance(module, FSDPModule):
        make_asynchronous(module, optimizer)
        # A CPU that queues kernels is a unit ahead of its GPU, and so is the unit's gather. Here it
        # computes itself, so the next gather has to be asked for.
        for block, following in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([following])
    optimizer.register_step_pre_hook(lambda *_: pace.begin(optimizer_seconds(run)))
    optimizer.register_step_post_hook(lambda *_: pace.finish())
    return pace


def _pace_block(block, pace, forward, backward):
    in_backward = False  # where a checkpointed block's forward runs again, backward has begun

    def before(_, args):
        if not in_backward:
            pace.begin(forward, "all_gather")
            # The gradient of the block's input is the last one that its backward computes.
            args[0].register_hook(lambda gradient: end(gradient))

    def after(_, args, output):
        if not in_backward:
            pace.finish()
            first = output if isinstance(output, torch.Tensor) else output[0]
            # The gradient of its output is there when its backward begins.
            first.register_hook(begin)

    def begin(gradient):
        nonlocal in_backward
        in_backward = True
        pace.begin(backward, "all_gather")

    def end(gradient):
        nonlocal in_backward
        in_backward = False
        pace.finish()  # before the block's gradients are reduced

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)
