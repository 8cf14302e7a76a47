"""Code that somebody put into a model while looking for a mistake, and forgot there."""

import torch.distributed as dist

from labs.training.models import blocks


def watch_activations(model):
    """Averages the size of every other layer's activations over the ranks, in every step."""
    for block in blocks(model)[::2]:
        block.register_forward_hook(lambda _, __, output: _average(output))


def _average(output):
    hidden = output[0] if isinstance(output, tuple) else output
    size = hidden.detach().abs().mean()
    dist.all_reduce(size)
