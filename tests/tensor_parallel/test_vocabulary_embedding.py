"""What the check of exercise 7.4 must reject, with the words that must say why; and what it must
accept."""

import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from answers import assert_rejected, judge_all
from torch import nn
from vocabulary_answers import (
    Embedding,
    own_rows,
    size_and_rank,
    summed,
)

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["vocabulary_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


# wrong ones


class Whole(nn.Embedding):
    """Nothing parallel at all."""

    def __init__(self, embedding, group):
        super().__init__(*embedding.weight.shape, embedding.padding_idx, _weight=embedding.weight,
                         dtype=embedding.weight.dtype)


class WholeKept(Embedding):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.embedding = embedding


class CopyKept(Embedding):
    """A copy of the whole weight, in a dictionary."""

    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.found = {"whole": embedding.weight.detach().clone()}


class InAClosure(Embedding):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        whole = embedding.weight.detach()
        self.restore = lambda: whole


class Frozen(Embedding):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.weight.requires_grad_(False)


class View(Embedding):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        first = self.first
        self.weight = nn.Parameter(embedding.weight.detach()[first:first + len(self.weight)])


class RowsGathered(Embedding):
    """All rows are gathered in every forward."""

    def forward(self, tokens):
        parts = [torch.empty_like(self.weight) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, self.weight.detach(), group=self.group)
        parts[dist.get_rank(self.group)] = self.weight
        return F.embedding(tokens, torch.cat(parts))


class ResultsGathered(Embedding):
    """The zeros of all ranks travel, and are summed afterwards."""

    def forward(self, tokens):
        found = own_rows(self, tokens)
        parts = [torch.empty_like(found) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, found.detach(), group=self.group)
        parts[dist.get_rank(self.group)] = found
        return sum(parts)


class NotSummed(Embedding):
    def forward(self, tokens):
        return own_rows(self, tokens)


class MaskForgotten(Embedding):
    def forward(self, tokens):
        local = (tokens - self.first).clamp(0, len(self.weight) - 1)
        return summed(F.embedding(local, self.weight, self.padding_idx), self.group)


class RemainderLookedUp(Embedding):
    def forward(self, tokens):
        return summed(F.embedding(tokens % len(self.weight), self.weight), self.group)


class NotLookedUp(Embedding):
    """Tokens of other ranks are looked up as they are."""

    def forward(self, tokens):
        return summed(F.embedding(tokens - self.first, self.weight), self.group)


class PaddingOfTheWhole(Embedding):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.padding_idx = embedding.padding_idx


class PaddingFromTheEnd(Embedding):
    """A negative padding_idx counts from the end: another row is frozen on another rank."""

    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        if embedding.padding_idx is not None:
            local = embedding.padding_idx - self.first
            self.padding_idx = local if -len(self.weight) <= local < len(self.weight) else None


class PaddingForgotten(Embedding):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.padding_idx = None


class PaddingZeroForgotten(Embedding):
    """0 is a row, and false."""

    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        self.padding_idx = self.padding_idx or None


class PaddingZeroEverywhere(Embedding):
    """Tokens of other ranks are the padding row's, so that they get no gradient: row 0 neither."""

    def forward(self, tokens):
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= len(self.weight))
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight, 0)
        return summed(found.masked_fill(elsewhere[..., None], 0), self.group)


class SummedInBackwardToo(Embedding):
    def forward(self, tokens):
        return funcol.all_reduce(own_rows(self, tokens), "sum", self.group)


class SummedTwice(Embedding):
    def forward(self, tokens):
        return summed(super().forward(tokens), self.group)


class ScaleOnOneRank(Embedding):
    """The embedding's result is scaled, on the rank that has row 0 only."""

    def forward(self, tokens):
        return super().forward(tokens) * (0.5 if self.first == 0 else 1)


class GroupForgotten(Embedding):
    def __init__(self, embedding, group):
        super().__init__(embedding, dist.group.WORLD)


class RankOfTheWorld(Embedding):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        rows, self.first = len(self.weight), len(self.weight) * dist.get_rank()
        mine = embedding.weight.detach()[self.first:self.first + rows]
        self.weight = nn.Parameter(mine.clone())


class InTurn(Embedding):
    """Row i is on rank i % t."""

    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        ranks, rank = size_and_rank(group)
        self.weight = nn.Parameter(embedding.weight.detach()[rank::ranks].clone())


class MaskInFloat32(Embedding):
    def forward(self, tokens):
        local = tokens - self.first
        mine = ((local >= 0) & (local < len(self.weight))).float()
        found = F.embedding((local * mine).long(), self.weight, self.padding_idx)
        return summed(found * mine[..., None], self.group)


class SummedInFloat64(Embedding):
    """Twice the bytes, for nothing: all ranks but one add zeros."""

    def forward(self, tokens):
        return summed(own_rows(self, tokens).double(), self.group).to(self.weight.dtype)


class NoParameter(Embedding):
    def __init__(self, embedding, group):
        super().__init__(embedding, group)
        weight = self.weight.detach()
        del self.weight
        self.weight = weight


