"""Torch's own strategies: DDP, ZeroRedundancyOptimizer, FSDP1 and FSDP2."""

import functools
import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from labs.training.loop import ModuleAndOptimizer
from labs.training.models import blocks
from labs.workers import devices


def plain(model, optimizer_class, **kwargs) -> ModuleAndOptimizer:
    """Returns the model unchanged: each rank trains alone, on its own batches."""
    return model, optimizer_class(model.parameters(), **kwargs)


def ddp(model, optimizer_class, cap_bytes: int | None = None, bucket_view: bool = False,
        **kwargs) -> ModuleAndOptimizer:
    """torch's DistributedDataParallel; cap_bytes, bucket_view: as in `torch_ddp`."""
    module = torch_ddp(model, cap_bytes, bucket_view)
    return module, optimizer_class(module.parameters(), **kwargs)


def zero_redundancy(model, optimizer_class, cap_bytes: int | None = None,
                    bucket_view: bool = False, **kwargs) -> ModuleAndOptimizer:
    """DDP with torch's ZeroRedundancyOptimizer: ZeRO-1 in which each rank updates entire parameters
    and broadcasts them. cap_bytes, bucket_view: as in `torch_ddp`."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = torch_ddp(model, cap_bytes, bucket_view)
    return module, ZeroRedundancyOptimizer(module.parameters(), optimizer_class, **kwargs)


def torch_ddp(model, cap_bytes: int | None = None,
              bucket_view: bool = False) -> DistributedDataParallel:
    """torch's own DistributedDataParallel around a model.

    cap_bytes: the most bytes of a gradient bucket; None means torch's default, 25 MiB after a first
    bucket of 1 MiB. bucket_view: gradients are views of the buckets, which saves a copy of all
    gradients.
    """
    cap = {} if cap_bytes is None else {"bucket_cap_mb": cap_bytes / 2**20}
    return DistributedDataParallel(model, gradient_as_bucket_view=bucket_view, **cap)


def fsdp2(model, optimizer_class, reshard: bool = True, mp_policy=None,
          **kwargs) -> ModuleAndOptimizer:
    """FSDP2, `fully_shard`: each block is a unit, the rest of the model is the root's.

    reshard: whether a block's gathered parameters are freed after its forward and gathered again in
    backward (ZeRO-3), or stay until its backward. mp_policy: a MixedPrecisionPolicy.
    """
    from torch.distributed.fsdp import fully_shard

    options = {"mesh": init_device_mesh(devices.device().type, (dist.get_world_size(),))}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    # Blocks first, then the root: fully_shard leaves to the root what is in no unit yet.
    for block in blocks(model):
        fully_shard(block, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=reshard, **options)
    return model, optimizer_class(model.parameters(), **kwargs)


fsdp2_no_reshard = functools.partial(fsdp2, reshard=False)


def fsdp1(model, optimizer_class, options: dict | None = None, **kwargs) -> ModuleAndOptimizer:
    """FSDP1, the deprecated FullyShardedDataParallel; units and resharding as in `fsdp2`.

    options: of FullyShardedDataParallel, in addition to these or instead of them.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(block) for block in blocks(model)})
    # use_orig_params: the optimizer sees the parameters by themselves, as under FSDP2, and not one
    # flat parameter per unit.
    chosen = {"auto_wrap_policy": policy, "use_orig_params": True,
              "device_id": devices.device()}  # without it FSDP1 on a CPU fails: it wants a GPU
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # FSDP1's deprecation
        module = FullyShardedDataParallel(model, **{**chosen, **(options or {})})
    return module, optimizer_class(module.parameters(), **kwargs)
