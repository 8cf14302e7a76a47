"""What a wrong ring attention most likely computed: common mistakes of exercise 7.11, each with the
numbers that it leads to on this rank."""

import math
from collections.abc import Iterator

import torch

from labs.tensor_parallel.ring.blocks import block_attention, block_backward
from labs.tensor_parallel.ring.cases import WholeSequence

Found = tuple[str, torch.Tensor, str]  # what it is, its value on this rank, a hint
_ALL_ROUNDS = "On N ranks: its own block, and one more after each of N-1 passes."
_BY_POSITION = ("A query sees the keys whose position is not after its own, positions[:, None] >= "
                "those that came with the keys; rows and columns of a block say nothing of that.")


def forward_causes(sequence: WholeSequence) -> Iterator[Found]:
    """What `out` may be instead of full attention."""
    ranks, rank = len(sequence.places), sequence.rank
    order = [(rank - passed) % ranks for passed in range(ranks)]
    parts = [_part(sequence, source) for source in order]
    yield "the attention to its own block of keys alone", parts[0][0], _ALL_ROUNDS
    if ranks > 2:
        yield from _missing_blocks(order, parts)
    yield ("the attention with its own block counted twice: it came round the whole ring",
           _merged([*parts, parts[0]]), "One round too many. " + _ALL_ROUNDS)
    outs = torch.stack([out for out, _ in parts])
    yield ("the mean of the blocks' outputs", outs.mean(0),
           "A block with larger scores counts more: merge by lse.")
    yield "the sum of the blocks' outputs", outs.sum(0), "Merge by lse."
    nothing = torch.zeros_like(outs[0]), torch.zeros_like(parts[0][1])
    yield ("the attention as if there were one more key, with the score and the value 0",
           _merged([*parts, nothing]), "Begin with lse = -inf, the attention to no key.")
    yield from _other_masks(sequence, order)
    own = [_part(sequence, source, values=rank) for source in order]
    yield ("the attention with its own values for the keys of every rank", _merged(own),
           "V travels with K, in the same batch.")
    twice = [_part(sequence, source, scale=1 / math.sqrt(sequence.shape.d)) for source in order]
    yield ("the attention with the scores divided by √d twice", _merged(twice),
           "block_attention has divided them by √d.")


def backward_causes(sequence: WholeSequence, name: str,
                    gradients: list[torch.Tensor]) -> Iterator[Found]:
    """What the gradient of q, k or v (name) may be; gradients: the right ones of q, k and v, of the
    whole sequence."""
    whole = gradients["qkv".index(name)]
    ranks, rank = len(sequence.places), sequence.rank
    merged = _merged_pair([_part(sequence, source) for source in range(ranks)])
    yield ("what its own queries contribute to its own keys alone",
           _contribution(sequence, rank, rank, merged, name),
           "In backward K and V go round again, and dK and dV with them: each rank adds what its "
           "queries contribute.")
    for other in range(ranks):
        if name != "q" and other != rank:
            yield (f"that of rank {other}'s {'keys' if name == 'k' else 'values'}: it has not come "
                   "home", sequence.piece(whole, other),
                   "dK and dV go round with the K and V that they belong to, and are home after N "
                   "passes; the last round is followed by one more pass.")
    blocks = [(rank, other) if name == "q" else (other, rank) for other in range(ranks)]
    yield ("computed with each block's own lse and out",
           sum(_contribution(sequence, *block, _part(sequence, block[1], rank=block[0]), name)
               for block in blocks),
           "Pass the merged out and lse of forward: probabilities are those of all keys.")
    for other, gradient in zip("qkv", gradients, strict=True):
        if other != name:
            yield (f"that of {other}", sequence.piece(gradient),
                   "backward returns dq, dk and dv, in the order of the inputs.")
    yield f"1/{ranks} of it", sequence.piece(whole) / ranks, "A sum over ranks, not a mean."
    yield "zero", torch.zeros_like(sequence.piece(whole)), ""
    yield "√d times it", sequence.piece(whole) * math.sqrt(sequence.shape.d), ""
    yield ("1/√d of it", sequence.piece(whole) / math.sqrt(sequence.shape.d),
           "block_backward has divided by √d.")


def _missing_blocks(order, parts) -> Iterator[Found]:
    for missing, source in enumerate(order):
        rest = [part for number, part in enumerate(parts) if number != missing]
        yield (f"the attention to all keys but those of rank {source} of the group",
               _merged(rest), _ALL_ROUNDS)


def _other_masks(sequence, order) -> Iterator[Found]:
    ranks, rank, tokens = len(sequence.places), sequence.rank, sequence.shape.tokens
    everything = torch.ones(tokens, tokens, dtype=torch.bool, device=sequence.positions.device)
    yield ("the attention without a causal mask",
           _merged([_part(sequence, source, visible=everything) for source in order]),
           _BY_POSITION)
    yield ("the attention with each block masked by local index, as if all were on the diagonal",
           _merged([_part(sequence, source, visible=everything.tril()) for source in order]),
           _BY_POSITION)
    own = _visible(sequence, rank, rank) & ~torch.eye(tokens, dtype=torch.bool,
                                                      device=everything.device)
    yield ("the attention without each query's own key",
           _merged([_part(sequence, source, visible=own if source == rank else None)
                    for source in order]), _BY_POSITION)
    by_rank = [everything if source < rank else everything.tril() if source == rank
               else ~everything for source in range(ranks)]
    yield ("the attention masked as if each rank had the tokens after those of the rank before",
           _merged([_part(sequence, source, visible=by_rank[source]) for source in order]),
           _BY_POSITION)


def _visible(sequence, rank, source):
    queries, keys = (sequence.places[one].to(sequence.positions.device) for one in (rank, source))
    return queries[:, None] >= keys


def _part(sequence, source, values=None, visible=None, scale=1.0, rank=None):
    """The attention of a rank's queries (None: this rank's) to the keys of `source`."""
    rank = sequence.rank if rank is None else rank
    q, k, v = sequence.whole
    visible = _visible(sequence, rank, source) if visible is None else visible
    return block_attention(sequence.piece(q, rank) * scale, sequence.piece(k, source),
                           sequence.piece(v, source if values is None else values), visible)


def _contribution(sequence, rank, source, merged, name):
    """What the queries of `rank` and the keys of `source` add to the gradient called `name`."""
    q, k, v = sequence.whole
    found = block_backward(sequence.piece(q, rank), sequence.piece(k, source),
                           sequence.piece(v, source), _visible(sequence, rank, source), *merged,
                           sequence.piece(sequence.weights, rank))
    return found["qkv".index(name)]


def _merged(parts):
    return _merged_pair(parts)[0]


def _merged_pair(parts):
    """(out, lse) of several parts; a query that sees nothing in any of them gets 0."""
    lses = torch.stack([lse for _, lse in parts])
    lse = lses.logsumexp(0)
    weights = (lses - lse.masked_fill(lse == -math.inf, 0)).exp()
    return (weights[..., None] * torch.stack([out for out, _ in parts])).sum(0), lse
