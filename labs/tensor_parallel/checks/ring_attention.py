"""Exercise 7.11: attention over a sequence that no rank ever holds whole."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from labs.exercises.inputs import UnchangedInputs, require_dtype
from labs.exercises.on_ranks import on_ranks, raise_on_all_ranks
from labs.exercises.verdicts import Verdict, Wrong, check, kind_of
from labs.start_here.recording import where_messages_pass
from labs.tensor_parallel.checks.message_order import PEERS
from labs.tensor_parallel.checks.ring_causes import backward_causes, forward_causes
from labs.tensor_parallel.checks.ring_limits import judge_growth, judge_messages, recorded_messages
from labs.tensor_parallel.ring.cases import (
    Shape,
    WholeSequence,
    contiguous_places,
    groups_on,
    shuffled_places,
)

# The first one is the plainest. Sizes that nothing divides, grouped-query heads, tokens in any
# order, and scores far beyond what exp can take.
CASES = [("tokens in order", Shape(), contiguous_places),
         ("7 tokens a rank, in no order", Shape(2, 3, 3, 7, 5), shuffled_places),
         ("6 query heads, 2 key and value heads", Shape(2, 6, 2, 5, 3), shuffled_places),
         ("scores up to 300", Shape(1, 2, 1, 9, 8, scale=6.0), contiguous_places)]
COUNTED = Shape(1, 4, 2, 32, 16)
HINTS = {"contiguous": "A send takes contiguous memory only, and V comes transposed out of a "
                       "linear layer: v.contiguous() before it travels.",
         "not part of group": PEERS, "Pair is not connected": PEERS}
_TOLERANCE = 3e-5
_UNFILLED = "Exercise 7.11"


@check("7.11", hints=HINTS)
def check_ring_attention(ring_attention: Callable):
    """ring_attention(q, k, v, positions, group): causal attention of this rank's queries to the
    keys of all ranks of the group, which come round the ring; with its gradients."""
    differentiates = True
    for ranks in (2, 3, 4):
        with where_messages_pass(ranks):
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
        raise_on_all_ranks(lambda: None)
        if with_gradients:
            raise_on_all_ranks(lambda: None)
        return True
    leaves = sequence.inputs()
    kept = UnchangedInputs("ring_attention", **dict(zip("qkv", leaves, strict=True)),
                           positions=sequence.positions)
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
    for what, value, hint in causes:
        if value.shape == got.shape and _close(got, value):
            raise Wrong(f"{sentence}; it is {what}", hint, code="differs_from_full_attention")
    raise Wrong(sentence, "Print, on each rank and in each pass, whose keys it has: "
                          "positions travel with them.",
                code="differs_from_full_attention")


def _close(got, want) -> bool:
    most = want.abs().max().clamp_min(1.0).item()
    return torch.allclose(got, want, rtol=0, atol=_TOLERANCE * most)

