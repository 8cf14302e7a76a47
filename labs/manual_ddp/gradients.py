"""Holds gradients to the reference's, and names the mistake behind those that differ."""

import torch
import torch.distributed as dist

from labs.exercises.on_ranks import close, gradients, largest_difference
from labs.exercises.reference import Reference, Tensors
from labs.exercises.verdicts import Wrong
from labs.training.models import EdgeCaseModel, trainable

# What a gradient is instead of the mean over the ranks, a hint, and the value that shows it: a
# function of the mean, of this rank's own gradient, and of the number of ranks.
MISTAKES = (
    ("is the SUM over ranks, {ranks}.0x the reference's", "Divide by the world size.",
     lambda mean, own, ranks: mean * ranks),
    ("is still this rank's own: it was not averaged",
     "Is every gradient communicated, in every step, and put back where it came from?",
     lambda mean, own, ranks: own),
    ("is this rank's own divided by {ranks}: nothing was summed",
     "Sum over the ranks before you divide.", lambda mean, own, ranks: own / ranks),
    ("is the mean divided by {ranks} once more", "Divide once.",
     lambda mean, own, ranks: mean / ranks),
)


def name_mistake(got, mean, own) -> tuple[str, str]:
    """(sentence, hint) on a gradient that is not the mean over the ranks."""
    ranks = dist.get_world_size()
    for sentence, hint, gives in MISTAKES:
        if close(got, gives(mean, own, ranks)):
            return sentence.format(ranks=ranks), hint
    if not got.any():
        return "is zero", "Where did the gradient go?"
    ratio = (got.norm() / mean.norm()).item()
    if close(got, mean * ratio):
        return (f"is {ratio:.3g}x the reference's on {ranks} ranks",
                "Divide by the world size, whatever it is.")
    return (f"differs from the reference's by {largest_difference(got, mean):.2g}",
            "It is neither the mean, nor the sum, nor this rank's own.")


def sgd(model) -> torch.optim.SGD:
    """The optimizer of a module and of its reference; momentum carries a mistake to later steps."""
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def reference_model() -> Reference:
    """The reference of the model with edge cases. It skips a parameter that no rank used, as
    torch's optimizers do."""
    return Reference(EdgeCaseModel(seed=0), sgd, unused="skip")


def mean_and_own(reference) -> tuple[Tensors, Tensors]:
    """The gradients of the reference's last step by name: averaged, and of this rank's share."""
    return (reference.by_name(reference.mean),
            reference.by_name(reference.alone[dist.get_rank()]))


def judge_gradients(model, mean: Tensors, own: Tensors, when: str = "") -> float:
    """Returns the largest difference from the averaged gradients. Raises Wrong with the mistake."""
    for name, parameter in trainable(model):
        # a piece of a flat bucket that was not given its shape back
        if parameter.grad is not None and parameter.grad.shape != parameter.shape:
            raise Wrong(f"{_who(when, name)}: gradient has shape {tuple(parameter.grad.shape)}, "
                        f"the parameter {tuple(parameter.shape)}",
                        "Give each piece of the bucket its parameter's shape back.")
    got = gradients(model)
    for name in mean:
        # the reference saw all examples of the batch, this rank only its share: only the mean over
        # the ranks makes the two equal
        if not close(got[name], mean[name]):
            sentence, hint = name_mistake(got[name], mean[name], own[name])
            raise Wrong(f"{_who(when, name)}: gradient {sentence}", hint)
    for name, parameter in model.named_parameters():
        # an optimizer would update a frozen parameter that has a gradient, even one of zeros
        if not parameter.requires_grad and parameter.grad is not None:
            raise Wrong(f"{_who(when, name)} is frozen, and now has a gradient",
                        "Leave parameters with requires_grad=False alone.")
    return max(largest_difference(got[name], mean[name]) for name in mean)


def _who(when, name):
    return f"rank {dist.get_rank()}, {when}parameter {name!r}"
