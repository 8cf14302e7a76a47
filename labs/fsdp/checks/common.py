"""What the checks of notebook 04 share: the model, its comparison with the reference, and what one
step of a strategy holds and sends."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from labs.exercises import on_ranks
from labs.exercises.invariants import record_step
from labs.exercises.on_ranks import TOLERANCE, raise_on_all_ranks
from labs.exercises.reference import Hints, Mistake, Reference, Step, train_beside_reference
from labs.exercises.verdicts import Wrong
from labs.meters import memory
from labs.meters.traffic import CollectiveCall
from labs.predictions.memory_shards import owned, padded
from labs.training import data, models, strategies
from labs.training.loop import ModuleAndOptimizer

LAYERS, HIDDEN, HEADS, CONTEXT = 3, 33, 3, 22  # neither 2 nor 4 ranks divide the width
# AdamW's update hardly depends on a gradient's scale, so a sum would pass for a mean, and it turns
# a gradient that is rounding error into a full update. A large eps prevents both.
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}
STEPS = 3
BYTES = 4  # of an fp32 number


def make_model(seed: int = 0) -> nn.Module:
    """Returns the model that every check trains, with the same numbers on every rank."""
    return models.gpt2(LAYERS, HIDDEN, HEADS, CONTEXT, seed)


def steps(count: int = STEPS) -> list[Step]:
    """Returns the first steps of a training, each with two sequences for every rank."""
    return [Step(batch) for batch in data.lm_batches(count, 2 * dist.get_world_size(), CONTEXT)]


def build(strategy: Callable, model, optimizer_class=torch.optim.AdamW,
          **settings) -> ModuleAndOptimizer:
    """Returns the strategy's (module, optimizer). Raises Wrong where it returned something else.
    model: what the strategy takes, which in exercise 4.6 is a function."""
    return on_ranks.module_and_optimizer(strategy, model, optimizer_class, settings or SETTINGS)


def named_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters by the names that they have in the model itself: what DDP, FSDP1 and
    checkpoint wrappers add to a name is removed."""
    added = ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")
    found = {}
    for name, parameter in module.named_parameters():
        for part in added:
            name = name.replace(part, "")
        found[name] = parameter
    return found


def whole_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns a copy of each whole parameter, on every rank; a DTensor is gathered."""
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in named_parameters(module).items()}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the reference's optimizer."""
    return torch.optim.AdamW(model.parameters(), **SETTINGS)


_MISTAKES = (
    Mistake("not changed by the step", "fully_shard replaces the parameters: make the optimizer "
            "afterwards, from model.parameters().", lambda reference: [reference.unchanged()]),
    Mistake("updated with this rank's own gradient: it belongs to no unit, so it is whole on every "
            "rank", "What is in no block is the root's: fully_shard(model) comes last.",
            lambda reference: [reference.otherwise(reference.alone[dist.get_rank()])]))


def compare_with_reference(strategy: Callable) -> float:
    """On a rank: trains by the plain loop; returns the largest difference of a parameter from the
    reference's. Raises Wrong with the mistake that explains the numbers."""
    model = make_model()
    reference = Reference(model, make_optimizer)
    module, optimizer = raise_on_all_ranks(build, strategy, model)

    def parameters_of(module):
        raise_on_all_ranks(_check_shapes, module, reference.model)
        return whole_parameters(module)

    return train_beside_reference(
        module, optimizer, [reference], steps(), mistakes=_MISTAKES, parameters_of=parameters_of,
        hints=Hints(unexplained="Do all settings (**settings) reach the optimizer?"),
        tolerance=20 * TOLERANCE)


def closeness(difference: float) -> str:
    """Returns the words for a verdict: "to 1e-07", or "to the last digit" where nothing differs."""
    return f"to {difference:.0e}" if difference else "to the last digit"


def _check_shapes(module, reference):
    # A DTensor has the whole parameter's shape; FSDP1's parameters are pieces of a flat one.
    found = named_parameters(module)
    for name, want in reference.named_parameters():
        if found[name].shape != want.shape:
            raise Wrong(f"parameter {name!r} has shape {tuple(found[name].shape)} in the module, "
                        f"and {tuple(want.shape)} in the model",
                        "FSDP1 lays parameters flat; use fully_shard, which does not.")


@dataclass(frozen=True)
class Units:
    """Sizes of the units when each block is one. block, root: elements that a collective of the
    unit carries, which are the padded shards of all ranks. shard: bytes of one rank's padded shard
    of all parameters."""

    block: int
    root: int
    shard: int


def one_unit_per_block(ranks: int) -> Units:
    """Returns what FSDP2 makes of `make_model()` with each block a unit and the rest the root's."""
    model = make_model()
    blocks = models.blocks(model)
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    rest = [p for p in model.parameters() if id(p) not in in_blocks]

    def shard(parameters):
        return sum(padded(tuple(p.shape), ranks) for p in parameters)

    return Units(ranks * shard(blocks[0].parameters()), ranks * shard(rest),
                 BYTES * shard(model.parameters()))


def optimizer_bytes(ranks: int, rank: int) -> int:
    """Returns the bytes of AdamW's two moments of a rank's shard of `make_model()`, and of its step
    counters, one for each parameter."""
    return sum(2 * BYTES * owned(tuple(p.shape), rank, ranks) + BYTES
               for p in make_model().parameters())


def record_memory(strategy: Callable) -> memory.Report:
    """On a rank: returns the memory of two steps."""
    own = [step.inputs() for step in steps(2)]
    return memory.record(lambda: build(strategy, make_model()), own, strategies.resident_tensors,
                         outside=True)


def record_collectives(strategy: Callable) -> list[CollectiveCall]:
    """On a rank: returns the collectives of a third step; of those that carry nothing none."""
    traffic = record_step(partial(build, strategy), make_model(), [s.inputs() for s in steps()])
    return [call for call in traffic.calls if call.elements]
