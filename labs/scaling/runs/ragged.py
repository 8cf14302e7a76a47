"""Batches of prompts and answers of different lengths, as supervised fine-tuning has them: only the
tokens of an answer count in the loss."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from labs.training import data
from labs.workers import devices

IGNORED = -100  # the label of a token that does not count, as in Hugging Face's models
PROMPT = 8  # tokens of a prompt
LONGEST = 24  # tokens of an answer of `answer_samples`
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
    lengths = torch.randint(1, LONGEST + 1, (number,), generator=drawn).tolist()
    batch = _cut_answers(lengths, LONGEST, seed)
    return [{name: rows[index] for name, rows in batch.items()} for index in range(number)]


def _cut_answers(lengths, longest, seed) -> Batch:
    rows = data.windows(len(lengths), PROMPT + longest, seed)[:, :-1]
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
    logits = module(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(),
                           ignore_index=IGNORED, reduction="sum")
