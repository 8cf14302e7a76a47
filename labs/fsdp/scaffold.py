"""What a student calls in notebook 04 besides torch: the mesh, the ZeRO-3 of notebook 03,
and the experiment on fp16's underflow."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labs.checks import on_ranks, previous_work
from labs.checks.verdicts import Wrong, shows
from labs.pictures.tables import Table
from labs.training import data, models, strategies
from labs.training.loop import ModuleAndOptimizer
from labs.words import to_within
from labs.workers import devices
from labs.workers.launcher import launch

# Of the experiment on underflow.
CONTEXT = 64
MICRO_BATCH = 256  # tokens of each rank
BATCH = 262_144  # tokens of the whole batch, as is usual for language models
LOSS_SCALE = 2.0**16
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


_replicas = 1  # of the model, among all ranks


def mesh() -> DeviceMesh:
    """On a rank: the mesh of all ranks on this rank's type of device. It has the dimension "shard";
    inside `replicated` it has "replicate" before it."""
    return _mesh(devices.device().type, dist.get_world_size(), _replicas)


@functools.cache  # a mesh of two dimensions makes process groups, which all ranks wait for
def _mesh(kind, ranks, replicas) -> DeviceMesh:
    if replicas == 1:
        return init_device_mesh(kind, (ranks,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (replicas, ranks // replicas),
                            mesh_dim_names=("replicate", "shard"))


@contextlib.contextmanager
def replicated(replicas: int) -> Iterator[None]:
    """On a rank: inside the block `mesh()` divides the ranks into so many groups; each group shards
    a replica of the model."""
    global _replicas
    before, _replicas = _replicas, replicas
    try:
        yield
    finally:
        _replicas = before


def shard_units(select: Callable[[nn.Module], list[nn.Module]], model: nn.Module,
                optimizer_class: type[torch.optim.Optimizer], **settings) -> ModuleAndOptimizer:
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
    from labs.zero_stages.stages import verify_stage

    difference, _ = verify_stage(zero3, 3, world_sizes=(2,))
    return f"equals the reference on 2 ranks ({to_within(difference)})"


def shard_mixed(model: nn.Module, optimizer_class: type[torch.optim.Optimizer],
                param_dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None,
                **settings) -> ModuleAndOptimizer:
    """A strategy: FSDP2 with each block a unit, under a MixedPrecisionPolicy of these types."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    # reshard=None is FSDP2's own default: the root stays gathered from forward to backward.
    return strategies.fsdp2(model, optimizer_class, reshard=None, mp_policy=policy, **settings)


def with_root_resharded(strategy: Callable, model: nn.Module,
                        optimizer_class: type[torch.optim.Optimizer],
                        **settings) -> ModuleAndOptimizer:
    """A strategy: as the given one, and its root is freed after forward and gathered again for
    backward, which is ZeRO-3 by hand, to the byte. Raises Wrong where the root is no unit."""
    module, optimizer = strategy(model, optimizer_class, **settings)
    if not hasattr(module, "set_reshard_after_forward"):
        raise Wrong("the module is not an FSDP unit", "fully_shard(model) comes last.",
                    code="root_not_sharded")
    module.set_reshard_after_forward(True, recurse=False)
    return module, optimizer


def shard_blocks(model: nn.Module, optimizer_class: type[torch.optim.Optimizer],
                 **settings) -> ModuleAndOptimizer:
    """A strategy: FSDP2 with each block a unit, and the rest of the model the root's."""
    return shard_units(models.blocks, model, optimizer_class, **settings)


def on_replicas(strategy: Callable, replicas: int, model: nn.Module,
                optimizer_class: type[torch.optim.Optimizer], **settings) -> ModuleAndOptimizer:
    """A strategy: the given one, which takes `mesh()`, on a mesh of so many replicas."""
    with replicated(replicas):
        return strategy(model, optimizer_class, **settings)


class _Accumulating(nn.Module):
    """Accumulates gradients: a forward runs all micro-batches but the last, forward and backward;
    the loop's own backward is the last one's. Every micro-batch is the same."""

    def __init__(self, module, parts: int, every: bool, freed: bool):
        super().__init__()
        self.module, self.parts, self.every, self.freed = module, parts, every, freed

    def forward(self, **batch):
        for _ in range(self.parts - 1):
            self.module.set_requires_gradient_sync(self.every)
            # False keeps what a unit has gathered until the last micro-batch; True frees it after
            # each. Both calls reach all units below the module: the root, too, which FSDP2 by
            # default keeps gathered from forward to backward. The notebook says so.
            self.module.set_reshard_after_backward(self.freed)
            self.module.set_reshard_after_forward(self.freed)
            (self.module(**batch).loss / self.parts).backward()
        # The last micro-batch reduces what has been accumulated, and frees the units for the step.
        self.module.set_requires_gradient_sync(True)
        self.module.set_reshard_after_backward(True)
        found = self.module(**batch)
        found.loss = found.loss / self.parts
        return found


