"""Allocations followed through a profile, whose frees on other threads are not reported."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from labs import launch
from labs.meters import allocations, memory
from labs.meters.allocations import COMPARES_SHAPES, Allocation

MARKS = [1, 9, 20]


def test_a_block_whose_end_was_not_told_ends_where_its_address_is_used_again():
    events = [(0, 7, 100, ()), (10, 7, 50, ()), (20, 7, -50, ())]
    assert [(b.nbytes, b.begin, b.end) for b in allocations.follow(events)] == [
        (100, 0, 10), (50, 10, 20)]


@pytest.mark.parametrize("spans", [
    ("aten::flatten_dense_tensors", "aten::cat"),
    ("_c10d_functional::reduce_scatter_tensor", "c10d::reduce_scatter_tensor_coalesced_",
     "aten::clone", "aten::empty_strided"),
    (allocations.COMPARES_SHAPES, "aten::empty")])
def test_a_temporary_that_another_thread_freed_ends_at_the_next_mark(spans):
    lost = Allocation(7, 100, 5, spans)
    allocations.end_temporaries([lost], MARKS, set())
    assert lost.end == 9


def test_what_a_backend_holds_until_it_is_seen_freed_is_held_until_then():
    events = [(5, 7, 100, ("c10d::_reduce_scatter_base_", "aten::clone")), (15, 7, -100, ())]
    [held] = allocations.follow(events)
    allocations.end_temporaries([held], MARKS, set())
    assert held.end == 15


class Loss(torch.nn.Module):
    """The sum of a model's output, as what the plain loop asks for."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return SimpleNamespace(loss=self.model(x).sum())


def test_the_shapes_that_ddp_compares_are_not_held_after_building_whoever_frees_them():
    def work():
        seen = []

        def follow_unseen(changes):
            seen.extend(changes)
            return allocations.follow([one for one in changes
                                       if one[2] > 0 or COMPARES_SHAPES not in one[3]])

        def build():
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
            module = DistributedDataParallel(Loss(model))
            return module, torch.optim.SGD(module.parameters(), lr=1e-3)

        with mock.patch.object(memory, "follow", follow_unseen):
            report = memory.record(build, [{"x": torch.ones(1, 8)}] * 2)
        return report, [nbytes for _, _, nbytes, spans in seen if COMPARES_SHAPES in spans]

    for report, compared in launch(work, ranks=2, quiet=True, verify=False, device="cpu"):
        # for each parameter its sizes and its strides, 8 bytes each
        assert 8 * (2 + 2 + 1 + 1 + 2 + 2) in compared
        assert report.phases["build"].total - 2 * 4 * (64 + 8 + 64) < 80  # and DDP's bucket
