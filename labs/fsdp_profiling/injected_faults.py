"""What somebody may have changed in a model's code or settings, so that its ranks wait: prefetch
turned off, and collectives that nobody needs. A slow rank and slow data are in labs/faults."""

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional_collectives

from labs.training import models


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
        # A functional collective returns at once, and .item() waits for it: so the wait is in the
        # trace at the call of .item().
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
