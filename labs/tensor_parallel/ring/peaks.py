"""The memory that an attention takes on a rank beside its piece of q, k and v, recorded."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn

from labs.meters import memory
from labs.tensor_parallel.ring.cases import WholeSequence

BYTES = 4  # of an fp32 number


def record_attention(attention: Callable, sequence: WholeSequence) -> memory.Report:
    """On a rank: what attention(q, k, v, positions, group) holds in forward and backward; its
    inputs and the gradient of its output were there before."""
    q, k, v = sequence.inputs()
    batch = {"q": q, "k": k, "v": v, "weights": sequence.piece(sequence.weights)}
    module = _Attention(attention, sequence.positions, sequence.group)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    return memory.record(lambda: (module, optimizer), [batch, batch])


class _Attention(nn.Module):
    """An attention in the place of a model: its loss is the sum of out · weights."""

    def __init__(self, attention, positions, group):
        super().__init__()
        self._attention, self._positions, self._group = attention, positions, group

    def forward(self, q, k, v, weights):
        for each in (q, k, v):  # in a model they are no leaves: no gradient stays to the next step
            each.grad = None
        out = self._attention(q, k, v, self._positions, self._group)
        return SimpleNamespace(loss=_WeightedSum.apply(out, weights))


class _WeightedSum(torch.autograd.Function):
    """The sum of out · weights, which keeps nothing but weights, and hands these on."""

    @staticmethod
    def forward(ctx, out, weights):
        ctx.save_for_backward(weights)
        return torch.dot(out.detach().flatten()[:1], weights.flatten()[:1])

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0], None
