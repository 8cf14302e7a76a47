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


def gather_by_the_new_names(missing):
    for module in (dist, dist.distributed_c10d) if missing else ():
        del module.all_gather_single, module.reduce_scatter_single  # what torch < 2.13 lacks
        module.all_gather_into_tensor = _older(dist.all_gather_into_tensor)
    collectives.add_new_names()
    gathered = torch.empty(4)
    dist.all_gather_single(gathered, torch.full((2,), float(dist.get_rank())))
    return gathered.tolist()


def _older(function):
    def all_gather_into_tensor(output, own):
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        output.copy_(torch.cat(parts))
    return all_gather_into_tensor


@pytest.mark.parametrize("missing", [False, True])
def test_a_rank_has_the_new_names_on_every_version(missing):
    assert launch(gather_by_the_new_names, missing, ranks=2, quiet=True,
                  device="cpu").output == ["", ""]
