"""What slows a recorded step down on purpose, in proportion to what this machine does meanwhile: so
each fault has the same share of a step on a fast machine and on a slow one."""

import time

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives

from labs.training import models
from labs.workers import devices

EXTRA_COMPUTING = 40  # times a block's forward: what a slow rank computes in addition
LOADING = 3  # times a step: how long a slow data loader takes


class SlowRank:
    """Once `active`, burns EXTRA_COMPUTING times the CPU time of each block's forward after it. The
    thread's CPU time makes the ratio independent of what else the machine does."""

    def __init__(self, model):
        self.active, self.began = False, 0.0
        self.square = torch.ones(256, 256, device=devices.device())
        for block in models.blocks(model):
            block.register_forward_pre_hook(lambda *_: self._begin())
            # Prepended: it must run before FSDP2's hook, which frees the gathered parameters.
            block.register_forward_hook(lambda *_: self._burn(), prepend=True)

    def _begin(self):
        self.began = time.thread_time()

    def _burn(self):
        now = time.thread_time()
        until = now + EXTRA_COMPUTING * (now - self.began) * self.active
        while time.thread_time() < until:
            self.square @ self.square


class Loading:
    """What a data loader does with each batch, in `delay` seconds: nothing."""

    def __init__(self):
        self.delay = 0.0

    def __call__(self, batch):
        time.sleep(self.delay)
        return batch


def without_prefetch(units) -> None:
    """Turns the prefetch of backward off."""
    for unit in units:
        # An empty list means the default. A unit that fetches itself fetches nothing.
        unit.set_modules_to_backward_prefetch([unit])


def prefetch_forward(units) -> None:
    """Lets each unit prefetch the next one in forward, as on a GPU, where the CPU runs ahead."""
    for unit, following in zip(units, units[1:], strict=False):
        unit.set_modules_to_forward_prefetch([following])


def check_for_nan(model) -> None:
    """After every layer of the blocks, asks all ranks whether one of them has a NaN, and reads the
    answer with `.item()`: the rank stops until the answer is there."""
    def hook(module, arguments, output):
        found = functional_collectives.all_reduce(
            torch.isnan(output).any().float(), "max", dist.group.WORLD)
        assert not found.item()

    for block in models.blocks(model):
        for layer in block.modules():
            if any(True for _ in layer.parameters(recurse=False)):
                layer.register_forward_hook(hook)


def watch_activations(model) -> None:
    """Averages the size of every other block's activations over the ranks, in every forward: code
    that somebody added while looking for a mistake, and forgot."""
    for block in models.blocks(model)[::2]:
        block.register_forward_hook(lambda _, __, output: _average(output))


def _average(output):
    hidden = output[0] if isinstance(output, tuple) else output
    size = hidden.detach().abs().mean()
    dist.all_reduce(size)
