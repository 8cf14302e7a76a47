"""The sequence in t equal pieces, one for each rank of a tensor-parallel group: the borders of the
region in which hidden states are pieces.

Hidden states have the shape (batch, sequence, hidden); pieces are cut along dimension 1 and stand
in the order of the group's ranks.
"""

import torch
import torch.distributed as dist

from labs.words import counted
from labs.workers.collectives import all_gather_single


def all_gather_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns all ranks' pieces (b, s/t, h) joined to (b, s, h). Not differentiable."""
    ranks, batch = dist.get_world_size(group), x.shape[0]
    stacked = x.new_empty(ranks * batch, *x.shape[1:])  # (t·b, s/t, h)
    all_gather_single(stacked, x.detach().contiguous(), group=group)
    # The collective joins along dimension 0; the sequence is dimension 1: (t, b, s/t, h), (b, t,
    # s/t, h), (b, s, h).
    return stacked.unflatten(0, (ranks, batch)).transpose(0, 1).flatten(1, 2)


def split_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns this rank's piece of x, which all ranks have alike; backward gathers the gradients of
    all pieces. Raises ValueError if the ranks do not divide the sequence."""
    return _Split.apply(x, group)


def join_sequence(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Returns the pieces of all ranks joined; all ranks then compute the same with them, so
    backward keeps this rank's piece of the gradient, without a collective."""
    return _Join.apply(x, group)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _own_piece(x, group)

    @staticmethod
    def backward(ctx, gradient):
        # Each rank has the gradient of its own piece only; together they are x's, without a sum.
        return all_gather_sequence(gradient, ctx.group), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather_sequence(x, group)

    @staticmethod
    def backward(ctx, gradient):
        # A sum over the ranks would count the same gradient t times.
        return _own_piece(gradient, ctx.group), None


def _own_piece(x, group) -> torch.Tensor:
    # A copy: a view would keep the memory of the whole sequence.
    return _pieces(x, group)[dist.get_rank(group)].clone()


def _pieces(x, group) -> tuple[torch.Tensor, ...]:
    ranks, tokens = dist.get_world_size(group), x.shape[1]
    if tokens % ranks:
        raise ValueError(f"{counted(ranks, 'rank')} cannot divide a sequence of {tokens} tokens "
                         f"equally: pad it to {tokens + -tokens % ranks}")
    return x.chunk(ranks, dim=1)
