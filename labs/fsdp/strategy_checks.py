"""What the checks of notebook 04 share: the model, what is asked of (module, optimizer), the
comparison with the reference, and what one step of a strategy holds and sends."""

import contextlib
import gc
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from labs.checks import on_ranks
from labs.checks.explanations import TrainingMistake
from labs.checks.mistakes import NOT_UPDATED
from labs.checks.on_ranks import raise_on_all_ranks
from labs.checks.reference import Reference, Step
from labs.checks.tolerances import TRAINED
from labs.checks.training import Hints, train_and_compare
from labs.checks.verdicts import Wrong
from labs.fsdp.unit_errors import explained, require_units_in_model
from labs.meters import memory
from labs.meters.traffic import CollectiveCall, Mark, Traffic
from labs.predictions.memory.shards import owned, padded
from labs.training import data, models, strategies
from labs.training.loop import ModuleAndOptimizer, train
from labs.training.models import trainable
from labs.words import counted, to_within, with_article
from labs.workers import devices

LAYERS, HIDDEN, HEADS, CONTEXT = 3, 33, 3, 22  # neither 2 nor 4 ranks divide the width
# AdamW's update hardly depends on a gradient's scale, so a sum would pass for a mean, and it turns
# a gradient that is rounding error into a full update. A large eps prevents both.
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}
STEPS = 3
BYTES = 4  # of an fp32 number
TIMEOUT = 120  # seconds: memory is recorded up to three times, on a machine that may be busy


class AdamW(torch.optim.AdamW):
    """The optimizer class that a check gives: a strategy that makes torch's own is found."""


def make_model(seed: int = 0) -> nn.Module:
    """Returns the model that every check trains, with the same numbers on every rank, on its
    device."""
    return models.move_to_rank(models.gpt2(LAYERS, HIDDEN, HEADS, CONTEXT, seed))


def steps(count: int = STEPS) -> list[Step]:
    """Returns the first steps of a training, each with two sequences for every rank."""
    return [Step(batch) for batch in batches(count, 2 * dist.get_world_size(), CONTEXT)]


def batches(count: int, size: int, context: int, seed: int = 0) -> list[data.Batch]:
    """On a rank: data.lm_batches, on its device."""
    return [{name: value.to(devices.device()) for name, value in batch.items()}
            for batch in data.lm_batches(count, size, context, seed)]


def build(strategy: Callable, model, **settings) -> ModuleAndOptimizer:
    """Returns the strategy's (module, optimizer). Raises Wrong where it returned something else.
    model: what the strategy takes, which in exercise 4.6 is a function."""
    with explained(model) as given:
        return on_ranks.module_and_optimizer(strategy, given, AdamW, settings or SETTINGS)


