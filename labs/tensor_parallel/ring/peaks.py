"""The memory that ring attention takes on a rank beside its piece of q, k and v: recorded, and
predicted."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from labs.meters import memory
from labs.tensor_parallel.ring.blocks import block_attention, block_backward
from labs.tensor_parallel.ring.cases import Shape, WholeSequence
from labs.workers.collectives import all_gather_single

BYTES = 4  # of an fp32 number


def record_attention(attention: Callable, sequence: WholeSequence) -> memory.Report:
    """On a rank: what attention(q, k, v, positions, group) holds in forward and backward; its
    inputs and the gradient of its output were there before."""
    q, k, v = sequence.inputs()
    batch = {"q": q, "k": k, "v": v, "weights": sequence.piece(sequence.weights)}
    module = _Attention(attention, sequence.positions, sequence.group)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    return memory.record(lambda: (module, optimizer), [batch, batch])


def predicted_peak(shape: Shape, ranks: int, gathered: bool = False) -> float:
    """Bytes at the peak, which is in backward, for pieces of `shape` in fp32.

    A block of scores is (s/N)² numbers for each head, and two are there at a time: probabilities
    and their gradient. The ring holds in addition what 17 pieces of the size of Q take: K, V, dK
    and dV that leave, those that arrive, out, dQ and this block's contributions. Gathered, a block
    is (s/N) · s, and K, V, their gradients and one copy more are those of N ranks. The mask has one
    byte for each pair.
    """
    piece = shape.batch * shape.heads * shape.tokens * shape.d * BYTES
    scores = shape.batch * shape.heads * shape.tokens**2 * BYTES
    blocks = 2 * scores + shape.tokens**2
    return ranks * blocks + 5 * (ranks + 1) * piece if gathered else blocks + 17 * piece


class _Attention(nn.Module):
    """An attention in the place of a model: its loss is the sum of out · weights."""

    def __init__(self, attention, positions, group):
        super().__init__()
        self._attention, self._positions, self._group = attention, positions, group

    def forward(self, q, k, v, weights):
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


class GatheredAttention(torch.autograd.Function):
    """The attention that gathers K and V of all ranks first, to compare with: it is right, and each
    rank holds the whole sequence and the scores of its queries to all keys."""

    @staticmethod
    def forward(ctx, q, k, v, positions, group):
        ctx.group = group
        keys, values, places = _gathered(k, group, 2), _gathered(v, group, 2), _gathered(
            positions, group, 0)
        visible = positions[:, None] >= places
        out, lse = block_attention(q, keys, values, visible)
        ctx.save_for_backward(q, keys, values, visible, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        dq, *parts = block_backward(*ctx.saved_tensors, grad)
        for part in parts:
            dist.all_reduce(part, group=ctx.group)
        ranks, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        dk, dv = (part.chunk(ranks, dim=2)[rank].clone() for part in parts)
        return dq, dk, dv, None, None


def gathered_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor,
                       group: dist.ProcessGroup) -> torch.Tensor:
    """Attention with K and V of all ranks gathered: what ring attention is compared with."""
    return GatheredAttention.apply(q, k, v, positions, group)


def _gathered(piece, group, dim):
    ranks = dist.get_world_size(group)
    flat = piece.new_empty(ranks * piece.numel())
    all_gather_single(flat, piece.contiguous().view(-1), group=group)
    return torch.cat(list(flat.view(ranks, *piece.shape)), dim)
