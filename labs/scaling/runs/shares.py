"""What every rank's every micro-batch adds to one optimizer step on ragged batches, computed by a
single process: the reference, and the numbers that common mistakes lead to."""

import math
from collections.abc import Callable

import torch
from torch import nn

from labs.scaling.runs.ragged import PROMPT, Batch, count_answers, loss_sum


class Shares:
    """Sums of losses and gradients of every rank's every micro-batch, from which the right step
    and the common wrong ones are put together by weights.

    batches: [rank][part], the same number of parts on each rank. counts: [rank][part], their answer
    tokens. A gradient is one flat tensor, in the order of the model's parameters.
    """

    def __init__(self, model: nn.Module, batches: list[list[Batch]]):
        self.ranks, self.parts = len(batches), len(batches[0])
        self.counts = [[int(count_answers(batch)) for batch in own] for own in batches]
        self.tokens = sum(batch["labels"].numel() for own in batches for batch in own)
        self._sums = [[_differentiated(model, batch) for batch in own] for own in batches]

    def step(self, weight: Callable[[int, int], float]) -> tuple[float, torch.Tensor]:
        """(loss, gradient): the sums, each times weight(rank, part)."""
        terms = [(weight(rank, part), *self._sums[rank][part]) for rank in range(self.ranks)
                 for part in range(self.parts)]
        return (sum(w * loss for w, loss, _ in terms), sum(w * g for w, _, g in terms))

    @property
    def total(self) -> int:
        """Answer tokens of all ranks and micro-batches."""
        return sum(map(sum, self.counts))

    def mistakes(self) -> list[tuple[str, Callable[[int, int], float]]]:
        """(what it is, its weights); a rank or part without tokens has weight 0."""
        counts, ranks, parts, total = self.counts, self.ranks, self.parts, self.total
        of_rank = [sum(own) for own in counts]
        of_part = [sum(own[part] for own in counts) for part in range(parts)]

        def over(number, *factors):
            return 1 / (number * math.prod(factors)) if number else 0.0

        return [
            ("the mean over the ranks of each rank's mean", lambda r, p: over(of_rank[r], ranks)),
            ("the mean over ranks and micro-batches of each one's mean",
             lambda r, p: over(counts[r][p], ranks, parts)),
            ("the mean over micro-batches of each one's mean over all ranks",
             lambda r, p: over(of_part[p], parts)),
            ("the sum over micro-batches of each one's mean over all ranks",
             lambda r, p: over(of_part[p])),
            ("the sum over the ranks of each rank's mean", lambda r, p: over(of_rank[r])),
            (f"the right one divided by {ranks}", lambda r, p: over(total, ranks)),
            (f"the right one divided by {parts}", lambda r, p: over(total, parts)),
            (f"{ranks} times the right one", lambda r, p: ranks / total),
            ("divided by all tokens, those of prompts and padding too",
             lambda r, p: 1 / self.tokens),
            ("divided by all predicted tokens, padding too",
             lambda r, p: 1 / max(1, self.tokens - PROMPT)),
            ("the sum of the losses, not divided by the number of tokens", lambda r, p: 1.0),
            ("the mean over the ranks of the sum of the losses", lambda r, p: 1 / ranks)]


def _differentiated(model, batch) -> tuple[float, torch.Tensor]:
    loss = loss_sum(model, batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([g.flatten() for g in gradients])