def judge_built(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """On all ranks, after the strategy: raises Wrong where the ranks have other units, or where the
    optimizer or the module is not what the caller asked for."""
    judge_same_units(module)
    raise_on_all_ranks(_judge_module, module)
    raise_on_all_ranks(judge_optimizer, module, optimizer, SETTINGS)


def judge_same_units(module: nn.Module) -> None:
    """On all ranks, after the strategy: raises Wrong where the ranks have other units."""
    units = [None] * dist.get_world_size()
    dist.all_gather_object(units, [name for name, one in module.named_modules()
                                   if isinstance(one, FSDPModule)])
    raise_on_all_ranks(_judge_same_units, units)


def _judge_same_units(units):
    # Ranks with other units call other collectives: they wait for one another, or gloo aborts.
    for rank, names in enumerate(units):
        if other := sorted(set(names) ^ set(units[0])):
            has, lacks = (0, rank) if other[0] in units[0] else (rank, 0)
            name = repr(other[0]) if other[0] else "the model"
            raise Wrong(f"{name} is a unit on rank {has} and none on rank {lacks}: their "
                        "collectives cannot match", "Every rank shards the same modules.",
                        code="other_units_by_rank")


def _judge_module(module):
    # What was sharded outside the model is a shard in it, which its forward cannot compute with.
    require_units_in_model(module)
    want = dict(make_model().named_parameters())
    for name, parameter in named_parameters(module).items():
        # A weight that two modules share is one parameter: sharded in one unit, without the root,
        # it becomes a shard there and stays unsharded in the other module.
        if name not in want:
            raise Wrong(f"rank {dist.get_rank()}: {name!r} is a parameter of its own now; in the "
                        "model it is the weight of the embedding", "Both belong to the root's unit:"
                        " fully_shard(model), not a part of it.", code="tie_lost")
        if not parameter.requires_grad:
            raise Wrong(f"rank {dist.get_rank()}: {name!r} does not train any more: its "
                        "requires_grad is False", "The strategy trains the model as it is.",
                        code="frozen_parameter")


def judge_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer,
                    settings: dict[str, float], kind: type = AdamW) -> None:
    """Raises Wrong where the optimizer is not one of the class, `kind`, and settings given that
    updates all parameters of the module."""
    rank = f"rank {dist.get_rank()}"
    # The class and the settings are the caller's: lost ones train, only otherwise.
    if not isinstance(optimizer, kind):
        raise Wrong(f"{rank}: the optimizer is {with_article(type(optimizer).__name__)} that was "
                    "not made from the class given", "optimizer_class(parameters, **settings)",
                    code="optimizer_class_ignored")
    for group in optimizer.param_groups:
        for name, value in settings.items():
            if group[name] != value:
                raise Wrong(f"{rank}: the optimizer has {name}={group[name]:g}; {value:g} was "
                            "given", "optimizer_class(parameters, **settings)",
                            code="settings_ignored")
    # fully_shard gives the module new parameters: an optimizer made before holds the old ones.
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in trainable(module) if id(p) not in updated]
    if missing:
        raise Wrong(f"{rank}: {counted(len(missing), 'parameter')} of the module, from "
                    f"{missing[0]!r} on, {'is' if len(missing) == 1 else 'are'} not in the "
                    "optimizer, so a step does not change what the module has now",
                    "fully_shard replaces the parameters: make the optimizer afterwards, from all "
                    "of model.parameters().", code="optimizer_of_old_parameters")


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
    """Returns a copy of each full parameter, on every rank; a DTensor is gathered."""
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in named_parameters(module).items()}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Returns the reference's optimizer."""
    return torch.optim.AdamW(model.parameters(), **SETTINGS)


_MISTAKES = (
    NOT_UPDATED.with_hint("fully_shard replaces the parameters: make the optimizer afterwards, "
                          "from model.parameters()."),
    TrainingMistake(
        "root_gradient_not_reduced", "updated with this rank's own gradient: it belongs to no "
        "unit, so it is not sharded",
        "What is in no block is the root's: fully_shard(model) comes last.",
        lambda reference: [reference.otherwise(reference.alone[dist.get_rank()])]))


def compare_with_reference(strategy: Callable) -> float:
    """On a rank: trains by the plain loop; returns the largest difference of a parameter from the
    reference's. Raises Wrong with the mistake that explains the numbers."""
    model = make_model()
    reference = Reference(model, make_optimizer)
    module, optimizer = raise_on_all_ranks(build, strategy, model)
    judge_built(module, optimizer)
    # Noted before training: a unit that stays gathered has plain tensors in these places later.
    sharded = {name for name, p in named_parameters(module).items() if isinstance(p, DTensor)}

    def parameters_of(module):
        raise_on_all_ranks(_judge_shapes, module, reference.model)
        raise_on_all_ranks(judge_resharded, module, sharded)
        return whole_parameters(module)

    return train_and_compare(
        module, optimizer, [reference], steps(), mistakes=_MISTAKES, parameters_of=parameters_of,
        hints=Hints(unexplained="The optimizer is as it was asked for, so its gradients are not: "
                    "compute and reduce in the model's own type, once for each step."),
        tolerance=TRAINED)


def closeness(difference: float) -> str:
    """Returns the words for a verdict: "to 1e-07", or "bit for bit" where nothing differs."""
    return to_within(difference)


