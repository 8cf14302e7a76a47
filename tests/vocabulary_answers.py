"""What the tests of exercises 7.4 to 7.6 share: the solution, and right answers in pieces that
wrong ones replace."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _build.definitions import definitions
from answers import assert_rejected

right = definitions("07a_tensor_parallel")
Embedding = right.VocabularyParallelEmbedding


def summed(tensor, group):
    return right.ReduceFromRegion.apply(tensor, group)


def size_and_rank(group):
    return dist.get_world_size(group), dist.get_rank(group)


def own_rows(module, tokens):
    """This rank's rows, zeros for tokens of others; the middle of the right answer."""
    local = tokens - module.first
    elsewhere = (local < 0) | (local >= len(module.weight))
    found = F.embedding(local.masked_fill(elsewhere, 0), module.weight, module.padding_idx)
    return found.masked_fill(elsewhere[..., None], 0)


def pieces(logits, targets, group):
    """(logits minus the largest of all ranks, this rank's numbers of the targets, where another
    rank has them, which targets count); the first half of the right answer."""
    rows = logits.shape[-1]
    largest = logits.detach().float().amax(-1, keepdim=True)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    local = targets - rows * dist.get_rank(group)
    elsewhere = (local < 0) | (local >= rows)
    return (logits.float() - largest, local.masked_fill(elsewhere, 0), elsewhere, targets != -100)


def gathered(logits, group):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits.detach(), group=group)
    parts[dist.get_rank(group)] = logits
    return torch.cat(parts, -1)


class ByHand(torch.autograd.Function):
    """A right autograd.Function, in pieces that a wrong one replaces."""

    @classmethod
    def minus_one(cls, shares, local, elsewhere):
        mine = (~elsewhere).float()[..., None]
        return shares.scatter_add(-1, local[..., None], -mine)

    @classmethod
    def forward(cls, ctx, logits, targets, group):
        shifted, local, elsewhere, counted = pieces(logits, targets, group)
        mine = shifted.gather(-1, local[..., None])[..., 0].masked_fill(elsewhere, 0)
        shares = shifted.exp_()
        sums = torch.stack([shares.sum(-1), mine])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(shares.div_(sums[0][..., None]), local, elsewhere, counted)
        return (sums[0].log() - sums[1])[counted].sum() / counted.sum()

    @classmethod
    def backward(cls, ctx, upstream):
        shares, local, elsewhere, counted = ctx.saved_tensors
        gradient = cls.minus_one(shares, local, elsewhere)
        return cls.scaled(gradient, counted, upstream), None, None

    @classmethod
    def scaled(cls, gradient, counted, upstream):
        return gradient * (counted[..., None] * upstream / counted.sum())


def assert_all_rejected(answers, verdicts):
    """Each verdict says the words of its (answer, words); `pytest -s` prints them."""
    for (answer, words), verdict in zip(answers, verdicts, strict=True):
        name = getattr(answer, "__name__", "")
        print(f"{words if name in ('<lambda>', 'apply', '') else name} → {verdict.sentence}")
        assert_rejected(verdict, words)