def accumulating(strategy: Callable, parts: int, every: bool, freed: bool, model: nn.Module,
                 optimizer_class: type[torch.optim.Optimizer],
                 **settings) -> ModuleAndOptimizer:
    """A strategy: the given one, and one step is `parts` micro-batches. every: gradients are
    reduced after each of them, or only after the last; freed: units are freed in between."""
    module, optimizer = strategy(model, optimizer_class, **settings)
    return _Accumulating(module, parts, every, freed), optimizer


def state_dict_bytes(strategy: Callable) -> dict[str, int]:
    """On a rank: returns the bytes that a "sharded" and a "full" state dict of a small GPT-2 hold
    here."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = models.gpt2(3, 33, 3, 22).to(devices.device())  # the sizes of the checks' model
    module, _ = on_ranks.module_and_optimizer(strategy, model, torch.optim.AdamW, {})
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {"sharded": _bytes(get_model_state_dict(module)),
            "full": _bytes(get_model_state_dict(module, options=full))}


def _bytes(state) -> int:
    """Returns the bytes of the tensors' own storage; a tied tensor counts once."""
    local = [models.local_shard(t) for t in state.values()]
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in local}.values())


@shows("Underflow")
def show_underflow() -> Table:
    """Returns a table of the gradients that are zero in fp16 and in bf16 but not in fp32, with the
    loss as it is and multiplied by LOSS_SCALE: one micro-batch of a large batch, FSDP on 2 ranks.
    A scaled loss brings back what was too small for the type, but not what its digits cancel."""
    by_rank = launch(_count_zeros, ranks=2, quiet=True, verify=False, hang_after=60)
    total = sum(nonzero for nonzero, _ in by_rank)
    rows = []
    for name, dtype in TYPES.items():
        zeros, scaled = (sum(counts) for counts in zip(*(found[name] for _, found in by_rank),
                                                       strict=True))
        rows.append((name, f"{_smallest(dtype):.0e}", f"{zeros:,}", f"{zeros / total:.2%}",
                     f"{scaled:,}"))
    return Table(f"gradients that are zero and should not be: {MICRO_BATCH} of a batch's "
                 f"{BATCH:,} tokens", ("computed in", "smallest number", "zeros", "share",
                                       f"zeros, loss × {LOSS_SCALE:,.0f}"), rows,
                 note=f"of {total:,} numbers that are not zero in fp32")


def _smallest(dtype) -> float:
    """Returns the smallest subnormal number, which finfo.tiny is not."""
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps


def _count_zeros() -> tuple[int, dict[str, list[int]]]:
    """On a rank: returns (numbers of its gradients that are not zero in fp32, type -> [how many of
    these are zero, how many with the loss scaled])."""
    torch.set_num_threads(1)
    exact = _gradients(None, 1.0)
    return _count(g != 0 for g in exact), {
        name: [_count((g == 0) & (e != 0) for g, e in
                      zip(_gradients(dtype, scale), exact, strict=True))
               for scale in (1.0, LOSS_SCALE)] for name, dtype in TYPES.items()}


def _count(masks: Iterable[torch.Tensor]) -> int:
    return sum(int(mask.sum()) for mask in masks)


def _gradients(dtype, scale) -> list[torch.Tensor]:
    """This rank's shards of the gradients of a micro-batch, weighted by its share of the batch."""
    module, _ = shard_mixed(models.gpt2(4, 64, 4, CONTEXT).to(devices.device()), torch.optim.SGD,
                            param_dtype=dtype, reduce_dtype=torch.float32, lr=0.1)
    [batch] = data.lm_batches(1, MICRO_BATCH // CONTEXT, CONTEXT, seed=dist.get_rank())
    batch = {name: value.to(devices.device()) for name, value in batch.items()}
    (module(**batch).loss * (MICRO_BATCH / BATCH) * scale).backward()
    return [p.grad.to_local() for p in module.parameters()]
