"""The single-tensor collectives under the names of torch 2.13, also on a version without them."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labs.workers import collectives
from labs.workers.launcher import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")


def gather_and_scatter(old_names):
    if old_names:  # what the module finds on torch < 2.13
        collectives._ALL_GATHER = "all_gather_into_tensor"
        collectives._REDUCE_SCATTER = "reduce_scatter_tensor"
    own = torch.full((2,), float(dist.get_rank()))
    gathered, summed = torch.empty(4), torch.empty(2)
    handle = collectives.all_gather_single(gathered, own, async_op=True)
    handle.wait()
    assert collectives.reduce_scatter_single(summed, gathered) is None
    return gathered.tolist(), summed.tolist()


@pytest.mark.parametrize("old_names", [False, True])
def test_both_names_gather_and_scatter(old_names):
    for rank, found in enumerate(launch(gather_and_scatter, old_names, ranks=2, quiet=True,
                                        device="cpu")):
        assert found == ([0.0, 0.0, 1.0, 1.0], [2.0 * rank] * 2)
