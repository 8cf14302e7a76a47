"""The bytes that really leave a rank are those of gloo's algorithms."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labs.meters.wire import sent_bytes
from labs.workers.launcher import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")


def sent_in_an_all_reduce():
    dist.barrier()
    before = sent_bytes()
    dist.all_reduce(torch.ones(3_000_000))
    dist.barrier()
    return sent_bytes() - before


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_all_reduce_sends_what_its_formula_says(ranks):
    for sent in launch(sent_in_an_all_reduce, ranks=ranks, quiet=True, device="cpu"):
        assert sent == pytest.approx(12_000_000 * 2 * (ranks - 1) / ranks, rel=0.01)


def test_a_process_without_connections_has_sent_nothing():
    assert sent_bytes() is None or sent_bytes() >= 0
