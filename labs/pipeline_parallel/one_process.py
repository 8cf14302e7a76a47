"""The reference of a pipeline: the full model trained in one process on the same micro-batches."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from labs.checks.on_ranks import largest_difference
from labs.checks.tolerances import GRADIENTS
from labs.pipeline_parallel.stages import (
    IGNORED,
    MicroBatch,
    Stage,
    count_targets,
    make_stages,
    sum_of_losses,
)
from labs.predictions.pipelines import Schedule
from labs.training import models
from labs.training.models import move_to_rank, trainable
from labs.workers import devices

VOCABULARY, CONTEXT, HIDDEN = 48, 12, 16
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What is tried: a schedule, the layers of each stage, and how many steps are trained.

    accumulates: two steps add up their gradients before an update.
    """

    name: str
    schedule: Schedule
    layers: tuple[int, ...]
    steps: int = 1
    accumulates: bool = False

    def model(self, tied: bool = False) -> nn.Module:
        """The full model, the same on every rank."""
        return models.llama(layers=sum(self.layers), hidden=HIDDEN, heads=2, kv_heads=1,
                            context=CONTEXT, tied=tied, vocabulary=VOCABULARY)

    def stages(self, model: nn.Module, rank: int) -> dict[int, Stage]:
        """number -> stage, of those of a rank."""
        return make_stages(model, self.layers, range(rank, self.schedule.stages,
                                                     len(self.schedule.ranks)))


def draw_micro_batches(number: int, seed: int) -> list[MicroBatch]:
    """Micro-batches of 1 and 2 sequences, with very different numbers of targets that count."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(number):
        tokens = torch.randint(VOCABULARY, (1 + index % 2, CONTEXT + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        # 2 to 11 targets of a sequence count, by micro-batch and seed. Equal numbers would hide a
        # mean of means.
        targets[:, 2 + (5 * index + 3 * seed) % (CONTEXT - 2):] = IGNORED
        found.append({"input_ids": tokens[:, :-1].to(devices.device()),
                      "targets": targets.to(devices.device())})
    return found


class OneProcess:
    """After `differentiate(micro_batches)`: loss, and gradients by name, those of earlier calls
    added until `update`. sums: by micro-batch, the gradients of its sum of losses; counts: its
    targets that count; tokens_of_each: all its targets; tokens: those of all micro-batches."""

    def __init__(self, model: nn.Module, optimizer_class: type, **settings):
        self.model = move_to_rank(copy.deepcopy(model))
        self.optimizer = optimizer_class(self.model.parameters(), **settings)
        self.gradients: Gradients = {}

    def differentiate(self, micro_batches: Sequence[MicroBatch]) -> None:
        self.counts = [count_targets([batch]) for batch in micro_batches]
        self.tokens_of_each = [batch["targets"].numel() for batch in micro_batches]
        self.tokens = sum(self.tokens_of_each)
        self.sums, self.loss = [], 0.0
        for batch in micro_batches:
            # Apart by micro-batch: a check weighs these sums as a mistake would, without another
            # backward.
            self.model.zero_grad()
            logits = self.model(input_ids=batch["input_ids"]).logits
            loss = sum_of_losses(logits, batch["targets"])
            loss.backward()
            self.loss += loss.item() / sum(self.counts)
            self.sums.append({name: p.grad.clone() for name, p in trainable(self.model)})
        self.before = self.gradients or {name: torch.zeros_like(g)
                                         for name, g in self.sums[0].items()}
        self.gradients = self.with_factors([1 / sum(self.counts)] * len(self.counts))

    def with_factors(self, factors: Sequence[float]) -> Gradients:
        """The gradients if each micro-batch's sum of losses had been multiplied so."""
        return {name: before + sum(factor * sums[name] for factor, sums
                                   in zip(factors, self.sums, strict=True))
                for name, before in self.before.items()}

    def update(self, max_norm: float | None = None) -> float | None:
        """Trains with the gradients, clipped if asked for; the norm from before the clipping."""
        for name, parameter in trainable(self.model):
            parameter.grad = self.gradients[name].clone()
        norm = max_norm and torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()
        self.optimizer.step()
        self.gradients = {}
        return norm


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether two gradients are equal up to the order of sums."""
    return largest_difference(got, want) <= GRADIENTS * max(1e-3, want.abs().max().item())
