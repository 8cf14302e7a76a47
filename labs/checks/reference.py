"""The reference: the same model, trained by a single process on the batch of all ranks; and what
its last step would have left behind if it had been done otherwise. training.py compares a
submission with it."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labs.training import data
from labs.training.models import trainable

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One optimizer step of all ranks together.

    batch: of all ranks; each trains on its equal share. use_all(rank): whether that rank's forward
    runs the layer `sometimes_unused` of EdgeCaseModel; None for a model without one. parts: the
    number of backward passes from which the gradient accumulates, each of 1/parts of the loss.
    whole: every rank trains on the global batch, as under tensor parallelism; the reference then
    computes it once, not once for each rank.
    """

    batch: Tensors
    use_all: Callable[[int], bool] | None = None
    parts: int = 1
    whole: bool = False

    def inputs(self, rank: int | None = None) -> dict:
        """What the forward of `rank` takes, by name; None means this rank."""
        rank = dist.get_rank() if rank is None else rank
        share = self.batch if self.whole else data.shard(self.batch, rank, dist.get_world_size())
        return share if self.use_all is None else {**share, "use_all": self.use_all(rank)}


class Reference:
    """A copy of `model` that trains on the shares of all ranks; every rank computes the same.

    unused: what a step does with a parameter that no rank used, "zero" (its gradient is zero, so
    weight decay and momentum continue) or "skip" (it is left alone, as torch's optimizers do).
    schedule(optimizer) makes a learning-rate schedule that is stepped after each step.

    After `train(step)`, of that step: losses and `alone`, by rank, the loss and the gradients that
    its share alone gives; `mean`, the gradients averaged over the ranks. Gradients are lists in the
    order of the trainable parameters, None where there is none.
    """

    def __init__(self, model: nn.Module, make_optimizer: Callable, unused: str = "zero",
                 schedule: Callable | None = None):
        self.model, self.unused = copy.deepcopy(model), unused
        self._make_optimizer = make_optimizer
        self.optimizer = make_optimizer(self.model)
        self.schedule = schedule(self.optimizer) if schedule else None
        # (step, trainable parameter): for the mistake of gradients that are never set to zero
        self.history: list[list] = []  # the mean gradients of every step so far
        self.parts = 1

    def train(self, step: Step) -> float:
        """Trains one step; the mean of the losses before it."""
        self.parts = step.parts
        self.before = _copied(self.model.state_dict()), _copied(self.optimizer.state_dict())
        loss = self.differentiate(step)
        self.history.append(self.mean)
        _update(self.model, self.optimizer, self.mean)
        if self.schedule:
            self.schedule.step()
        return loss

    def differentiate(self, step: Step) -> float:
        """Fills losses, alone and mean without an update; the mean loss."""
        ranks = dist.get_world_size()
        # Every rank computes the shares of all ranks itself, without a collective: a submission
        # that leaves the ranks out of step cannot spoil what it is compared with.
        shares = [self._share(step, rank) for rank in range(1 if step.whole else ranks)]
        self.losses, self.alone = zip(*shares * (ranks if step.whole else 1), strict=True)
        self.mean = [_mean(of_ranks) for of_ranks in
                     zip(*(gradients for _, gradients in shares), strict=True)]
        return sum(self.losses) / len(self.losses)

    def _share(self, step, rank) -> tuple[float, list]:
        self.model.zero_grad()
        loss = self.model(**step.inputs(rank)).loss
        loss.backward()
        # zero_grad() sets .grad to None and does not write into the tensors, so they stay valid.
        gradients = [p.grad for _, p in trainable(self.model)]
        self.model.zero_grad()
        if self.unused == "zero":
            gradients = [torch.zeros_like(p) if g is None else g for g, (_, p) in
                         zip(gradients, trainable(self.model), strict=True)]
        return loss.item(), gradients

    def by_name(self, gradients: Sequence) -> Tensors:
        """Gradients by the names of their parameters; zeros where there is none."""
        return {name: torch.zeros_like(p) if g is None else g
                for g, (name, p) in zip(gradients, trainable(self.model), strict=True)}

    # what the last step would have left behind if it had been done otherwise

    def unchanged(self) -> Tensors:
        """The parameters from before the step."""
        return self.before[0]

    def otherwise(self, gradients: Sequence | None = None, scale: float = 1.0,
                  new_optimizer: bool = False, **group) -> Tensors:
        """The parameters that the step leaves with other gradients (None: the mean), multiplied by
        `scale`, with an optimizer that has no state yet, or with other settings of its group."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.before[0])
        optimizer = self._make_optimizer(model)
        rate = self.before[1]["param_groups"][0]["lr"]
        if not new_optimizer:
            optimizer.load_state_dict(_copied(self.before[1]))
        optimizer.param_groups[0].update({"lr": rate, **group})
        chosen = self.mean if gradients is None else gradients
        _update(model, optimizer, [g if g is None else g * scale for g in chosen])
        return model.state_dict()

    def accumulated(self) -> list:
        """The sum of the mean gradients of every step so far."""
        return [sum(g for g in steps if g is not None) if any(g is not None for g in steps)
                else None for steps in zip(*self.history, strict=True)]


def _copied(state):
    """A copy of a state_dict, in a seventh of copy.deepcopy's time: it is made in every step."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {name: _copied(value) for name, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


def _mean(gradients):
    # The divisor is the number of ranks, not of those that used the parameter: a rank that did not
    # use it adds a zero to the sum, as in DDP.
    found = [g for g in gradients if g is not None]
    return sum(found) / len(gradients) if found else None


def _update(model, optimizer, gradients):
    for gradient, (_, parameter) in zip(gradients, trainable(model), strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()
