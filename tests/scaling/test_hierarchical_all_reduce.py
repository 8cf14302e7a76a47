"""What the check of exercise 6.6 must reject, and what it must accept."""

import sys
from functools import partial
from unittest import mock

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _build.definitions import definitions
from answers import assert_rejected
from torch.distributed.device_mesh import init_device_mesh

import labs.scaling as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("06_scaling")
# 6.6 hierarchical_all_reduce


def in_three_steps(tensor, mesh):
    total = tensor.clone()
    right.hierarchical_all_reduce(total, mesh)
    return total


class Hierarchical:
    def a_name_is_bound(tensor, mesh):
        tensor = in_three_steps(tensor, mesh)

    def without_a_group(tensor, mesh):
        """The all-reduce of the pieces runs over all ranks."""
        all_ranks = init_device_mesh("cpu", (dist.get_world_size(),))
        tensor.copy_(in_three_steps(tensor, {"inside": mesh["inside"], "across": all_ranks}))

    def not_waited_for(tensor, mesh):
        with mock.patch.object(dist, "all_reduce", partial(dist.all_reduce, async_op=True)):
            tensor.copy_(in_three_steps(tensor, mesh))

    def another_dtype(tensor, mesh):
        inside = mesh["inside"]
        padded = F.pad(tensor.flatten(), (0, -tensor.numel() % inside.size()))
        piece = torch.empty(len(padded) // inside.size())
        dist.reduce_scatter_tensor(piece, padded, group=inside.get_group())
        dist.all_reduce(piece, group=mesh["across"].get_group())
        dist.all_gather_into_tensor(padded, piece, group=inside.get_group())
        tensor.copy_(padded[:tensor.numel()].view_as(tensor))

    def flat(tensor, mesh):
        dist.all_reduce(tensor)

    def a_copy_is_returned(tensor, mesh):
        return in_three_steps(tensor, mesh)

    def inside_only(tensor, mesh):
        dist.all_reduce(tensor, group=mesh["inside"].get_group())

    def across_only(tensor, mesh):
        dist.all_reduce(tensor, group=mesh["across"].get_group())

    def two_whole_all_reduces(tensor, mesh):
        dist.all_reduce(tensor, group=mesh["inside"].get_group())
        dist.all_reduce(tensor, group=mesh["across"].get_group())

    def a_slice_of_a_whole_all_reduce(tensor, mesh):
        inside = mesh["inside"]
        flat = tensor.flatten()
        padded = F.pad(flat, (0, -len(flat) % inside.size()))
        dist.all_reduce(padded, group=inside.get_group())
        piece = padded.chunk(inside.size())[inside.get_local_rank()].clone()
        dist.all_reduce(piece, group=mesh["across"].get_group())
        dist.all_gather_into_tensor(padded, piece, group=inside.get_group())
        tensor.copy_(padded[:len(flat)].view_as(tensor))

    def dimensions_exchanged(tensor, mesh):
        tensor.copy_(in_three_steps(tensor, {"inside": mesh["across"], "across": mesh["inside"]}))

    def piece_over_all_ranks(tensor, mesh):
        pieces = F.pad(tensor.flatten(), (0, -tensor.numel() % dist.get_world_size()))
        piece = pieces.new_empty(len(pieces) // dist.get_world_size())
        dist.reduce_scatter_tensor(piece, pieces)
        dist.all_gather_into_tensor(pieces, piece)
        tensor.copy_(pieces[:tensor.numel()].view_as(tensor))

    def mean(tensor, mesh):
        total = in_three_steps(tensor, mesh)
        tensor.copy_((total / dist.get_world_size()).to(tensor.dtype))

    def without_padding(tensor, mesh):
        inside = mesh["inside"]
        flat = tensor.flatten()
        piece = flat.new_empty(len(flat) // inside.size())
        dist.reduce_scatter_tensor(piece, flat, group=inside.get_group())
        dist.all_reduce(piece, group=mesh["across"].get_group())
        dist.all_gather_into_tensor(flat, piece, group=inside.get_group())
        tensor.copy_(flat.view_as(tensor))

    def the_rest_is_left_out(tensor, mesh):
        ranks = mesh["inside"].size()
        whole = tensor.flatten()
        most = len(whole) // ranks * ranks
        if most:
            whole[:most] = in_three_steps(whole[:most].clone(), mesh)
        tensor.copy_(whole.view_as(tensor))

    def leaders_only(tensor, mesh):
        inside = mesh["inside"]
        leader = inside.mesh[0].item()
        dist.reduce(tensor, leader, group=inside.get_group())
        if dist.get_rank() == leader:
            dist.all_reduce(tensor, group=mesh["across"].get_group())
        dist.broadcast(tensor, leader, group=inside.get_group())

    def rank_0_is_left_out(tensor, mesh):
        total = in_three_steps(tensor, mesh)
        if dist.get_rank():
            tensor.copy_(total)

    def without_the_middle(tensor, mesh):
        inside = mesh["inside"]
        tensor.copy_(in_three_steps(tensor, {"inside": inside, "across": inside}))

    def in_bfloat16(tensor, mesh):
        """Half of the bytes on the link, and 8 of 24 bits."""
        tensor.copy_(in_three_steps(tensor.bfloat16(), mesh))

    def in_float32(tensor, mesh):
        tensor.copy_(in_three_steps(tensor.float(), mesh))

    def gathered_everywhere(tensor, mesh):
        everyone = tensor.new_empty(dist.get_world_size() * tensor.numel())
        dist.all_gather_into_tensor(everyone, tensor.flatten())
        tensor.copy_(everyone.view(dist.get_world_size(), -1).sum(0).view_as(tensor))


WRONG = [
    (Hierarchical.a_name_is_bound, "not_in_place"),
    (Hierarchical.without_a_group,
     "wrong_group"),
    (Hierarchical.in_bfloat16, "fewer_digits"),
    (Hierarchical.in_float32, "fewer_digits 64"),
    (Hierarchical.not_waited_for, "never_waited"),
    (Hierarchical.another_dtype, "raised_RuntimeError"),
    (Hierarchical.flat, "wrong_group 004"),
    (Hierarchical.a_copy_is_returned, "not_in_place"),
    (Hierarchical.inside_only, "wrong_result its"),
    (Hierarchical.across_only, "wrong_result place"),
    (Hierarchical.two_whole_all_reduces, "too_much_between_hosts"),
    (Hierarchical.a_slice_of_a_whole_all_reduce, "too_much_inside_hosts"),
    (Hierarchical.dimensions_exchanged, "too_much_between_hosts|wrong_group"),
    (Hierarchical.piece_over_all_ranks, "wrong_group"),
    (Hierarchical.mean, "wrong_result mean"),
    (Hierarchical.without_padding, "raised_RuntimeError zeros"),
    (Hierarchical.the_rest_is_left_out, "wrong_sum 1001"),
    (Hierarchical.leaders_only, "too_much_between_hosts|too_much_inside_hosts"),
    (Hierarchical.rank_0_is_left_out, "not_in_place"),
    (Hierarchical.without_the_middle, "wrong_sum|wrong_result"),
    (Hierarchical.gathered_everywhere, "wrong_group"),
    (lambda tensor: None, "raised_TypeError")]


def by_all_to_all(tensor, mesh):
    """The reduce-scatter as an exchange of pieces that each rank adds up."""
    inside, across = mesh["inside"].get_group(), mesh["across"].get_group()
    ranks = mesh["inside"].size()
    pieces = F.pad(tensor.flatten(), (0, -tensor.numel() % ranks)).view(ranks, -1)
    got = torch.empty_like(pieces)
    dist.all_to_all_single(got, pieces, group=inside)
    piece = got.sum(0)
    dist.all_reduce(piece, group=across, async_op=True).wait()
    found = [torch.empty_like(piece) for _ in range(ranks)]
    dist.all_gather(found, piece, group=inside)
    tensor.copy_(torch.cat(found)[:tensor.numel()].view_as(tensor))


def with_own_groups(tensor, mesh):
    """The four collectives of a ring, also between hosts: reduce-scatter and all-gather."""
    ranks, hosts = mesh["inside"].size(), mesh["across"].size()
    whole = F.pad(tensor.flatten(), (0, -tensor.numel() % (ranks * hosts)))
    groups, parts = [mesh["inside"].get_group(), mesh["across"].get_group()], [whole]
    for group, number in zip(groups, (ranks, hosts), strict=True):
        piece = whole.new_empty(len(parts[-1]) // number)
        dist.reduce_scatter_tensor(piece, parts[-1].contiguous(), group=group)
        parts.append(piece)
    for group, part, piece in zip(groups[::-1], parts[1::-1], parts[:0:-1], strict=True):
        dist.all_gather_into_tensor(part, piece, group=group)
    tensor.copy_(whole[:tensor.numel()].view_as(tensor))


def in_place(tensor, mesh):
    right.hierarchical_all_reduce(tensor, mesh)
    return tensor


RIGHT = [in_place, by_all_to_all, with_own_groups]


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_hierarchical_all_reduce(answer), expected)


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_hierarchical_all_reduce(answer)
    assert verdict.passed, verdict
