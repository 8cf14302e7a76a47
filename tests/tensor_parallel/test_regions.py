"""What the check of exercise 7.1 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from _build.definitions import definitions
from answers import judge_all

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("07a_tensor_parallel")
f, g, Row = right.CopyToRegion, right.ReduceFromRegion, right.RowParallelLinear


# 7.1


def pair(sums, copies=lambda x: x.view_as(x), back=None):
    """(f, g) that sum with `sums(x, group)` and copy with `copies(x)`; back(gradient): what both do
    in backward instead."""
    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return copies(x)

        @staticmethod
        def backward(ctx, gradient):
            return (back(gradient) if back else sums(gradient, ctx.group)), None

    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            return sums(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return (back(gradient) if back else copies(gradient)), None

    return Copy, Reduce


def summed(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def in_place(x, group):
    dist.all_reduce(x, group=group)
    return x


def mean(x, group):
    return summed(x, group) / dist.get_world_size(group)


def on_all_ranks(x, group):
    return summed(x, dist.group.WORLD)


def gathered(x, group):
    every = [torch.empty(x.shape, dtype=x.dtype) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, x.contiguous(), group=group)
    return sum(every)


def not_waited_for(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group, async_op=True)
    return x


def waited_for(x, group):
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group, async_op=True).wait()
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


class InPlaceBackward(f):
    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class GroupOfTheClass(f):
    """The group is kept on the class: the last call's, for all backwards."""

    @classmethod
    def forward(cls, ctx, x, group):
        GroupOfTheClass.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, GroupOfTheClass.group), None


def in_bf16(x, group):
    return summed(x.bfloat16(), group).to(x.dtype)


def by_funcol(x, group):
    """Waits where its result is read."""
    return funcol.all_reduce(x.contiguous(), "sum", group)


class WritesAndRestores(g):
    @staticmethod
    def forward(ctx, x, group):
        kept, total = x.clone(), x.contiguous()
        dist.all_reduce(total, group=group)
        total = total.clone()
        x.copy_(kept)
        return total


class OneGradient(f):
    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group)


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


def keeps_strides(x, group):
    """clone() keeps the strides of a transposed tensor: gloo sums it, NCCL refuses it."""
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


WRONG_REGIONS = [
    (pair(keeps_strides), "not_contiguous NCCL"),
    (pair(lambda x, group: x.view_as(x)), "not_summed rank's"),
    ((g, f), "summed_too_often"),
    ((f, SumsTwice), "summed_too_often ranks."),
    ((SumsTwice, g), "summed_too_often"),
    ((f, f), "not_summed"),
    (pair(mean), "averaged mean"),
    ((f, pair(in_place)[1]), "changes_input"),
    ((InPlaceBackward, g), "changes_input backward"),
    (pair(summed, back=torch.zeros_like), "zeros zeros"),
    ((f, WritesAndRestores), "changes_input"),
    (pair(in_bf16), "fewer_digits torch.float32"),
    ((f, pair(not_waited_for)[1]), "never_waited"),
    ((OneGradient, g), "raised_RuntimeError"),
    ((f, lambda x, group: x), "wrong_type")]
RIGHT_REGIONS = [(f, g), pair(summed), pair(waited_for), pair(by_funcol), pair(summed, torch.clone),
                 pair(ring_summed)]


def test_regions_on_2_ranks():
    judge_all(lab.check_regions, WRONG_REGIONS, RIGHT_REGIONS, ranks=2)


def test_regions_on_4_ranks():
    judge_all(lab.check_regions, [
        (pair(on_all_ranks), "wrong_group"),
        ((GroupOfTheClass, g), "wrong_group"),
        (pair(gathered), "wrong_traffic tensor")], [pair(ring_summed)], ranks=4)


def test_answers_that_are_not_filled_in_are_waited_for():
    class UnfilledFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            raise NotImplementedError("Exercise 7.1")

    assert lab.check_regions(f, UnfilledFunction).passed is None
