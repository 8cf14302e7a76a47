"""Exercise 3.10: ZeRO-3 without the lab's scaffold."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from labs.checks.on_ranks import labs_own_refused
from labs.checks.verdicts import Wrong, check
from labs.training.models import EdgeCaseModel
from labs.workers import devices
from labs.zero_stages.collectives import all_gather
from labs.zero_stages.flat_parameter import FlatParameter, layer_groups
from labs.zero_stages.scaffold import ShardedModule, ShardedOptimizer
from labs.zero_stages.stage_training import STEPS, parameters_of
from labs.zero_stages.stages import DETACH, moves, verify_stage

_NOT_GATHERED = ("A layer computes while its storage is empty: gather it before each forward and "
                 "before each backward, whenever it is not gathered.")
_HINTS = {words: _NOT_GATHERED for words in ("storage of size 0", "SIGSEGV", "SIGABRT", "SIGBUS")}
_HINTS["A view was created in no_grad mode"] = DETACH
_NOT_UPDATED = ("Nothing of it was updated here. Does the mean of its gradients reach "
                "unit.shard.grad before the step, and does the optimizer hold unit.shard?")
_SCAFFOLD = (FlatParameter, ShardedModule, ShardedOptimizer)
_REFUSED = ("Build it from torch's hooks and storages; lab.layer_groups, lab.tensors_in and "
            "lab.reduce_scatter may stay.")


@check("3.10", hints=_HINTS)
def check_from_scratch(strategy: Callable):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): ZeRO-3 of torch's hooks
    and storages and of lab.reduce_scatter, checked by the invariants of exercise 3.4."""
    def without_scaffold(model, optimizer_class, **settings):
        with labs_own_refused(_SCAFFOLD, _REFUSED):
            built = strategy(model, optimizer_class, **settings)
        _watch_shards(built)
        return built

    _, volume = verify_stage(without_scaffold, 3, reader=_reader, nothing_updated=_NOT_UPDATED)
    return (f"built without the scaffold: its losses are the reference's over {STEPS} steps on 2, "
            f"3 and 4 ranks, it keeps 16Ψ/N bytes and one layer, and {moves(volume)}")


def _watch_shards(built):
    """Raises Wrong, now or before a step, where a shard has no memory."""
    if isinstance(built, tuple) and isinstance(built[-1], torch.optim.Optimizer):
        _require_memory(built[-1])
        # Before each step: a shard may be emptied by the first `free`, after it was built.
        built[-1].register_step_pre_hook(lambda optimizer, *_: _require_memory(optimizer))


def _require_memory(optimizer):
    # A shard that is a view of `full` loses its numbers when `full` is freed: the next gather reads
    # whatever is there, and the loss would be wrong for a reason that no number shows.
    for shard in shards_in(optimizer):
        if shard.untyped_storage().nbytes() < shard.numel() * shard.element_size():
            raise Wrong("a shard that the optimizer holds has no memory, because the storage that "
                        "it looks at was freed", "Does the shard have memory of its own? A piece "
                        "of `full` is a view, and is freed with it: clone the piece.",
                        code="shard_without_memory")


def shards_in(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _reader(model, optimizer) -> Callable:
    """On a rank: what reads the full parameters of a module. Shards in the layout of
    `layer_groups` and `cut` are gathered; of units in another layout only the losses are
    compared."""
    fresh, ranks = EdgeCaseModel(seed=0), dist.get_world_size()
    groups = [parameters for _, _, parameters in layer_groups(fresh)]
    # The elements of each group's shard, rounded up as `cut` rounds them.
    sizes = [-(-sum(p.numel() for p in group) // ranks) for group in groups]
    mine = [len(shard) if shard.dim() == 1 else None for shard in shards_in(optimizer)]
    as_cut = torch.tensor(int(mine == sizes), device=devices.device())
    # All ranks take the same branch: `read` gathers, so a rank that leaves it out would block
    # others.
    dist.all_reduce(as_cut, dist.ReduceOp.MIN)
    read = partial(_gathered, fresh, groups, optimizer)
    # Only where they give the parameters of the beginning are the shards' places known.
    found = read(None) if as_cut else {}
    if found and all(p.equal(found[name]) for name, p in fresh.named_parameters()):
        return read
    return partial(parameters_of, model=model)


def _gathered(fresh, groups, optimizer, _module) -> dict[str, torch.Tensor]:
    """Name -> full parameter, gathered from the shards; all ranks must call it."""
    found = {}
    for group, shard in zip(groups, shards_in(optimizer), strict=True):
        # (N · k,) from shards of (k,): the padding at its end is cut off below.
        full = shard.new_empty(len(shard) * dist.get_world_size())
        all_gather(full, shard)
        pieces = full[:sum(p.numel() for p in group)].split([p.numel() for p in group])
        found |= {id(p): piece.view(p.shape) for p, piece in zip(group, pieces, strict=True)}
    return {name: found.get(id(p), p.detach())
            for name, p in fresh.named_parameters(remove_duplicate=False)}
