"""The traffic meter counts every collective once, with its logical bytes."""

import pytest
import torch
import torch.distributed as dist

from labs import launch
from labs.meters.traffic import Traffic

pytestmark = pytest.mark.usefixtures("warm_launcher")


def counted(work, ranks=2):
    """(kind, elements, bytes, asynchronous) of rank 0's calls."""
    def measured():
        with Traffic() as traffic:
            work()
        return [(c.kind, c.elements, c.bytes, c.asynchronous) for c in traffic.calls]

    return launch(measured, ranks=ranks, quiet=True)[0]


def test_kinds_elements_and_bytes():
    def work():
        eight, half = torch.ones(8), torch.ones(4, dtype=torch.float64)
        dist.all_reduce(eight)
        dist.all_reduce(eight, async_op=True).wait()
        dist.broadcast(half, src=0)
        dist.all_gather_into_tensor(torch.empty(16), eight)
        dist.all_gather([torch.empty(8), torch.empty(8)], eight)
        dist.reduce_scatter_tensor(torch.empty(4), eight)
        dist.all_to_all_single(torch.empty(8), eight)

    # an all-gather counts what comes out, a reduce-scatter what goes in
    assert counted(work) == [
        ("all_reduce", 8, 32, False), ("all_reduce", 8, 32, True), ("broadcast", 4, 32, False),
        ("all_gather", 16, 64, False), ("all_gather", 16, 64, False),
        ("reduce_scatter", 8, 32, False), ("all_to_all", 8, 32, False)]


def test_what_torchs_ddp_calls_from_cpp_is_counted_too():
    def work():
        module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 3))
        module(torch.ones(2, 10)).sum().backward()

    # 10 x 3 weights and 3 biases, one bucket, 4 bytes each
    assert ("all_reduce", 33, 132, True) in counted(work)


def test_marks_keep_their_place_between_calls():
    def work():
        with Traffic() as traffic:
            traffic.mark("before")
            dist.all_reduce(torch.ones(1))
            traffic.mark("after")
        return [getattr(event, "what", None) or event.kind for event in traffic.events]

    assert launch(work, ranks=2, quiet=True)[0] == ["before", "all_reduce", "after"]
