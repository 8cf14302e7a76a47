"""Which tensors a strategy's module and optimizer hold, by category: each library keeps them in
places of its own."""

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from labs.training.strategies.third_party import Engine


def resident_tensors(module, optimizer) -> dict:
    """category ("parameters", "gradients", "optimizer_state", "buffers") -> tensors, now, of any
    strategy's module and optimizer; for labs.meters.memory."""
    if isinstance(module, Engine):
        zero3 = module.engine.zero_optimization_stage() == 3
        return (_deepspeed3 if zero3 else _deepspeed)(module)
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    shards, gathered = [], []
    for parameter in module.parameters():
        whole = isinstance(module, FSDPModule) and not isinstance(parameter, DTensor)
        (gathered if whole else shards).append(parameter)
    shards += [p for group in inner.param_groups for p in group["params"]]
    found = {"parameters": [*shards, *module.buffers()],
             "gradients": [p.grad for p in [*shards, *gathered] if p.grad is not None],
             "optimizer_state": tensors(inner.state), "buffers": gathered}
    return _flat(found, optimizer.flats) if hasattr(optimizer, "flats") else found


def _flat(found, flats) -> dict:
    """Of a student's ZeRO (labs.zero_stages): parameters are views of a flat tensor, `whole`, which
    is a buffer where it is gathered and does not stay."""
    views = {id(p) for unit in flats for p in unit.parameters}
    found["parameters"] = [p for p in found["parameters"] if id(p) not in views]
    for unit in flats:
        stays = _address(unit.whole) == _address(unit.shard)
        found["parameters" if stays else "buffers"].append(unit.whole)
        found["parameters"].append(unit.shard)
        found["gradients"] += [] if unit.shard.grad is None else [unit.shard.grad]
    return found


def _address(tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def tensors(value) -> list:
    """All tensors in a value: a tensor, or lists and dictionaries of values."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [t for part in value for t in tensors(part)] if _is_many(value) else []


def _is_many(value) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, str)


def _deepspeed(module) -> dict:
    """Stages 1 and 2: parameters are views of one flat tensor per group; a rank updates a copy of
    its part of it, in fp32, whatever the parameters' type."""
    zero, parameters = module.engine.optimizer, list(module.parameters())
    master = zero.single_partition_of_fp32_groups
    buckets = [bucket.buffer for bucket in zero.ipg_buckets.values()]
    return {"parameters": [*parameters, *zero.bit16_groups_flat, *module.buffers()],
            "gradients": tensors([[p.grad for p in [*parameters, *master]],
                                  zero.averaged_gradients]),
            "optimizer_state": [*master, *tensors(zero.optimizer.state)],
            "buffers": tensors(buckets)}


def _deepspeed3(module) -> dict:
    """Stage 3: what stays of a parameter is its part, `ds_tensor`, a view of one flat tensor."""
    zero, parameters = module.engine.optimizer, list(module.parameters())
    master = zero.fp32_partitioned_groups_flat
    buckets = [bucket.buffer for bucket in zero.ipg_buckets.values()]
    return {"parameters": [*(p.ds_tensor for p in parameters), *module.buffers()],
            "gradients": tensors([[p.grad for p in [*parameters, *master]],
                                  zero.averaged_gradients, zero.grad_partitions_flat_buffer]),
            "optimizer_state": [*master, *tensors(zero.optimizer.state)],
            "buffers": tensors(buckets)}
