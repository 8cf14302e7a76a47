"""Trains a submission next to the reference: AdamW with weight decay and a schedule on the full
batch. The mistakes of this notebook are named here, as data."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from labs.checks import on_ranks
from labs.checks.explanations import TrainingMistake
from labs.checks.mistakes import (
    GRADIENT_OF_ONE_RANK,
    GRADIENTS_NOT_CLEARED,
    MEAN_TWICE,
    NEW_OPTIMIZER_STATE,
    NOT_ACCUMULATED,
    NOT_UPDATED,
    REDUCED_TWICE,
    SUM_NOT_MEAN,
    WEIGHT_DECAY_MISSING,
    ZERO_GRADIENT,
)
from labs.checks.on_ranks import BATCH, raise_on_all_ranks
from labs.checks.reference import Reference, Step
from labs.checks.training import Hints, train_and_compare
from labs.checks.verdicts import Wrong
from labs.training import data
from labs.training.loop import ModuleAndOptimizer
from labs.training.models import EdgeCaseModel, trainable
from labs.zero_stages.scaffold import ShardedModule

# AdamW hides the scale of a gradient; with a large eps a sum differs from a mean.
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}
STEPS = 6
# step -> the number of backward passes from which its gradient accumulates. Two: a factor of 1/2
# or 3/2 is then that of no other mistake on 3 ranks, on which a check begins.
_PARTS = {4: 2}
_EVERY_RANK, _NO_RANK = (lambda rank: True), (lambda rank: False)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The reference's optimizer, with the settings that a submission is given."""
    return torch.optim.AdamW([p for _, p in trainable(model)], **SETTINGS)


def falling_rate(optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that falls with every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def steps_of(stage: int) -> list[Step]:
    """The steps of a check. In some, one rank only or no rank uses the layer `sometimes_unused`;
    under ZeRO-3 all or none, because a layer that is used must be gathered by all ranks."""
    some = _EVERY_RANK if stage == 3 else lambda rank: rank == 0
    # Where rank 0 alone uses the layer, the others' gradient is None and counts as zeros in the
    # mean. Where no rank does, every gradient is None.
    using = (_EVERY_RANK, some, _NO_RANK, _EVERY_RANK, some, _EVERY_RANK)
    return [Step(batch, using[number], _PARTS.get(number, 1))
            for number, batch in enumerate(data.xy_batches(STEPS, BATCH))]


def difference_from_reference(strategy: Callable, stage: int, reader: Callable | None = None,
                              nothing_updated: str = "") -> float:
    """On a rank: trains what `strategy` returns next to the reference, by the plain loop; the
    largest difference of a parameter. Raises Wrong.

    reader(model, optimizer) returns what reads the full parameters of the module; None: they are
    read as `parameters_of` does. nothing_updated: the hint where a step changed nothing.
    """
    model = EdgeCaseModel(seed=0)
    module, optimizer = raise_on_all_ranks(build, strategy, model, SETTINGS)
    # Both ways to treat a parameter that no rank used are right.
    references = [Reference(EdgeCaseModel(seed=0), adamw, unused, falling_rate)
                  for unused in ("zero", "skip")]
    read = reader(model, optimizer) if reader else partial(parameters_of, model=model)
    return train_and_compare(
        module, optimizer, references, steps_of(stage), hints=HINTS, parameters_of=read,
        mistakes=_mistakes(nothing_updated), schedule=falling_rate(optimizer))


def _mistakes(nothing_updated) -> tuple[TrainingMistake, ...]:
    """MISTAKES, the first with the exercise's own hint, if there is one."""
    first, *others = MISTAKES
    return first.with_hint(first.hint, nothing_updated or first.hint_if_all), *others


def build(strategy: Callable, model: nn.Module, settings: dict) -> ModuleAndOptimizer:
    """(module, optimizer) of the strategy. Raises Wrong if it returns something else, or a class of
    a library that does the exercise's work."""
    pair = on_ranks.module_and_optimizer(strategy, model, torch.optim.AdamW, settings)
    for part in pair:
        # Catches a submission that wraps torch's FSDP or DeepSpeed: it would keep every other
        # invariant.
        if type(part).__module__.startswith(("torch.distributed", "torch.nn.parallel",
                                             "deepspeed")):
            raise Wrong(f"{type(part).__module__.split('.')[0]}'s own {type(part).__name__} does "
                        "the work", "Build it from the pieces of the lab; theirs is for comparing.",
                        code="ready_made")
    return pair


def parameters_of(module: nn.Module, model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Name -> full parameter of `model`, gathered if the module can; None if one has no memory."""
    if isinstance(module, ShardedModule):
        return module.full_parameters()
    found = {name: p.detach() for name, p in model.named_parameters()}
    # Under ZeRO-3 a freed storage has 0 bytes: to read a view of it raises, or ends the process.
    readable = all(p.untyped_storage().nbytes() >= p.numel() * p.element_size() > 0
                   for p in found.values())
    return found if readable else None


HINTS = Hints(
    loss="Forward does not run with the parameters that it should: are all of them gathered, and "
         "updated?",
    unexplained="Is every gradient reduced, every shard updated, and every piece put back in its "
                "place?",
    not_finite="Was memory read before it was written?")

# Tried in this order: the first that explains every wrong number names the mistake.
MISTAKES = (
    NOT_UPDATED.with_hint(
        "After the update every rank needs the pieces that the others updated: gather the "
        "parameters, again in every step.",
        hint_if_all="Nothing of it was updated here. Does the inner optimizer hold flat.shard, and "
        "does every shard get its gradient before inner.step(), also the unit reduced last?"),
    NOT_ACCUMULATED, REDUCED_TWICE, GRADIENT_OF_ONE_RANK, SUM_NOT_MEAN, MEAN_TWICE,
    TrainingMistake(
        "schedule_ignored", "updated with a learning rate that does not follow the schedule",
        "The schedule changes optimizer.param_groups: they must be the groups that the update "
        "reads.", lambda reference: [reference.otherwise(lr=SETTINGS["lr"])]),
    WEIGHT_DECAY_MISSING,
    NEW_OPTIMIZER_STATE.with_hint("Make the inner optimizer once, in __init__."),
    GRADIENTS_NOT_CLEARED, ZERO_GRADIENT)
