"""What a single process computes on the micro-batches that a run's ranks have drawn: the reference
for job.py, whose model and optimizer it shares."""

import math
from dataclasses import dataclass

import torch

from labs.checks.scripts.expected_training import LEARNING_RATE, Tensors
from labs.scaling.ragged import Batch, Shares, answer_samples
from labs.training import models
from labs.workers import devices

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
