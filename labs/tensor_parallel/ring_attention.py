"""Exercise 7.11: attention over a sequence that no rank ever has in full; and what a wrong one most
likely computed: common mistakes, each with the numbers that it leads to on this rank."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from labs.checks.guesses import guessed
from labs.checks.inputs import UnchangedInputs, require_dtype
from labs.checks.on_ranks import on_ranks, raise_on_all_ranks
from labs.checks.tolerances import ATTENTION
from labs.checks.verdicts import Verdict, Wrong, check, kind_of, shows
from labs.pictures import marks, palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.tensor_parallel import ring_runs
from labs.tensor_parallel.attention_blocks import block_attention, block_backward
from labs.tensor_parallel.context_parallel import RING, predicted_peak
from labs.tensor_parallel.message_order import PEERS
from labs.tensor_parallel.ring_cases import (
    Shape,
    WholeSequence,
    contiguous_places,
    groups_on,
    shuffled_places,
)
from labs.tensor_parallel.ring_limits import judge_growth, judge_messages, recorded_messages
from labs.workers import devices

# The first one is the plainest. Sizes that nothing divides, grouped-query heads, tokens in any
# order, and scores far beyond what exp can take.
CASES = [("tokens in order", Shape(), contiguous_places),
         ("7 tokens a rank, in no order", Shape(2, 3, 3, 7, 5), shuffled_places),
         ("6 query heads, 2 key and value heads", Shape(2, 6, 2, 5, 3), shuffled_places),
         ("scores up to 300", Shape(1, 2, 1, 9, 8, scale=6.0), contiguous_places)]
COUNTED = Shape(1, 4, 2, 32, 16)
HINTS = {"contiguous": "A send takes contiguous memory only, and V comes transposed out of a "
                       "linear layer: v.contiguous() before it is sent.",
         "not part of group": PEERS, "Pair is not connected": PEERS}
_UNFILLED = "Exercise 7.11"


@check("7.11", hints=HINTS)
def check_ring_attention(ring_attention: Callable):
    """ring_attention(q, k, v, positions, group): causal attention of this rank's queries to the
    keys of all ranks of the group, which come round the ring; with its gradients."""
    differentiates = True
    for ranks in (2, 3, 4):
        with devices.send_recv_device(ranks):
            differentiates &= all(on_ranks(_judge, ring_attention, world_sizes=(ranks,)))
    if not differentiates:
        return Verdict("7.11", None, "forward equals full attention on 2, 3 and 4 ranks; "
                                     "`ring_backward` is waiting for your code")
    return ("out, dq, dk and dv equal full attention's on 2, 3 and 4 ranks and on groups below "
            "them; N-1 passes forward, N backward; a rank's peak is the same on 2 ranks and on 4")


def _judge(ring_attention) -> bool:
    """On a rank: whether backward is filled in. Raises Wrong."""
    ranks, filled = dist.get_world_size(), True
    groups = groups_on(ranks)
    for group in groups:
        for name, shape, place in CASES:
            sequence = group and WholeSequence(shape, group, place(shape.tokens, group.size()))
            # No gradients of large scores: with them fp32 full attention is itself 100 times less
            # exact, 4e-5 instead of 4e-7 beside float64.
            filled &= _judge_case(ring_attention, sequence, _where(group, name), shape.scale == 1)
    calls = recorded_messages(ring_attention, WholeSequence(
        COUNTED, groups[0], contiguous_places(COUNTED.tokens, ranks)), filled)
    raise_on_all_ranks(judge_messages, calls, COUNTED, ranks)
    if ranks == 4 and filled:
        judge_growth(ring_attention, *groups)
    return filled


def _where(group, name) -> str:
    if group is None or group.size() == dist.get_world_size():
        return f"{name}, {dist.get_world_size()} ranks"
    return f"{name}, the group of ranks {dist.get_process_group_ranks(group)}"


def _judge_case(ring_attention, sequence, where, with_gradients) -> bool:
    """sequence: None on a rank that is not in the group and only hears the verdict."""
    if sequence is None:
        # A collective of all ranks: called here as often as by the ranks of the group.
        raise_on_all_ranks(lambda: None)
        if with_gradients:
            raise_on_all_ranks(lambda: None)
        return True
    leaves = sequence.inputs()
    kept = UnchangedInputs("ring_attention", **dict(zip("qkv", leaves, strict=True)),
                           positions=sequence.positions)
    # (batch, heads, tokens of a rank, d)
    out = ring_attention(*leaves, sequence.positions, sequence.group)
    want, gradients = sequence.expected()
    raise_on_all_ranks(_judge_out, out, want, sequence, where, kept)
    if not with_gradients:
        return True
    filled = run_backward(out, sequence.piece(sequence.weights))
    raise_on_all_ranks(_judge_gradients, filled, leaves, gradients, sequence, where)
    return filled


def run_backward(out: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether backward is filled in; it has run then, and gradients are where they belong."""
    if not out.requires_grad:
        raise Wrong("out has no gradient function: autograd cannot go back through it",
                    "ring_attention calls RingAttention.apply, which autograd records.",
                    code="no_gradient_function")
    try:
        out.backward(weights)
    except NotImplementedError as error:
        if str(error) == _UNFILLED:
            return False
        raise
    return True


