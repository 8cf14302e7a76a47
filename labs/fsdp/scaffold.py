"""What a student calls in notebook 04 besides torch: the mesh, a model's linear layers, and the
ZeRO-3 of notebook 03."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from labs.exercises import on_ranks, previous_work
from labs.exercises.verdicts import Wrong, shows
from labs.training import models, strategies
from labs.workers import devices


def mesh() -> DeviceMesh:
    """On a rank: a one-dimensional mesh of all ranks, on this rank's type of device."""
    return init_device_mesh(devices.device().type, (dist.get_world_size(),))


def linears(model: nn.Module) -> list[nn.Module]:
    """Returns every linear layer whose weight no other module shares; GPT-2's are called Conv1D.

    A shared weight is left out because two units cannot both shard one parameter.
    """
    owners = [id(p) for module in model.modules() for p in module._parameters.values()
              if p is not None]
    return [module for module in model.modules()
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
            if owners.count(id(module.weight)) == 1]


def shard_units(select: Callable[[nn.Module], list[nn.Module]], model: nn.Module,
                optimizer_class: type[torch.optim.Optimizer], **settings) -> tuple:
    """A strategy: each module of `select(model)` is a unit, the rest of the model is the root's."""
    from torch.distributed.fsdp import fully_shard

    for module in select(model):
        fully_shard(module, mesh=mesh())
    fully_shard(model, mesh=mesh())
    return model, optimizer_class(model.parameters(), **settings)


def unit_sizes(select: Callable[[nn.Module], list[nn.Module]], model: nn.Module) -> list[int]:
    """Returns the parameters of each unit of `shard_units`, the root's first."""
    units = [sum(p.numel() for p in module.parameters()) for module in select(model)]
    return [sum(p.numel() for p in model.parameters()) - sum(units), *units]


@shows("3.4")
def your_zero3() -> previous_work.PreviousStrategy:
    """Returns the strategy `zero3` of the student's notebook 03 if it passes that exercise's check
    on 2 ranks; otherwise the worked solution's, with the reason."""
    return previous_work.previous_strategy("03_zero_stages", "zero3", "3.4", _checked)


def _checked(zero3) -> str:
    from labs.zero_stages.checks.stages import verify_stage

    return f"equals the reference on 2 ranks (to {verify_stage(zero3, 3, world_sizes=(2,)):.0e})"


def shard_mixed(model: nn.Module, optimizer_class: type[torch.optim.Optimizer],
                param_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None,
                **settings) -> tuple:
    """A strategy: FSDP2 with each block a unit, under a MixedPrecisionPolicy of these types."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    # reshard=None is FSDP2's own default: the root stays gathered from forward to backward.
    return strategies.fsdp2(model, optimizer_class, reshard=None, mp_policy=policy, **settings)


def with_root_resharded(strategy: Callable, model: nn.Module,
                        optimizer_class: type[torch.optim.Optimizer], **settings) -> tuple:
    """A strategy: as the given one, and its root is freed after forward and gathered again for
    backward, which is ZeRO-3 by hand, to the byte. Raises Wrong where the root is no unit."""
    module, optimizer = strategy(model, optimizer_class, **settings)
    if not hasattr(module, "set_reshard_after_forward"):
        raise Wrong("the module is not an FSDP unit", "fully_shard(model) comes last.")
    module.set_reshard_after_forward(True, recurse=False)
    return module, optimizer


def state_dict_bytes(strategy: Callable) -> dict[str, int]:
    """On a rank: returns the bytes that a "sharded" and a "full" state dict of a small GPT-2 hold
    here."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = models.gpt2(3, 33, 3, 22).to(devices.device())  # the sizes of the checks' model
    module, _ = on_ranks.built(strategy, model, torch.optim.AdamW, {})
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {"sharded": _bytes(get_model_state_dict(module)),
            "full": _bytes(get_model_state_dict(module, options=full))}


def _bytes(state) -> int:
    """Returns the bytes of the tensors' own storage; a tied tensor counts once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in state.values()]
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in local}.values())
