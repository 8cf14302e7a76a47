"""Attention of some queries to some keys, forward and backward: what ring attention computes in one
round; and how many pairs of query and key that is on each rank.

Shapes: q (batch, heads, queries, d); k, v (batch, key and value heads, keys, d), where query heads
share key and value heads in equal groups, as in Llama; visible (queries, keys), True where a query
sees a key. Source of the two passes: Dao, "FlashAttention-2" (arXiv 2307.08691), section 3.1; of
passing blocks around: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (arXiv
2310.01889).

A causal kernel computes the pairs in which the key is not after the query, so they are what a round
costs; the round is over when the rank with most of them is done. In round k a rank has the keys of
the rank k places before it. Source of the balanced assignment: Brandon et al., "Striped Attention"
(arXiv 2311.09431), and the head-tail pairing of Llama 3's context parallelism (arXiv 2407.21783,
section 3.3.2).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

TILE = 64  # queries, and keys, of a tile
_recorded: list[list[int]] = []  # of each open `recorded_pairs`
_tile: int | None = None  # inside `in_tiles`


@dataclass(frozen=True)
class CausalMask:
    """Which query sees which key, by their positions: made where it is indexed, so that a kernel
    never has more of it than of its scores. Stands for `visible`, (queries, keys)."""

    positions: torch.Tensor
    places: torch.Tensor  # positions of the keys

    def __getitem__(self, index: tuple[slice, slice]) -> torch.Tensor:
        queries, keys = index
        return self.positions[queries, None] >= self.places[keys]

    def pairs(self) -> int:
        """How many pairs of query and key are visible."""
        return visible_pairs(self.positions, self.places)


Visible = torch.Tensor | CausalMask


def block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    visible: Visible) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse): the attention of these queries to these keys alone, and the logarithm of
    the sum of its exponentials, (batch, heads, queries). The scores are divided by √d here.

    A query that sees none of the keys gets 0 in `out` and -inf in `lse`.
    """
    for pairs in _recorded:
        pairs.append(visible.pairs() if isinstance(visible, CausalMask) else int(visible.sum()))
    if _tile is None:
        return _attend(q, k, v, visible[:, :])
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)  # attention to no key
    # Slices are views: the merge writes into the tile's rows of out and lse.
    for queries, keys, seen in _tiles(q, k, visible):
        part = _attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], seen)
        _merge_into(out[:, :, queries], lse[:, :, queries], *part)
    return out, lse


