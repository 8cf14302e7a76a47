"""Computing at a stated pace: on a rank, each block of a real model takes the seconds that a GPU's
stream would, and the rank sleeps for what the CPU did not need of them.

The CPU's own work counts as part of what it computes. A rank that has fallen behind catches up
before it sleeps again, also in the next step, as a CPU does that queues kernels for a GPU: what
decides is when a block's parameters were there and when the block before it ended, by the pace.
"""

import time

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from labs.fsdp.node.jobs import Job
from labs.fsdp.node.slowed import NodeLink
from labs.fsdp.node.step_seconds import Node, training_run
from labs.predictions.step_time.computation import head_times, layer_times, optimizer_seconds
from labs.training import models
from labs.training.strategies.asynchronous_fsdp2 import make_asynchronous


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


def set_pace(module: nn.Module, optimizer: torch.optim.Optimizer, job: Job, node: Node,
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
            args[0].register_hook(lambda gradient: end(gradient))

    def after(_, args, output):
        if not in_backward:
            pace.finish()
            first = output if isinstance(output, torch.Tensor) else output[0]
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


