"""The kind of check for a strategy: trains a submission beside the reference, by the plain loop,
and compares loss and parameters after each step. What an exercise gives is data: the models, the
steps, the known mistakes, the hints, and how its parameters are read."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from labs.checks.explanations import TrainingMistake, differs, explain_parameter
from labs.checks.on_ranks import largest_difference, raise_on_all_ranks
from labs.checks.reference import Reference, Step, Tensors
from labs.checks.tolerances import LOSS, SUMS
from labs.checks.verdicts import Wrong
from labs.words import counted, format_distinct

UNEXPLAINED = "differs_from_reference"  # the code of a parameter that no mistake explains


@dataclass(frozen=True)
class Hints:
    """What an exercise says where no mistake explains the numbers, or where there are none."""

    loss: str = "Forward must run with unsharded, updated parameters."
    unexplained: str = ""
    not_finite: str = "Was memory read before it was written?"


def full_parameters(module: nn.Module) -> Tensors:
    """name -> parameter, as they lie in the module."""
    return {name: p.detach() for name, p in module.named_parameters()}


def train_and_compare(module: nn.Module, optimizer, references: Sequence[Reference],
                      steps: Sequence[Step], *, mistakes: Sequence[TrainingMistake] = (),
                      hints: Hints = Hints(),
                      parameters_of: Callable[[nn.Module], Tensors | None] = full_parameters,
                      judge_gradients: Callable[[Reference, int], float] | None = None,
                      schedule=None, during=contextlib.nullcontext,
                      tolerance: float = SUMS) -> float:
    """On a rank: trains `module` by the plain loop and holds it to the references after each step.

    Returns the largest difference of a parameter (or a gradient); raises Wrong on all ranks with
    what broke on the lowest of them. Of several references the nearest counts. parameters_of:
    the module's parameters, gathered where they are sharded, by the names that the reference has;
    None where they cannot be read. judge_gradients(reference, number): called after backward, with
    the number of the step; raises Wrong, or returns the largest difference. schedule: the
    optimizer's, stepped after each step. during: a context manager for forward and backward.
    tolerance: of a parameter and of a loss, absolute below 1 and relative above.
    """
    difference = 0.0
    for number, step in enumerate(steps):
        for reference in references:
            reference.train(step)
        # Invariant: `parts` backward passes without zero_grad between them leave the gradient of
        # one pass over the share. Catches a hook that overwrites .grad, or keeps the last pass
        # only.
        with during():
            for _ in range(step.parts):  # gradients must add up
                loss = module(**step.inputs()).loss
                (loss / step.parts).backward()
        # The loss is judged before the update: a forward with stale parameters is then named as
        # such, and not as the wrong update that follows from it.
        raise_on_all_ranks(_judge_loss, loss.item(), references, number, hints, tolerance)
        # Gradients are judged before optimizer.step() uses them, because AdamW hides a factor that
        # all gradients share: its update divides by their size.
        if judge_gradients:
            difference = max(difference, raise_on_all_ranks(judge_gradients, references[0], number))
        optimizer.step()
        if schedule:
            schedule.step()
        optimizer.zero_grad()
        found = parameters_of(module)  # outside of the judgement: all ranks gather, or none
        difference = max(difference, raise_on_all_ranks(
            judge_parameters, found, references, f"after step {number}", mistakes, hints,
            tolerance))
    return difference


def _judge_loss(loss, references, number, hints, tolerance):
    # Invariant: each rank's loss is the reference's on the same share, before every update.
    # a forward with stale or partly gathered parameters shows in the loss before any update does
    rank = dist.get_rank()
    want = [reference.losses[rank] for reference in references]
    most = min(tolerance, LOSS)  # a loss is a mean: rounding shows less than in a weight
    if min(abs(loss - w) for w in want) <= most * max(1.0, abs(want[0])):
        return
    when = f"after {counted(number, 'step')}" if number else "before the first step"
    is_, should_be = format_distinct(loss, want[0], digits=5)
    raise Wrong(f"rank {rank}, {when}: the loss is {is_}, the reference's is {should_be}",
                hints.loss, code="wrong_loss")


def judge_parameters(found: Tensors | None, references: Sequence[Reference], when: str,
                     mistakes: Sequence[TrainingMistake] = (), hints: Hints = Hints(),
                     tolerance: float = SUMS) -> float:
    """The largest difference from the nearest reference's parameters, and from its buffers where
    `found` has them. Raises Wrong, with the mistake that explains the numbers if there is one."""
    if found is None:
        return 0.0
    # Invariant: after each step every parameter is the reference's, in every element, on every
    # rank. Where two results are right (a gradient of zero or none for an unused parameter), one of
    # the references must match in all parameters; a mixture of both is wrong.
    differences = [max(largest_difference(found[name], want)
                       for name, want in _wanted(reference, found)) for reference in references]
    nearest = references[differences.index(min(differences))]
    for name, want in _wanted(nearest, found):
        _judge_one(name, found[name], want, nearest, when, mistakes, hints, tolerance)
    return min(differences)


def _wanted(reference, found):
    """(name, tensor) of the reference's parameters, and of its buffers that are in `found`."""
    yield from ((name, p.detach()) for name, p in reference.model.named_parameters())
    yield from ((name, b) for name, b in reference.model.named_buffers() if name in found)


def _judge_one(name, got, want, reference, when, mistakes, hints, tolerance):
    kind = "parameter" if name in dict(reference.model.named_parameters()) else "buffer"
    who = f"rank {dist.get_rank()}, {kind} {name!r} {when}"
    if got.shape != want.shape:
        raise Wrong(f"{who}: its shape is {tuple(got.shape)}, not {tuple(want.shape)}",
                    hints.unexplained, code="wrong_shape")
    wrong = differs(got, want, tolerance)
    if not wrong.any():
        return
    if not got.isfinite().all():
        raise Wrong(f"{who}: it is not finite", hints.not_finite, code="not_finite")
    part = f"{int(wrong.sum())} of its {wrong.numel()} numbers were"
    found, whole = explain_parameter(name, got, wrong, reference, mistakes, tolerance)
    if not found:
        raise Wrong(f"{who}: {'it was' if wrong.all() else part} updated to something else than "
                    f"the reference's, off by up to {largest_difference(got, want):.2g}",
                    hints.unexplained, code=UNEXPLAINED)
    sentences = [mistake.sentence.format(parts=reference.parts) for mistake in found]
    alike = f" (the same on {counted(dist.get_world_size(), 'rank')})" * (len(found) > 1)
    raise Wrong(f"{who}: {'it was' if whole else part} {', or '.join(sentences)}{alike}",
                " Or: ".join(filter(None, (mistake.hint_if_all if whole and mistake.hint_if_all
                                           else mistake.hint for mistake in found))),
                code=found[0].code)
