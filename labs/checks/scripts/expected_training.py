"""What a single process computes on the batches that a run's ranks have drawn: the reference for
scripts that train a GPT-2, whose model, optimizer and schedule it shares."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from labs.training import models

CONTEXT = 64  # tokens of a sample
LEARNING_RATE = 1e-3
Tensors = dict[str, torch.Tensor]


@dataclass
class Expected:
    """losses[step][rank]: the loss of that rank's sequences, before the step. rates: the learning
    rate of each step. gradients: of each step, of the mean over all sequences; alone: of the first
    step and of each rank's own. initial, parameters: before the first and after the last step.
    largest_unit: bytes of the parameters of a block, or of what is in no block, if that is more."""

    losses: list[list[float]]
    rates: list[float]
    gradients: list[Tensors]
    alone: list[Tensors]
    initial: Tensors
    parameters: Tensors
    largest_unit: int


def train_on(batches: list[list[torch.Tensor]], make_model: Callable[[], nn.Module],
             falling: bool = True, skip: int = 0) -> Expected:
    """Trains one model on batches[step][rank], tokens of shape (number, CONTEXT), all ranks' of a
    step together. falling: whether the learning rate falls linearly to 0; else it stays. skip: so
    many first steps are of no interest."""
    torch.set_num_threads(1)  # two would wait for each other in every small operation
    model = models.move_to_rank(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0 if falling else 1, len(batches))
    found = Expected([], [], [], [], _copied(model.named_parameters()), {}, _largest_unit(model))
    for step, of_ranks in enumerate(batches):
        total = sum(map(len, of_ranks))
        losses = []
        for rows in of_ranks:
            if step == skip:
                found.alone.append(_gradients_alone(model, rows))
            # The mean over all sequences of the step: a rank with fewer of them counts less.
            loss = _loss(model, rows)
            (loss * (len(rows) / total)).backward()
            losses.append(loss.item())
        if step >= skip:
            found.gradients.append(_gradients(model))
            found.losses.append(losses)
            found.rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    found.parameters = _copied(model.named_parameters())
    return found


def _largest_unit(model) -> int:
    blocks = [sum(p.nbytes for p in block.parameters()) for block in models.blocks(model)]
    return max(*blocks, sum(p.nbytes for p in model.parameters()) - sum(blocks))


def _loss(model, rows) -> torch.Tensor:
    rows = rows.to(next(model.parameters()).device)
    return model(input_ids=rows, labels=rows).loss


def _gradients_alone(model, rows) -> Tensors:
    """Leaves the gradients that have accumulated as they are."""
    before = [p.grad for p in model.parameters()]
    model.zero_grad()
    _loss(model, rows).backward()
    alone = _gradients(model)
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        parameter.grad = gradient
    return alone


def _gradients(model: nn.Module) -> Tensors:
    return _copied((name, p.grad) for name, p in model.named_parameters())


def _copied(named) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in named if tensor is not None}
