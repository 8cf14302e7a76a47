"""The tensors that a strategy's module and optimizer hold, by category: each library keeps them in
attributes of its own."""

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from labs.training.strategies.third_party import EngineOptimizer


def resident_tensors(module, optimizer) -> dict[str, list[torch.Tensor]]:
    """The tensors that any strategy's (module, optimizer) hold at this moment, for
    labs.meters.memory; keys "parameters", "gradients", "optimizer_state" and "buffers"."""
    if isinstance(optimizer, EngineOptimizer):
        return _deepspeed(module.optimizer, module, stage3=module.zero_optimization_stage() == 3)
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    shards, gathered = [], []
    for parameter in module.parameters():
        # FSDP2 swaps a unit's DTensors for plain parameters while the unit is gathered
        whole = isinstance(module, FSDPModule) and not isinstance(parameter, DTensor)
        (gathered if whole else shards).append(parameter)
    # The optimizer's parameters: while a unit is gathered, module.parameters() has no shards of it.
    shards += [p for group in inner.param_groups for p in group["params"]]
    found = {"parameters": [*shards, *module.buffers()],
             "gradients": _tensors([p.grad for p in [*shards, *gathered]]),
             "optimizer_state": _tensors(inner.state), "buffers": gathered}
    return _flat(found, optimizer.flats) if hasattr(optimizer, "flats") else found


def _flat(found, flats) -> dict[str, list[torch.Tensor]]:
    """Of a student's ZeRO (labs.zero_stages): parameters are views of a flat tensor, `full`, which
    counts as a buffer where it is gathered for a while only."""
    views = {id(p) for unit in flats for p in unit.parameters}
    found["parameters"] = [p for p in found["parameters"] if id(p) not in views]
    for unit in flats:
        stays = _address(unit.full) == _address(unit.shard)
        found["parameters" if stays else "buffers"].append(unit.full)
        found["parameters"].append(unit.shard)
        found["gradients"] += _tensors(unit.shard.grad)
    return found


def _address(tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _deepspeed(zero, module, stage3: bool) -> dict[str, list[torch.Tensor]]:
    """zero: DeepSpeed's own optimizer. A rank updates an fp32 copy of its part of the parameters,
    whatever their type.

    Stages 1 and 2: parameters are views of one flat tensor per group. Stage 3: of a parameter only
    its part stays, `ds_tensor`, a view of one flat tensor.
    """
    parameters = list(module.parameters())
    if stage3:
        master = zero.fp32_partitioned_groups_flat
        stored, reduced = [p.ds_tensor for p in parameters], zero.grad_partitions_flat_buffer
    else:
        master = zero.single_partition_of_fp32_groups
        stored, reduced = [*parameters, *zero.bit16_groups_flat], None
    return {"parameters": [*stored, *module.buffers()],
            "gradients": _tensors([[p.grad for p in [*parameters, *master]],
                                   zero.averaged_gradients, reduced]),
            "optimizer_state": [*master, *_tensors(zero.optimizer.state)],
            "buffers": _tensors([bucket.buffer for bucket in zero.ipg_buckets.values()])}