def _judge_shapes(module, reference):
    # A DTensor has the full parameter's shape; FSDP1's parameters are pieces of a flat one.
    found = named_parameters(module)
    for name, want in reference.named_parameters():
        if found[name].shape != want.shape:
            raise Wrong(f"parameter {name!r} has shape {tuple(found[name].shape)} in the module, "
                        f"and {tuple(want.shape)} in the model",
                        "FSDP1 lays parameters flat; use fully_shard, which does not.",
                        code="wrong_shape")


def judge_resharded(module: nn.Module, sharded: Collection[str]) -> None:
    """After a step: raises Wrong where a parameter of these names is no shard any more."""
    # Backward frees every unit. The optimizer updates the shards, so with a unit that stays
    # gathered the next forward would compute with the old numbers.
    for name, parameter in named_parameters(module).items():
        if name in sharded and not isinstance(parameter, DTensor):
            raise Wrong(f"rank {dist.get_rank()}: {name!r} is still gathered after the step, so "
                        "the next forward computes with numbers from before it",
                        "Leave set_reshard_after_backward and unshard() out.", code="gathered_kept")


@dataclass(frozen=True)
class Units:
    """Sizes of the units when each block is one. block, root: elements that a collective of the
    unit carries, which are the padded shards of all ranks. shard: bytes of one rank's padded shard
    of all parameters, as its allocator may round them up."""

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
        # FSDP2 shards the rows of each parameter, and pads each by itself.
        return sum(padded(tuple(p.shape), ranks) for p in parameters)

    tensors = sum(1 for _ in model.parameters())
    return Units(ranks * shard(blocks[0].parameters()), ranks * shard(rest),
                 BYTES * shard(model.parameters()) + tensors * devices.rounding())


def optimizer_bytes(ranks: int, rank: int) -> int:
    """Returns the bytes of AdamW's two moments of a rank's shard of `make_model()`, and of its step
    counters, one for each parameter."""
    return sum(2 * (BYTES * owned(tuple(p.shape), rank, ranks) + devices.rounding()) + BYTES
               for p in make_model().parameters())


def record_memory(strategy: Callable) -> memory.Report:
    """On a rank: returns the memory of two steps."""
    own = [step.inputs() for step in steps(2)]
    return memory.record(partial(_build_and_collect, strategy), own, strategies.resident_tensors,
                         outside=True)


def _build_and_collect(strategy) -> ModuleAndOptimizer:
    """Unsharded parameters may be in cycles of Python objects, which Python frees at some later
    time."""
    built = build(strategy, make_model())
    gc.collect()
    return built


def record_events(strategy: Callable, overlap: bool = False) -> list[CollectiveCall | Mark]:
    """On a rank: returns the collectives of a third step, without those that carry nothing, and
    between them the marks "block done" (in forward, and again where it is recomputed) and
    "backward begins". overlap: also "gradients", when a block begins to compute its own, and
    "wait all_gather", the first wait for each."""
    traffic, model = Traffic(), make_model()
    for block in models.blocks(model):
        if overlap:
            block.mlp.register_forward_hook(partial(mark_gradients, traffic))
        # Registered before FSDP's hook, which frees the block: so it runs before that.
        block.register_forward_hook(lambda *_: traffic.mark("block done"))
    module, optimizer = build(strategy, model)
    *first, last = [step.inputs() for step in steps()]
    # The optimizer's state is made in the first step: a later one is like all that follow.
    train(module, optimizer, first)
    traffic.events.clear()
    with traffic, traffic.marked_waits() if overlap else contextlib.nullcontext():
        loss = module(**last).loss
        traffic.mark("backward begins")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [event for event in traffic.events if isinstance(event, Mark) or event.elements]


def mark_gradients(traffic: Traffic, module: nn.Module, inputs: tuple,
                   output: torch.Tensor) -> None:
    """A forward hook: marks the moment at which this module begins to compute its gradients."""
    output.register_hook(lambda _: traffic.mark("gradients"))
