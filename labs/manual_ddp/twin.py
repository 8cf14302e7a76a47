"""The non-parallel twin: the same model, trained on the whole batch by one process, and a
comparison that says what is wrong with a gradient that is not the twin's."""

import copy
import functools

import torch
import torch.distributed as dist

from labs.exercises import on_ranks
from labs.exercises.on_ranks import BATCH, close, gradients, raise_on_all_ranks, worst
from labs.exercises.verdicts import Wrong
from labs.training import data
from labs.training.models import EdgeCaseModel, trainable

__all__ = ["BATCH", "Twin", "close", "compare_gradients", "compare_state", "fault", "gradients",
           "sgd", "raise_on_all_ranks", "torchs_own_refused", "worst"]

torchs_own_refused = functools.partial(on_ranks.torchs_own_refused, "DistributedDataParallel")


class Twin:
    """Trains on all shards of a batch at once. rare(rank) says which shards take the branch."""

    def __init__(self, seed=0, rare=lambda rank: True):
        self.model, self.rare = EdgeCaseModel(seed), rare
        self.ranks = dist.get_world_size()
        self.optimizer = sgd(self.model)

    def loss(self, batch, model=None, ranks=None):
        """Mean over the shards; shards are of equal size, so this is the full-batch loss."""
        ranks = range(self.ranks) if ranks is None else ranks
        model = model or self.model
        return sum(model(**data.shard(batch, r, self.ranks), use_all=self.rare(r)).loss
                   for r in ranks) / len(ranks)

    def own_gradients(self, batch):
        """What this rank's shard alone gives: the gradients before any communication."""
        alone = copy.deepcopy(self.model)
        alone.zero_grad()
        self.loss(batch, alone, [dist.get_rank()]).backward()
        return gradients(alone)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def compare_gradients(model, want, own, when="") -> float:
    """The largest difference from the twin's gradients. Raises Wrong with what broke."""
    for name, parameter in trainable(model):
        if parameter.grad is not None and parameter.grad.shape != parameter.shape:
            raise Wrong(f"{_who(when, name)}: gradient has shape {tuple(parameter.grad.shape)}, "
                        f"the parameter {tuple(parameter.shape)}",
                        "Give each piece of the bucket its parameter's shape back.")
    got = gradients(model)
    for name in want:
        if not close(got[name], want[name]):
            sentence, hint = fault(got[name], want[name], own[name])
            raise Wrong(f"{_who(when, name)}: gradient {sentence}", hint)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and parameter.grad is not None:
            raise Wrong(f"{_who(when, name)} is frozen, and now has a gradient",
                        "Leave parameters with requires_grad=False alone.")
    return max(worst(got[name], want[name]) for name in want)


def compare_state(model, twin, when) -> None:
    """Parameters and buffers equal to the twin's. Raises Wrong with what broke."""
    for kind, ours, theirs in (("parameter", model.named_parameters(), twin.named_parameters()),
                               ("buffer", model.named_buffers(), twin.named_buffers())):
        for (name, value), (_, want) in zip(ours, theirs, strict=True):
            if not close(value.detach(), want.detach()):
                raise Wrong(f"rank {dist.get_rank()}, {kind} {name!r} {when}: it differs from the "
                            f"twin's by {worst(value.detach(), want.detach()):.2g}")


def _who(when, name):
    return f"rank {dist.get_rank()}, {when}parameter {name!r}"


def fault(got, want, own):
    """(what the gradient is instead of the mean, hint)."""
    n = dist.get_world_size()
    if close(got, want * n):
        return f"is the SUM over ranks, {n}.0x the twin's", "Divide by the world size."
    if close(got, own):
        return ("is still this rank's own: it was not averaged",
                "Is every gradient communicated, in every step, and put back where it came from?")
    if close(got, own / n):
        return (f"is this rank's own divided by {n}: nothing was summed",
                "Sum over the ranks before you divide.")
    if close(got, want / n):
        return f"is the mean divided by {n} once more", "Divide once."
    if not got.any():
        return "is zero", "Where did the gradient go?"
    ratio = (got.norm() / want.norm()).item()
    if close(got, want * ratio):
        return (f"is {ratio:.3g}x the twin's on {n} ranks",
                "Divide by the world size, whatever it is.")
    return (f"differs from the twin's by {worst(got, want):.2g}",
            "It is neither the mean, nor the sum, nor this rank's own.")
