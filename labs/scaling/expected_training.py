"""What a single process computes on the batches that a run's ranks have drawn: the reference for
train.py, whose model, optimizer and schedule it shares, and for job.py."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from labs.scaling.ragged import Batch, Shares, answer_samples
from labs.training import models
from labs.workers import devices

CONTEXT = 64  # tokens of a sample of train.py
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


def train_on(batches: list[list[torch.Tensor]], layers: int, hidden: int, seed: int) -> Expected:
    """Trains one model on batches[step][rank], tokens of shape (number, CONTEXT), all ranks' of a
    step together, with the learning rate falling linearly to 0."""
    torch.set_num_threads(1)  # two would wait for each other in every small operation
    model = models.move_to_rank(models.gpt2(layers, hidden, context=CONTEXT, seed=seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, len(batches))
    found = Expected([], [], [], [], _copied(model.named_parameters()), {}, _largest_unit(model))
    for step, of_ranks in enumerate(batches):
        total = sum(map(len, of_ranks))
        losses = []
        for rows in of_ranks:
            if step == 0:
                found.alone.append(_gradients_alone(model, rows))
            # The mean over all sequences of the step: a rank with fewer of them counts less.
            loss = _loss(model, rows)
            (loss * (len(rows) / total)).backward()
            losses.append(loss.item())
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


Drawn = list[list[list[list[int]]]]  # [step][rank][part]: the samples of a micro-batch


@dataclass
class ExpectedStep:
    """loss: the mean over the answer tokens of all ranks and micro-batches. tokens: their number on
    each rank. gradients: of that loss, not clipped."""

    loss: float
    tokens: list[int]
    gradients: Tensors

    @property
    def norm(self) -> float:
        """Of all gradients together, before they are clipped."""
        return norm_of(self.gradients)


@dataclass
class ExpectedJob:
    """mistakes: what it is -> the first step as that mistake leaves it. nbytes: of all parameters
    of one copy."""

    steps: list[ExpectedStep]
    mistakes: dict[str, ExpectedStep]
    nbytes: int


def norm_of(tensors: Tensors) -> float:
    """The norm of all numbers of these tensors together."""
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors.values()))


def clipped(gradients: Tensors, most: float, norm: float | None = None) -> Tensors:
    """The gradients, scaled down where their norm is above `most`. norm: another one to clip by."""
    factor = min(1.0, most / (norm or norm_of(gradients) or 1.0))
    return {name: gradient * factor for name, gradient in gradients.items()}


def train_job_on(drawn: Drawn, samples: int, layers: int, hidden: int, seed: int,
                 clip: float) -> ExpectedJob:
    """Trains one model on drawn[step][rank][part], with AdamW, every token of a step once."""
    torch.set_num_threads(1)  # two would wait for each other in every small operation
    rows = answer_samples(samples, seed)
    model = models.move_to_rank(models.gpt2(layers, hidden, seed=seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    job = ExpectedJob([], {}, sum(p.nbytes for p in model.parameters()))
    for of_ranks in drawn:
        shares = Shares(model, [[_stacked([rows[index] for index in part]) for part in parts]
                                for parts in of_ranks])
        if not job.steps:
            # Before the first update, when job.py's parameters are still the reference's.
            job.mistakes = _mistakes(model, shares)
        step = _step(model, shares, lambda rank, part, total=shares.total: 1 / total)
        job.steps.append(step)
        ends = clipped(step.gradients, clip)
        for name, parameter in model.named_parameters():
            parameter.grad = ends[name].to(parameter.device)
        optimizer.step()
    return job


def _stacked(samples) -> Batch:
    return {name: torch.stack([sample[name] for sample in samples]).to(devices.device())
            for name in samples[0]}


def _mistakes(model, shares) -> dict[str, ExpectedStep]:
    own = sum(shares.counts[0])
    alone = [("the mean of rank 0 alone", lambda rank, part: (rank == 0) / max(1, own)),
             ("rank 0's share of it", lambda rank, part: (rank == 0) / shares.total)]
    return {what: _step(model, shares, weight) for what, weight in [*shares.mistakes(), *alone]}


def _step(model, shares, weight) -> ExpectedStep:
    loss, flat = shares.step(weight)
    named = dict(model.named_parameters())
    pieces = flat.cpu().split([p.numel() for p in named.values()])  # (parameters,) as one tensor
    return ExpectedStep(loss, [sum(parts) for parts in shares.counts], {
        name: piece.view(p.shape) for (name, p), piece in zip(named.items(), pieces, strict=True)})
