"""What the check of exercise 7.2 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _build.definitions import definitions
from answers import judge_all
from torch import nn

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("07a_tensor_parallel")
f, g, Row = right.CopyToRegion, right.ReduceFromRegion, right.RowParallelLinear


def summed(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class SumsTwice(torch.autograd.Function):
    """An all-reduce whose backward is one, as torch's own differentiable one has it."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group), None


def ring_summed(x, group):
    """An all-reduce by hand: pieces go round, a reduce-scatter and an all-gather of sends."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    flat = torch.nn.functional.pad(x.contiguous().flatten(), (0, -x.numel() % ranks))
    pieces = list(flat.view(ranks, -1).clone())

    def passed_on(piece):
        arrived = torch.empty_like(piece)
        for work in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, piece, group=group, group_peer=(rank + 1) % ranks),
                dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - 1) % ranks)]):
            work.wait()
        return arrived

    for turn in range(ranks - 1):
        pieces[(rank - turn - 1) % ranks] += passed_on(pieces[(rank - turn) % ranks])
    for turn in range(ranks - 1):
        pieces[(rank - turn) % ranks] = passed_on(pieces[(rank + 1 - turn) % ranks])
    return torch.cat(pieces)[:x.numel()].view(x.shape)


# 7.2


def row(**changes):
    """A subclass of the solution's RowParallelLinear, with other methods."""
    return type("RowParallelLinear", (Row,), changes)


def whole_column(linear, group):
    return linear


def view_column(linear, group):
    shard = right.column_shard(linear, group)
    shard.weight = nn.Parameter(linear.weight.detach().chunk(dist.get_world_size(group))
                                [dist.get_rank(group)])
    return shard


def by_columns(linear, group):
    shard = right.column_shard(linear, group)
    shard.weight = nn.Parameter(linear.weight.detach().chunk(dist.get_world_size(group), 1)
                                [dist.get_rank(group)].clone())
    return shard


def dealt_out(linear, group):
    shard = right.column_shard(linear, group)
    shard.weight = nn.Parameter(linear.weight.detach()[
        dist.get_rank(group)::dist.get_world_size(group)].clone())
    return shard


def always_the_first(linear, group):
    shard = right.column_shard(linear, group)
    shard.weight = nn.Parameter(linear.weight.detach()[:len(shard.weight)].clone())
    return shard


def whole_kept(linear, group):
    shard = right.column_shard(linear, group)
    shard.original = [linear]
    return shard


def copy_kept(linear, group):
    """The shard, and a copy of the whole weight in a list."""
    shard = right.column_shard(linear, group)
    shard.original = [linear.weight.detach().clone()]
    return shard


def in_a_closure(linear, group):
    shard, whole = right.column_shard(linear, group), linear.weight.detach()
    shard.restore = lambda: whole
    return shard


def in_float32(linear, group):
    return right.column_shard(linear, group).float()


def f_inside(linear, group):
    shard = right.column_shard(linear, group)
    lab.map_input(shard, lambda x: f.apply(x, group))
    return shard


def no_error(linear, group):
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = linear.out_features // ranks
    shard = nn.Linear(linear.in_features, rows, linear.bias is not None, dtype=linear.weight.dtype)
    shard.weight.data = linear.weight.data[rank * rows:(rank + 1) * rows].clone()
    if linear.bias is not None:
        shard.bias.data = linear.bias.data[rank * rows:(rank + 1) * rows].clone()
    return shard


def asserts(linear, group):
    assert linear.out_features % dist.get_world_size(group) == 0
    return right.column_shard(linear, group)


def says_nothing(linear, group):
    if linear.out_features % dist.get_world_size(group):
        raise ValueError("this does not work")
    return right.column_shard(linear, group)


def bias_on_all(self, x):
    return g.apply(F.linear(x, self.weight, self.bias), self.group)


def bias_on_rank_0(self, x):
    is_first = dist.get_rank(self.group) == 0
    return g.apply(F.linear(x, self.weight, self.bias if is_first else None), self.group)


def no_sum(self, x):
    return F.linear(x, self.weight, self.bias)


def divided_bias(self, x):
    bias = None if self.bias is None else self.bias / dist.get_world_size(self.group)
    return g.apply(F.linear(x, self.weight, bias), self.group)


