"""Attention of some queries to some keys, forward and backward: what ring attention computes in one
round.

Shapes: q (batch, heads, queries, d); k, v (batch, key and value heads, keys, d), where query heads
share key and value heads in equal groups, as in Llama; visible (queries, keys), True where a query
sees a key. Source of the two passes: Dao, "FlashAttention-2" (arXiv 2307.08691), section 3.1; of
passing blocks around: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers" (arXiv
2310.01889).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_recorded: list[list[int]] = []  # of each open `recorded_pairs`


def block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                    visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse): the attention of these queries to these keys alone, and the logarithm of
    the sum of its exponentials, (batch, heads, queries). The scores are divided by √d here.

    A query that sees none of the keys gets 0 in `out` and -inf in `lse`.
    """
    for pairs in _recorded:
        pairs.append(int(visible.sum()))
    scores = _scores(q, k, visible)
    lse = scores.logsumexp(-1)
    out = _probabilities(scores, lse) @ v.unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2)


def block_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor,
                   out: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor
                   ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dq, dk, dv): what this block contributes to the gradients of q, k and v.

    out, lse: of the attention of these queries to *all* keys, merged; grad: the gradient of out.
    The sum of dq over all blocks of keys is the gradient of q; the sum of dk and dv over all
    blocks of queries is that of k and v.
    """
    queries, grads = _grouped(q, k), _grouped(grad, k)
    p = _probabilities(_scores(q, k, visible), _grouped(lse, k))
    dv = (p.mT @ grads).sum(2)
    # the softmax's backward needs the sum of grad · out over d, of all keys, so no other block
    delta = _grouped((grad * out).sum(-1, keepdim=True), k)
    ds = (grads @ v.unsqueeze(2).mT).sub_(delta).mul_(p).div_(math.sqrt(q.shape[-1]))
    dq = (ds @ k.unsqueeze(2)).flatten(1, 2)
    return dq, (ds.mT @ queries).sum(2), dv


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                   positions: torch.Tensor) -> torch.Tensor:
    """Returns causal attention over the whole sequence by torch's own function; positions (keys):
    where in the sequence each token stands. Autograd differentiates it."""
    visible = positions[:, None] >= positions
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)


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


def _grouped(per_query_head, k):
    """(batch, heads, ...) as (batch, key and value heads, heads that share one, ...)."""
    return per_query_head.unflatten(1, (k.shape[1], -1))


def _scores(q, k, visible):
    scores = _grouped(q, k) @ k.unsqueeze(2).mT
    return scores.div_(math.sqrt(q.shape[-1])).masked_fill_(~visible, -math.inf)


def _probabilities(scores, lse):
    """exp(scores - lse), in the memory of the scores; 0 where a query sees no key at all: there
    both are -inf, whose difference is no number."""
    return scores.sub_(lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp_()
