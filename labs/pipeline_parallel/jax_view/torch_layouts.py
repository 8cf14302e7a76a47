"""The same block and the same three layouts in torch: the collectives that its own classes call."""

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from labs.meters.traffic import CollectiveCall, Traffic
from labs.pipeline_parallel.jax_view.layouts import SHAPES, block_arrays
from labs.workers.launcher import launch


@functools.cache
def torch_collectives(ranks: int = 4) -> dict[str, list[CollectiveCall]]:
    """Layout -> what rank 0 calls in forward and backward of the block. On the CPU, as JAX's
    programs beside it."""
    return launch(_count_all, ranks=ranks, quiet=True, device="cpu")[0]


def _count_all():
    return {name: _count(strategy, cuts_tokens)
            for name, (strategy, cuts_tokens) in _STRATEGIES.items()}


def _count(strategy, cuts_tokens) -> list[CollectiveCall]:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    values = {name: torch.tensor(array) for name, array in block_arrays().items()}
    up, down = (nn.Linear(*SHAPES[name], bias=False) for name in ("up", "down"))
    up.weight.data, down.weight.data = values["up"].T.contiguous(), values["down"].T.contiguous()
    module = strategy(nn.Sequential(up, nn.ReLU(), down))
    # Its gradient is needed: in a model x comes from the layer below.
    x = (values["x"].chunk(ranks)[rank] if cuts_tokens else values["x"]).requires_grad_()
    with Traffic() as traffic:
        module(x).square().mean().backward()
    return traffic.calls


def _mesh():
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def _fsdp(block):
    # The outermost unit would else stay gathered until backward.
    return fully_shard(block, mesh=_mesh(), reshard_after_forward=True)


def _tensor_parallel(block):
    return parallelize_module(block, _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


# Layout -> the strategy, and whether each rank has tokens of its own.
_STRATEGIES = {"DDP": (DistributedDataParallel, True), "FSDP": (_fsdp, True),
               "TP": (_tensor_parallel, False)}