def _judge_out(out, want, sequence, where, kept):
    rank, piece = f"{where}: rank {dist.get_rank()}", sequence.piece(want)
    if not isinstance(out, torch.Tensor) or out.shape != piece.shape:
        raise Wrong(f"{rank}: ring_attention returned {kind_of(out)}, not a tensor of shape "
                    f"{list(piece.shape)}", "One row for each of this rank's queries.",
                    code="wrong_type")
    require_dtype(out, piece, f"{rank}: out")
    kept.judge()
    # The invariant: each query attends to every key at its own or an earlier position, on whatever
    # rank the key lives, and to each of them once.
    if _close(out.detach(), piece):
        return
    if not out.isfinite().all():
        raise Wrong(f"{rank}: out has numbers that are not finite",
                    "Large scores, or a block in which a query sees nothing: merge as in exercise "
                    "7.10, and begin with lse = -inf.", code="not_finite")
    _raise_cause(f"{rank}: out is not full attention", out.detach(), forward_causes(sequence))


def _judge_gradients(filled, leaves, want, sequence, where):
    if not filled:
        return
    rank = f"{where}: rank {dist.get_rank()}"
    for name, leaf, whole in zip("qkv", leaves, want, strict=True):
        if leaf.grad is None:
            raise Wrong(f"{rank}: d{name} is missing",
                        "backward returns dq, dk and dv, and None for positions and group.",
                        code="gradient_missing")
        # The invariant: the gradient of a key is what the queries of all ranks contribute to it,
        # and it lies on the rank that has the key.
        if not _close(leaf.grad, sequence.piece(whole)):
            _raise_cause(f"{rank}: d{name} is not full attention's gradient", leaf.grad,
                         backward_causes(sequence, name, want))


def _raise_cause(sentence, got, causes):
    # The first that fits: causes are lazy, and each costs an attention.
    for code, what, value, hint in causes:
        if value.shape == got.shape and _close(got, value):
            raise Wrong(f"{sentence}; it is {what}", hint, code=code)
    raise Wrong(sentence, "Print, on each rank and in each pass, whose keys it has: "
                          "positions are sent with them.",
                code="differs_from_full_attention")


def _close(got, want) -> bool:
    most = want.abs().max().clamp_min(1.0).item()
    return torch.allclose(got, want, rtol=0, atol=ATTENTION * most)


# A verdict's code, what it is, its value on this rank, a hint.
Found = tuple[str, str, torch.Tensor, str]
_ALL_ROUNDS = "On N ranks: its own block, and one more after each of N-1 passes."
_BY_POSITION = ("A query sees the keys whose position is not after its own, positions[:, None] >= "
                "those that came with the keys; rows and columns of a block say nothing of that.")


def forward_causes(sequence: WholeSequence) -> Iterator[Found]:
    """What `out` may be instead of full attention."""
    ranks, rank = len(sequence.places), sequence.rank
    # Whose keys are here in each round: pieces go to the next rank, so they come from before.
    order = [(rank - passed) % ranks for passed in range(ranks)]
    parts = [_part(sequence, source) for source in order]  # (out, lse) by round
    yield ("own_piece_alone", "the attention to its own block of keys alone", parts[0][0],
           _ALL_ROUNDS)
    if ranks > 2:
        yield from _missing_blocks(order, parts)
    yield ("counted_twice", "the attention with its own block counted twice",
           _merged([*parts, parts[0]]), _ALL_ROUNDS)
    outs = torch.stack([out for out, _ in parts])  # (ranks, batch, heads, tokens, d)
    yield ("mean_of_parts", "the mean of the blocks' outputs", outs.mean(0),
           "A block with larger scores counts more: merge by lse.")
    yield "sum_of_parts", "the sum of the blocks' outputs", outs.sum(0), "Merge by lse."
    nothing = torch.zeros_like(outs[0]), torch.zeros_like(parts[0][1])
    yield ("starts_with_a_key", "the attention as if there were one more key, with the score and "
           "the value 0", _merged([*parts, nothing]),
           "Begin with lse = -inf, the attention to no key.")
    yield from _other_masks(sequence, order)
    own = [_part(sequence, source, values=rank) for source in order]
    yield ("values_stay", "the attention with its own values for the keys of every rank",
           _merged(own),
           "V is sent with K, in the same batch.")
    twice = [_part(sequence, source, scale=1 / math.sqrt(sequence.shape.d)) for source in order]
    yield ("scaled_twice", "the attention with the scores divided by √d twice", _merged(twice),
           "block_attention has divided them by √d.")