def gathers_weights(self, x):
    every = [torch.empty_like(self.weight) for _ in range(dist.get_world_size(self.group))]
    dist.all_gather(every, self.weight.detach(), group=self.group)
    inputs = [torch.empty_like(x) for _ in every]
    dist.all_gather(inputs, x.detach().contiguous(), group=self.group)
    every[dist.get_rank(self.group)], inputs[dist.get_rank(self.group)] = self.weight, x
    return F.linear(torch.cat(inputs, -1), torch.cat(every, 1), self.bias)


def gradient_summed(self, x):
    y = SumsTwice.apply(F.linear(x, self.weight), self.group)
    return y if self.bias is None else y + self.bias


WRONG_LINEAR = [
    ((whole_column, Row), "wrong_shape"),
    ((right.column_shard, lambda linear, group: linear),
     "wrong_shape RowParallelLinear"),
    ((view_column, Row), "memory_kept view"),
    ((by_columns, Row), "wrong_shape"),
    ((dealt_out, Row), "wrong_part"),
    ((always_the_first, Row), "wrong_part"),
    ((whole_kept, Row), "memory_kept after"),
    ((copy_kept, Row), "memory_kept returned"),
    ((in_a_closure, Row), "memory_kept after"),
    ((in_float32, Row), "wrong_dtype"),
    ((f_inside, Row), "wrong_scale neither"),
    ((no_error, Row), "no_error"),
    ((asserts, Row), "wrong_error"),
    ((says_nothing, Row), "sizes_not_named"),
    ((right.column_shard, row(forward=lambda self, x: None)), "wrong_type RowParallelLinear"),
    ((right.column_shard, row(forward=no_sum)), "not_summed"),
    ((right.column_shard, row(forward=bias_on_all)), "bias_on_every_rank"),
    ((right.column_shard, row(forward=bias_on_rank_0)), "gradient_missing"),
    ((right.column_shard, row(forward=divided_bias)), "wrong_scale 1/2"),
    ((right.column_shard, row(forward=gathers_weights)), "wrong_traffic all_gather"),
    ((right.column_shard, row(forward=gradient_summed)), "wrong_scale weight")]


def replaced_in_place(linear, group):
    """The layer that was given, with less in it."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if linear.out_features % ranks:
        raise ValueError(f"column_shard: choose a size that is a multiple of {ranks}, unlike "
                         f"{linear.out_features}")
    linear.weight = nn.Parameter(linear.weight.detach().chunk(ranks)[rank].clone())
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.detach().chunk(ranks)[rank].clone())
    linear.out_features //= ranks
    return linear


class Wrapped(nn.Module):
    """An inner linear layer without a bias, and a bias of its own."""

    def __init__(self, linear, group):
        super().__init__()
        columns = right.share(linear.in_features, group, "RowParallelLinear")
        self.inner = nn.Linear(columns, linear.out_features, False, dtype=linear.weight.dtype)
        self.inner.weight.data = linear.weight.data.chunk(
            dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous().clone()
        self.register_parameter("bias", None if linear.bias is None
                                else nn.Parameter(linear.bias.detach().clone()))
        self.group = group

    def forward(self, x):
        y = g.apply(self.inner(x), self.group)
        return y if self.bias is None else y + self.bias


class RingSum(torch.autograd.Function):
    """g, summed by a ring of sends."""

    @staticmethod
    def forward(ctx, x, group):
        return ring_summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def by_a_ring(self, x):
    y = RingSum.apply(F.linear(x, self.weight), self.group)
    return y if self.bias is None else y + self.bias


RIGHT_LINEAR = [(right.column_shard, Row), (replaced_in_place, Wrapped),
                (right.column_shard, row(forward=by_a_ring))]


def test_linear_shards_by_a_ring_on_4_ranks():
    judge_all(lab.check_linear_shards, [], RIGHT_LINEAR[-1:], ranks=4)


def test_linear_shards_on_2_ranks():
    judge_all(lab.check_linear_shards, WRONG_LINEAR, RIGHT_LINEAR, ranks=2)


def test_answers_that_are_not_filled_in_are_waited_for():
    class Unfilled:
        def __init__(self, *_):
            raise NotImplementedError("Exercise 7.2")

    waits = lab.check_linear_shards(right.column_shard, Unfilled)
    assert waits.passed is None and "7.2" in str(waits)