class RowsDropped(Embedding):
    """The rows that the ranks do not divide are on none."""

    def __init__(self, embedding, group):
        ranks, _ = size_and_rank(group)
        rows = len(embedding.weight) // ranks * ranks
        padding = embedding.padding_idx
        weight = embedding.weight.detach()[:rows]
        super().__init__(SimpleNamespace(num_embeddings=rows, weight=weight, padding_idx=padding),
                         group)


class RefusedWithoutNumber(Embedding):
    def __init__(self, embedding, group):
        if len(embedding.weight) % dist.get_world_size(group):
            raise ValueError("not divisible")
        super().__init__(embedding, group)


class TokensChanged(Embedding):
    def forward(self, tokens):
        tokens -= self.first
        elsewhere = (tokens < 0) | (tokens >= len(self.weight))
        tokens[elsewhere] = 0
        found = F.embedding(tokens, self.weight, self.padding_idx)
        return summed(found.masked_fill(elsewhere[..., None], 0), self.group)


WRONG_EMBEDDINGS = [
    (Whole, "not_sharded embedding"),
    (WholeKept, "memory_kept 600"),
    (CopyKept, "memory_kept 600"),
    (InAClosure, "memory_kept embedding's"),
    (Frozen, "requires_grad_changed"),
    (View, "memory_kept"),
    (RowsGathered, "wrong_traffic 120"),
    (ResultsGathered, "wrong_traffic 720"),
    (NotSummed, "not_summed results"),
    (MaskForgotten, "not_masked looked"),
    (RemainderLookedUp, "not_masked looked"),
    (PaddingOfTheWhole, "padding_row_misplaced"),
    (PaddingFromTheEnd, "padding_row_misplaced"),
    (PaddingForgotten, "padding_row_trained"),
    (PaddingZeroForgotten, "padding_row_trained"),
    (PaddingZeroEverywhere, "wrong_gradient"),
    (SummedInBackwardToo, "summed_too_often"),
    (SummedTwice, "summed_too_often"),
    (ScaleOnOneRank, "wrong_scale 0.5"),
    (RankOfTheWorld, "wrong_part"),
    (InTurn, "wrong_part numbers"),
    (MaskInFloat32, "wrong_dtype"),
    (SummedInFloat64, "wrong_traffic_dtype"),
    (NoParameter, "wrong_type"),
    (RowsDropped, "no_error"),
    (RefusedWithoutNumber, "sizes_not_named"),
    (TokensChanged, "changes_input"),
]


# right ones written differently


class ByPadding(nn.Module):
    """One row of zeros more, for the tokens of others; index_select in place of F.embedding."""

    def __init__(self, embedding, group):
        super().__init__()
        ranks, rank = size_and_rank(group)
        if len(embedding.weight) % ranks:
            raise ValueError(f"{ranks} ranks do not divide {len(embedding.weight)}: choose others")
        self.weight = nn.Parameter(embedding.weight.detach().chunk(ranks)[rank].clone())
        self.group, self.ranks, self.rank = group, ranks, rank
        self.padding = embedding.padding_idx

    def forward(self, tokens):
        rows = len(self.weight)
        mine = tokens // rows == self.rank
        found = self.weight.index_select(0, torch.where(mine, tokens % rows, 0).flatten())
        keep = mine if self.padding is None else mine & (tokens != self.padding)
        found = found.view(*tokens.shape, -1)
        zeros = torch.zeros_like(found)
        frozen = torch.where((mine & ~keep)[..., None], found.detach(), zeros)
        return summed(torch.where(keep[..., None], found, frozen), self.group)


class Padded(Embedding):
    """Rows of zeros after the last, so that every vocabulary is divisible."""

    def __init__(self, embedding, group):
        more = -len(embedding.weight) % dist.get_world_size(group)
        weight = F.pad(embedding.weight.detach(), (0, 0, 0, more))
        super().__init__(SimpleNamespace(num_embeddings=len(weight), weight=weight,
                                         padding_idx=embedding.padding_idx), group)


class InPlace(Embedding):
    """Zeros by an assignment, the sum in place of a clone."""

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, group):
            ctx.mark_dirty(tensor)
            dist.all_reduce(tensor, group=group)
            return tensor

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    def forward(self, tokens):
        local = tokens - self.first
        mine = local.ge(0) & local.lt(len(self.weight))
        found = F.embedding(torch.where(mine, local, 0), self.weight, self.padding_idx).clone()
        found[~mine] = 0
        return self.Sum.apply(found, self.group)


RIGHT_EMBEDDINGS = [Embedding, ByPadding, Padded, InPlace]


def test_embeddings():
    """Wrong ones are rejected, right ones accepted, in one launch."""
    judge_all(lab.check_vocabulary_embedding, WRONG_EMBEDDINGS, RIGHT_EMBEDDINGS, ranks=4)


@pytest.mark.parametrize("answer, words", [
    (NotLookedUp, "raised_IndexError here"), (GroupForgotten, "wrong_part")],
    ids=["not looked up", "group forgotten"])
def test_an_embedding_that_ends_its_launch_is_rejected(answer, words):
    assert_rejected(lab.check_vocabulary_embedding(answer), words)