def backward_causes(sequence: WholeSequence, name: str,
                    gradients: list[torch.Tensor]) -> Iterator[Found]:
    """What the gradient of q, k or v (name) may be; gradients: the right ones of q, k and v, of the
    full sequence."""
    whole = gradients["qkv".index(name)]
    ranks, rank = len(sequence.places), sequence.rank
    merged = _merged_pair([_part(sequence, source) for source in range(ranks)])
    yield ("own_piece_alone", "what its own queries contribute to its own keys alone",
           _contribution(sequence, rank, rank, merged, name),
           "In backward K and V go round again, and dK and dV with them: each rank adds what its "
           "queries contribute.")
    for other in range(ranks):
        if name != "q" and other != rank:
            yield ("not_home", f"that of rank {other}'s {'keys' if name == 'k' else 'values'}: it "
                   "has not come home", sequence.piece(whole, other),
                   "dK and dV go round with the K and V that they belong to, and are home after N "
                   "passes; the last round is followed by one more pass.")
    blocks = [(rank, other) if name == "q" else (other, rank) for other in range(ranks)]
    yield ("lse_of_each_block", "computed with each block's own lse and out",
           sum(_contribution(sequence, *block, _part(sequence, block[1], rank=block[0]), name)
               for block in blocks),
           "Pass the merged out and lse of forward: probabilities are those of all keys.")
    for other, gradient in zip("qkv", gradients, strict=True):
        if other != name:
            yield ("swapped", f"that of {other}", sequence.piece(gradient),
                   "backward returns dq, dk and dv, in the order of the inputs.")
    yield ("mean_not_sum", f"1/{ranks} of it", sequence.piece(whole) / ranks,
           "A sum over ranks, not a mean.")
    yield "zero_gradient", "zero", torch.zeros_like(sequence.piece(whole)), ""
    root = math.sqrt(sequence.shape.d)
    yield "wrong_scale", "√d times it", sequence.piece(whole) * root, ""
    yield ("scaled_twice", "1/√d of it", sequence.piece(whole) / root,
           "block_backward has divided by √d.")


def _missing_blocks(order, parts) -> Iterator[Found]:
    for missing, source in enumerate(order):
        rest = [part for number, part in enumerate(parts) if number != missing]
        yield ("piece_missing", f"the attention to all keys but those of rank {source} of the "
               "group", _merged(rest), _ALL_ROUNDS)


def _other_masks(sequence, order) -> Iterator[Found]:
    ranks, rank, tokens = len(sequence.places), sequence.rank, sequence.shape.tokens
    everything = torch.ones(tokens, tokens, dtype=torch.bool, device=sequence.positions.device)
    yield ("not_causal", "the attention without a causal mask",
           _merged([_part(sequence, source, visible=everything) for source in order]),
           _BY_POSITION)
    yield ("masked_by_local_index", "the attention with each block masked by local index, as if "
           "all were on the diagonal",
           _merged([_part(sequence, source, visible=everything.tril()) for source in order]),
           _BY_POSITION)
    own = _visible(sequence, rank, rank) & ~torch.eye(tokens, dtype=torch.bool,
                                                      device=everything.device)
    yield ("own_key_masked", "the attention without each query's own key",
           _merged([_part(sequence, source, visible=own if source == rank else None)
                    for source in order]), _BY_POSITION)
    by_rank = [everything if source < rank else everything.tril() if source == rank
               else ~everything for source in range(ranks)]
    yield ("masked_by_rank", "the attention masked as if each rank had the tokens after those of "
           "the rank before",
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
    lses = torch.stack([lse for _, lse in parts])  # (parts, batch, heads, tokens)
    lse = lses.logsumexp(0)
    weights = (lses - lse.masked_fill(lse == -math.inf, 0)).exp()
    return (weights[..., None] * torch.stack([out for out, _ in parts])).sum(0), lse


_MEMORY_RANKS = (2, 4, 8)


@shows("7.11")
def show_ring_memory(ring_attention: Callable) -> Picture:
    """Draws the peak of the rank with most on 2, 4 and 8 ranks, of one sequence: with the scores of
    a block in memory, and with each block in tiles."""
    found = {ranks: ring_runs.peaks(ring_attention, ranks) for ranks in _MEMORY_RANKS}
    guess, rows = guessed("7.11"), []
    for tiled, name in enumerate(("scores of a block", "in tiles, no scores")):
        for ranks, measured in found.items():
            shape = replace(ring_runs.LONG, tokens=ring_runs.LONG.tokens // ranks)
            is_guessed = guess and not tiled and ranks == _MEMORY_RANKS[-1]
            rows.append(Bar(f"{name}, {ranks} ranks", measured[tiled] / 1e6,
                            predicted_peak(RING, shape, ranks, bool(tiled)) / 1e6,
                            found[_MEMORY_RANKS[0]][0] / guess / 1e6 if is_guessed else None,
                            palette.PHASES["communication"]))
    ratio, other = (found[2][one] / found[8][one] for one in (0, 1))
    size = ring_runs.LONG
    return bars(rows, "MB", "at the peak of a rank, beside its piece of Q, K and V",
                note=f"{size.tokens:,} tokens, {size.heads} heads of {size.d}",
                lesson=f"From 2 to 8 ranks the peak falls {ratio:.1f} times with scores in memory, "
                       f"{other:.1f} times in tiles",
                answer=marks.answered(guess, ratio, "times"))
