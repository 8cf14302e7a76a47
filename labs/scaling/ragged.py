"""Batches of prompts and answers of different lengths, as supervised fine-tuning has them: only the
tokens of an answer count in the loss. And what every rank's every micro-batch adds to one optimizer
step on them, computed by a single process: the reference, and the numbers that common mistakes lead
to."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from labs.training import data
from labs.workers import devices

IGNORED = -100  # the label of a token that does not count, as in Hugging Face's models
PROMPT = 8  # tokens of a prompt
MAX_ANSWER_TOKENS = 24  # tokens of an answer of `answer_samples`
Batch = dict[str, torch.Tensor]


def answers(lengths: Sequence[int], seed: int = 0) -> Batch:
    """A batch of prompts of 8 tokens, each followed by an answer with so many tokens, cut from real
    text: "input_ids" and "labels", both (sequences, longest). Labels of prompts and of what fills a
    row up are -100. A length may be 0."""
    batch = _cut_answers(lengths, max([1, *lengths]), seed)
    return {name: rows.to(devices.device()) for name, rows in batch.items()}


def answer_samples(number: int, seed: int = 0) -> list[Batch]:
    """A dataset of so many sequences, on the CPU: each a prompt of 8 tokens with an answer of 1 to
    24, as "input_ids" and "labels" of 32 tokens. Labels that do not count are -100."""
    drawn = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, MAX_ANSWER_TOKENS + 1, (number,), generator=drawn).tolist()
    batch = _cut_answers(lengths, MAX_ANSWER_TOKENS, seed)
    return [{name: rows[index] for name, rows in batch.items()} for index in range(number)]


def _cut_answers(lengths, longest, seed) -> Batch:
    rows = data.windows(len(lengths), PROMPT + longest, seed)[:, :-1]  # (sequences, tokens)
    # Padding is on the right: under a causal mask no token of the prompt or the answer attends to
    # it.
    place, ends = torch.arange(PROMPT + longest), PROMPT + torch.tensor(list(lengths)).unsqueeze(1)
    inputs = rows.masked_fill(place >= ends, 0)
    return {"input_ids": inputs,
            "labels": inputs.masked_fill((place < PROMPT) | (place >= ends), IGNORED)}


def count_answers(batch: Batch) -> torch.Tensor:
    """How many tokens of a batch count in its loss: a tensor without dimensions, int64."""
    return (batch["labels"] != IGNORED).sum()


def loss_sum(module: nn.Module, batch: Batch) -> torch.Tensor:
    """The sum of the losses of a batch's answer tokens, to be differentiated; 0 where it has none.
    The token at each place is predicted from those before it."""
    # logits: (batch, sequence, vocabulary). Those at a place predict the token at the next one.
    logits = module(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(),
                           ignore_index=IGNORED, reduction="sum")


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
        # Losses are summed, not averaged, so each right or wrong gradient is a weighted sum of the
        # same gradients: one backward per micro-batch serves the reference and all mistakes.
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
    # It leaves .grad as it is.
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([g.flatten() for g in gradients])