def block_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible,
                   out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor
                   ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dq, dk, dv): what this block contributes to the gradients of q, k and v, each of the
    shape of its tensor.

    out, lse: of the attention of these queries to *all* keys, merged; grad: the gradient of out.
    The sum of dq over all blocks of keys is the gradient of q; the sum of dk and dv over all
    blocks of queries is that of k and v.
    """
    if _tile is None:
        return _differentiate(q, k, v, visible[:, :], out, lse, grad)
    dq, dk, dv = (torch.zeros_like(each) for each in (q, k, v))
    for queries, keys, seen in _tiles(q, k, visible):
        parts = _differentiate(q[:, :, queries], k[:, :, keys], v[:, :, keys], seen,
                               *(each[:, :, queries] for each in (out, lse, grad)))
        for total, part in zip((dq[:, :, queries], dk[:, :, keys], dv[:, :, keys]), parts,
                               strict=True):
            total += part
    return dq, dk, dv


@contextmanager
def in_tiles(size: int = TILE) -> Iterator[None]:
    """While open, `block_attention` and `block_backward` compute tiles of `size` queries and keys
    one after the other, as a fused kernel does: the result is the same, and no more scores than
    those of a tile are in memory. Tiles in which no query sees a key are skipped."""
    global _tile
    before, _tile = _tile, size
    try:
        yield
    finally:
        _tile = before


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                   positions: torch.Tensor) -> torch.Tensor:
    """Returns causal attention over the full sequence by torch's own function; positions (keys):
    where in the sequence each token stands. Autograd differentiates it."""
    visible = positions[:, None] >= positions  # (keys, keys)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor,
                     places: torch.Tensor) -> torch.Tensor:
    """Returns the attention of queries at `positions` to keys at `places`, which may be in any
    order. Autograd differentiates it; it keeps out and lse for backward, and no scores."""
    return _CausalAttention.apply(q, k, v, positions, places)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, positions, places):
        out, lse = block_attention(q, k, v, CausalMask(positions, places))
        ctx.save_for_backward(q, k, v, positions, places, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        # The mask is made again from positions: saved, it would have as many elements as the
        # scores of one head.
        q, k, v, positions, places, out, lse = ctx.saved_tensors
        return *block_backward(q, k, v, CausalMask(positions, places), out, lse, grad), None, None


@contextmanager
def recorded_pairs() -> Iterator[list[int]]:
    """Yields a list to which each call of `block_attention` inside adds how many pairs of query and
    key are visible to it, in one head."""
    pairs = []
    _recorded.append(pairs)
    try:
        yield pairs
    finally:
        _recorded.remove(pairs)


def _tiles(q, k, visible) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """(queries, keys, the mask) of each tile with a visible pair."""
    for row in range(0, q.shape[2], _tile):
        for column in range(0, k.shape[2], _tile):
            queries, keys = slice(row, row + _tile), slice(column, column + _tile)
            seen = visible[queries, keys]
            if seen.any():
                yield queries, keys, seen


def _attend(q, k, v, visible):
    # (batch, kv heads, g·queries, keys), where g = heads / kv heads
    scores = _scores(_grouped(q, k), k, visible)
    lse = scores.logsumexp(-1)  # (batch, kv heads, g·queries)
    out = _probabilities(scores, lse) @ v  # in the scores' memory, which are not needed again
    return _per_head(out, q), _per_head(lse, q)


def _differentiate(q, k, v, visible, out, lse, grad):
    queries, grads = _grouped(q, k), _grouped(grad, k)  # (batch, kv heads, g·queries, d)
    # Of all keys, because lse is the merged one: the probabilities of one block do not add up to 1.
    # (batch, kv heads, g·queries, keys)
    p = _probabilities(_scores(queries, k, visible), _grouped(lse, k))
    # The product sums over g·queries, so over the query heads that share this key head, too.
    dv = p.mT @ grads
    # the softmax's backward needs the sum of grad · out over d, of all keys, so no other block
    delta = _grouped((grad * out).sum(-1, keepdim=True), k)
    ds = (grads @ v.mT).sub_(delta).mul_(p).div_(math.sqrt(q.shape[-1]))  # like p
    return _per_head(ds @ k, q), ds.mT @ queries, dv


def _merge_into(out, lse, out_part, lse_part) -> None:
    """Merges the attention to more keys into (out, lse), in place."""
    both = torch.logaddexp(lse, lse_part)
    finite = both.masked_fill(both == -math.inf, 0)  # where both are -inf: no NaN
    out.mul_((lse - finite).exp().unsqueeze(-1))
    out.add_(out_part.mul_((lse_part - finite).exp().unsqueeze(-1)))
    lse.copy_(both)


def _grouped(per_query_head, k):
    """(batch, heads, queries, ...) as (batch, key and value heads, queries of all the heads that
    share one, ...): so the product with k needs no copy of k for each query head."""
    return per_query_head.unflatten(1, (k.shape[1], -1)).flatten(2, 3)


def _per_head(grouped, q):
    """The inverse of `_grouped`: (batch, heads, queries, ...)."""
    return grouped.unflatten(2, (-1, q.shape[2])).flatten(1, 2)


def _scores(queries, k, visible):
    # (batch, kv heads, g·queries, keys); the view splits g from queries, so that one mask serves
    # all heads. In place: a second matrix of scores would double the peak.
    scores = queries @ k.mT
    per_head = scores.unflatten(2, (-1, visible.shape[0]))
    per_head.div_(math.sqrt(k.shape[-1])).masked_fill_(~visible, -math.inf)
    return scores


def _probabilities(scores, lse):
    """exp(scores - lse), in the memory of the scores; 0 where a query sees no key at all: there
    both are -inf, whose difference is no number."""
    return scores.sub_(lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp_()


Places = Sequence[torch.Tensor]  # by rank, the positions of its tokens


def visible_pairs(queries: torch.Tensor, keys: torch.Tensor) -> int:
    """Pairs in which the key is at the query's position or before it."""
    # For each query the number of sorted keys that are not larger: no matrix of pairs.
    return int(torch.searchsorted(keys.sort().values, queries.contiguous(), right=True).sum())


def pairs_by_round(places: Places) -> list[list[int]]:
    """Round -> rank -> pairs that it computes."""
    ranks = len(places)
    return [[visible_pairs(places[rank], places[(rank - passed) % ranks]) for rank in range(ranks)]
            for passed in range(ranks)]


def makespan(rounds: Sequence[Sequence[int]]) -> int:
    """Pairs on the critical path: of each round those of the rank that has most, because all wait
    for it before K and V are sent on."""
    return sum(max(by_rank) for by_rank in rounds)


def least_makespan(rounds: Sequence[Sequence[int]]) -> float:
    """Pairs of each rank where all have the same number in every round."""
    # There are as many rounds as ranks, so this is the mean over ranks.
    return sum(map(sum, rounds)) / len(rounds)
