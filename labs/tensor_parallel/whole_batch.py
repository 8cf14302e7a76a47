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
parameter is not averaged over ranks: each rank's own copy is compared with the reference. Where a
loss or a parameter differs and no `TrainingMistake` explains it, the first layer whose output, or
the first parameter whose gradient, differs is looked for, and compared with what each
`LayerMistake` leaves. An exercise adds its own: `mistakes=(*MISTAKES, TrainingMistake(...))`,
`layer_mistakes=(LayerMistake(...),)`.

Gradients are never judged, only explained: under sequence parallelism a right answer may reduce the
norms' gradients as late as in the optimizer's step.

Bytes and collectives are judged by checks/invariants.py: `ResidentBytes.of(model, names, ranks)`
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
from labs.checks.explanations import (
    Found,
    LayerMistake,
    TrainingMistake,
    explain_gradients,
    explain_outputs,
)
from labs.checks.mistakes import NEW_OPTIMIZER_STATE, NOT_UPDATED
from labs.checks.on_ranks import close
from labs.checks.reference import Reference, Step, Tensors
from labs.checks.tolerances import SUMS
from labs.checks.training import UNEXPLAINED, Hints, train_and_compare
from labs.checks.verdicts import Wrong
from labs.tensor_parallel.shards import ShardReader
from labs.training import data
from labs.training.loop import ModuleAndOptimizer
from labs.workers import devices

STEPS = 5
# AdamW hides the scale of a gradient; with a large eps a sum differs from a mean. SGD shows it.
ADAMW = (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3})
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})

HINTS = Hints(
    loss="Forward must compute what the full model computes, on every rank.",
    unexplained="Is every gradient that a rank has only a part of summed over the ranks, once?")

MEMORY_HINTS = {
    "parameters": "Does a shard have memory of its own? A view of the full weight keeps all of "
                  "it: clone the part.",
    "gradients": "Gradients are as large as the parameters: is anything not sharded that should "
                 "be?",
    "optimizer_state": "Make the optimizer after the layers have been replaced, from the "
                       "parameters that the module has now.",
    "rest": "Is something kept that was needed only to make the shards?"}

MISTAKES = (
    NOT_UPDATED.with_hint("Replace the layers first; then make the optimizer, from the parameters "
                          "that the module has now."),
    TrainingMistake("settings_ignored", "updated without the optimizer's settings",
                    "Pass **settings on to the optimizer.",
                    lambda reference: _by_default(reference)),
    NEW_OPTIMIZER_STATE)


def _by_default(reference: Reference) -> list[Tensors]:
    """What a step leaves with an optimizer that got no settings, or none but the learning rate."""
    default = type(reference.optimizer)([nn.Parameter(torch.zeros(1))]).defaults
    alone = {name: value for name, value in default.items() if name != "lr"}
    return [reference.otherwise(**default), reference.otherwise(**alone)]


def _bias_times(found: Found, times: int) -> bool:
    return found.bias is not None and close(found.got - found.want,
                                            (times * found.bias).expand_as(found.want))


def _is_part(found: Found) -> bool:
    """Whether the ranks' outputs add up to the reference's, the bias left out or on every rank."""
    surplus = [0] if found.bias is None else [n * found.bias for n in (0, -1, found.ranks - 1)]
    return any(close(found.total, found.want + bias) for bias in surplus)


_SCALED = (
    LayerMistake(
        "summed_too_often", "it is {ranks} times the reference's",
        "Sum over the ranks only what each rank has a part of, and only once.",
        lambda found: close(found.got, found.ranks * found.want)),
    LayerMistake(
        "averaged", "it is 1/{ranks} of the reference's",
        "Nothing is averaged here: all ranks have the same batch, and parts are summed.",
        lambda found: close(found.got * found.ranks, found.want)),
    LayerMistake(
        "not_finite", "it is not finite", "Was memory read before it was written?",
        lambda found: not found.got.isfinite().all()))
OUTPUT_MISTAKES = (
    LayerMistake(
        "bias_on_every_rank", "the bias is in it {ranks} times, once for each rank",
        "A row-parallel layer adds its bias after the sum over the ranks, once.",
        lambda found: _bias_times(found, found.ranks - 1)),
    LayerMistake(
        "bias_missing", "the bias is missing", "Add the bias after the sum over the ranks.",
        lambda found: _bias_times(found, -1)),
    *_SCALED,
    LayerMistake(
        "not_summed", "it is only this rank's part: those of all ranks add up to the reference's",
        "The outputs of a row-parallel layer are summed over the ranks: g, ReduceFromRegion.",
        _is_part))
GRADIENT_MISTAKES = (
    *_SCALED,  # first: 1/t of it on every rank also adds up
    LayerMistake(
        "gradient_not_summed",
        "the gradient is only this rank's part: those of all ranks add up to the reference's",
        "Each rank's column-parallel layers send back only their part of the gradient of their "
        "input. Sum it over the ranks where the input enters: f, CopyToRegion.",
        lambda found: close(found.total, found.want)),
    # Of a sharded parameter all ranks are asked for the same gradient, put together.
    LayerMistake(
        "gradient_partly_summed",
        "each rank has another gradient for this parameter: a part of it was summed over the "
        "ranks, and a part is this rank's alone",
        "Several layers take this input, as query, key and value do, or gate and up: one of them "
        "sends its part back unsummed. Apply f once, where the input of all of them enters.",
        lambda found: not close(found.total, found.ranks * found.got)))


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
                         mistakes: Sequence[TrainingMistake] = MISTAKES, hints: Hints = HINTS,
                         layer_mistakes: Sequence[LayerMistake] = (),
                         tolerance: float = SUMS) -> float:
    """On a rank: trains by the plain loop, held to the reference after each step; returns the
    largest difference of a parameter.

    Raises Wrong on all ranks, with what broke on the lowest: shards that are not the model's from
    the beginning, then a loss, then a parameter. layer_mistakes: what else may explain a wrong
    output or gradient.
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
        return train_and_compare(
            module, optimizer, [reference], steps, mistakes=mistakes, hints=hints,
            parameters_of=reader, judge_gradients=keep_gradients, tolerance=tolerance)
    except Wrong as wrong:  # raised on all ranks alike, so that they can go on communicating
        done = len(reference.history)
        # The reference has begun step `done`, and no gradients were kept in it: the loss was wrong,
        # so the mistake is in forward.
        if kept.get("steps") != done:
            found = explain_outputs(module, reference, steps[done - 1], reader,
                                    (*layer_mistakes, *OUTPUT_MISTAKES))
        # The loss was right and a parameter is not: the mistake is in backward.
        elif wrong.code == UNEXPLAINED:
            found = explain_gradients(kept["gradients"], reference, reader, done - 1,
                                      (*layer_mistakes, *GRADIENT_MISTAKES))
        else:
            found = None
        raise found or reader.out_of_order() or wrong from None
