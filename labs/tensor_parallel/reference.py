"""Trains a tensor-parallel module next to the reference. All ranks of the group get the same whole
batch, so the loss and every gradient are the reference's own, not a mean over ranks.

How a check uses it, on a rank (`group` is what the student's function was given):

    model = models.llama(seed=0)                      # any model whose forward returns .loss
    reference = Reference(copy.deepcopy(model), make_optimizer)
    module, optimizer = raise_on_all_ranks(build, strategy, model, AdamW, settings)
    difference = train_on_whole_batch(module, optimizer, reference, whole_steps(5), group)

`train_on_whole_batch` reads parameters with a `ShardReader` (shards.py), which finds out by shapes
which parameters are sharded and along which dimension, unequal sizes and padding at the end of the
last shard included; so vocabulary-parallel embeddings and DTensors need nothing more. A replicated
parameter is not averaged over ranks: each rank's own copy is held to the reference. Where a loss or
a parameter differs and no `Mistake` explains it, explanations.py looks for the first layer whose
output, or the first parameter whose gradient, differs, and says how. Part B and C add their own:
`mistakes=(*MISTAKES, Mistake(...))`, `causes=(Cause(...),)`.

Gradients are never judged, only explained: under sequence parallelism a right answer may reduce the
norms' gradients as late as in the optimizer's step.

Bytes and collectives are those of invariants.py: `ResidentBytes.of(model, sharded_names, ranks)`
with `judge_resident_bytes`, and `judge_collectives(traffic, allowed={"all_reduce": 4}, ...)`. A
vocabulary-parallel answer adds the embedding's and head's names to the sharded ones; a
sequence-parallel one allows {"all_gather": 4, "reduce_scatter": 4} (in elements of the whole
sequence, b·s·h) and a larger `small`, for its norms' gradients.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from labs.checks import on_ranks
from labs.checks.on_ranks import TOLERANCE
from labs.checks.reference import (
    UNEXPLAINED,
    Hints,
    Mistake,
    Reference,
    Step,
    Tensors,
    train_beside_reference,
)
from labs.checks.verdicts import Wrong
from labs.tensor_parallel.explanations import (
    GRADIENT_CAUSES,
    OUTPUT_CAUSES,
    Cause,
    explain_gradients,
    explain_outputs,
)
from labs.tensor_parallel.shards import ShardReader
from labs.training import data
from labs.training.loop import ModuleAndOptimizer
from labs.workers import devices

STEPS = 5
# AdamW hides the scale of a gradient; with a large eps a sum differs from a mean. SGD shows it.
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3})
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})

HINTS = Hints(
    loss="Forward must compute what the whole model computes, on every rank.",
    unexplained="Is every gradient that a rank has only a part of summed over the ranks, once?")

MISTAKES = (
    Mistake("not_updated", "not changed by the step",
            "Replace the layers first; then make the optimizer, from the parameters that the "
            "module has now.", lambda reference: [reference.unchanged()]),
    Mistake("settings_ignored", "updated without the optimizer's settings",
            "Pass **settings on to the optimizer.", lambda reference: _by_default(reference)),
    Mistake("new_optimizer_state",
            "updated as if by a new optimizer: the state of the earlier steps is lost",
            "Make the optimizer once.",
            lambda reference: [reference.otherwise(new_optimizer=True)]))


def _by_default(reference: Reference) -> list[Tensors]:
    """What a step leaves with an optimizer that got no settings, or none but the learning rate."""
    default = type(reference.optimizer)([nn.Parameter(torch.zeros(1))]).defaults
    alone = {name: value for name, value in default.items() if name != "lr"}
    return [reference.otherwise(**default), reference.otherwise(**alone)]


def make_optimizer(kind: type, settings: dict) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Returns what makes the reference's optimizer of a model."""
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **settings)


def token_batches(steps: int, size: int = 3, context: int = 10, seed: int = 0) -> list[data.Batch]:
    """Batches of a language model on the rank's device, the same on every rank."""
    return [{name: tensor.to(devices.device()) for name, tensor in batch.items()}
            for batch in data.lm_batches(steps, size, context, seed)]


def whole_steps(steps: int = STEPS, size: int = 3, context: int = 10, seed: int = 0) -> list[Step]:
    """Steps in which every rank trains on the whole batch."""
    return [Step(batch, whole=True) for batch in token_batches(steps, size, context, seed)]


def build(strategy: Callable, model: nn.Module, optimizer_class: type,
          settings: dict) -> ModuleAndOptimizer:
    """(module, optimizer) of the strategy. Raises Wrong if it returns something else."""
    return on_ranks.module_and_optimizer(strategy, model, optimizer_class, settings)


def train_on_whole_batch(module: nn.Module, optimizer, reference: Reference, steps: Sequence[Step],
                         group: dist.ProcessGroup | None = None, *,
                         mistakes: Sequence[Mistake] = MISTAKES, hints: Hints = HINTS,
                         causes: Sequence[Cause] = (),
                         tolerance: float = TOLERANCE) -> float:
    """On a rank: trains by the plain loop, held to the reference after each step; returns the
    largest difference of a parameter.

    Raises Wrong on all ranks, with what broke on the lowest: shards that are not the model's from
    the beginning, then a loss, then a parameter. causes: what else may explain a wrong
    output or gradient, see explanations.py.
    """
    reader = ShardReader(module, reference.model, group)
    reader.require_start(module, reference.model)
    # Gradients have to be copied before optimizer.step and zero_grad: whether a check needs them is
    # known only after the step.
    kept = {}

    def keep_gradients(_, number):
        kept["gradients"] = {name: torch.zeros_like(p) if p.grad is None else p.grad.detach()
                             .clone() for name, p in reader.local(module).items()}
        kept["steps"] = number + 1
        return 0.0

    try:
        return train_beside_reference(
            module, optimizer, [reference], steps, mistakes=mistakes, hints=hints,
            parameters_of=reader, judge_gradients=keep_gradients, tolerance=tolerance)
    except Wrong as wrong:  # raised on all ranks alike, so that they can go on communicating
        done = len(reference.history)
        # The reference has begun step `done`, and no gradients were kept in it: the loss was wrong,
        # so the mistake is in forward.
        if kept.get("steps") != done:
            found = explain_outputs(module, reference, steps[done - 1], reader,
                                    (*causes, *OUTPUT_CAUSES))
        # The loss was right and a parameter is not: the mistake is in backward.
        elif wrong.code == UNEXPLAINED:
            found = explain_gradients(kept["gradients"], reference, reader, done - 1,
                                      (*causes, *GRADIENT_CAUSES))
        else:
            found = None
        raise found or reader.out_of_order() or wrong from None
