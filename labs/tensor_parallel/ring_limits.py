"""What ring attention may send and hold: the invariants of exercise 7.11 beside its numbers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from labs.checks.invariants import judge_recorded
from labs.checks.verdicts import Wrong
from labs.meters import memory
from labs.meters.traffic import CollectiveCall, Traffic
from labs.tensor_parallel.message_order import Message, MessageOrder, require_no_deadlock
from labs.tensor_parallel.ring_cases import (
    BYTES,
    Shape,
    WholeSequence,
    contiguous_places,
    record_attention,
)

# A matrix of scores has twice the bytes of K and V: who keeps one for each block is seen, too.
MEASURED = Shape(1, 4, 4, 64, 16)
_GROWTH = 1.5  # pairs of K and V, from 2 to 4 ranks: one that arrives while another one is used
_MESSAGES = ("send", "recv", "all_to_all")


@dataclass(frozen=True)
class Messages:
    """What a rank called in forward and in backward (None where that is not filled in). of_all: by
    rank, its sends and receives in order. forgotten: never waited for."""

    forward: list[CollectiveCall]
    backward: list[CollectiveCall] | None
    of_all: list[list[Message]]
    forgotten: list[CollectiveCall]


def recorded_messages(ring_attention: Callable, sequence: WholeSequence,
                      with_backward: bool) -> Messages:
    """On a rank of all: what it calls."""
    leaves = sequence.inputs()
    # Traffic has the bytes and what was never waited for; MessageOrder has peers and batches.
    with MessageOrder() as order, Traffic() as traffic, traffic.marked_waits():
        out = ring_attention(*leaves, sequence.positions, sequence.group)
        forward = len(traffic.calls)
        if with_backward:
            out.backward(sequence.piece(sequence.weights))
        forgotten = traffic.never_waited_for()
    return Messages(traffic.calls[:forward], traffic.calls[forward:] if with_backward else None,
                    order.of_all(), forgotten)


def judge_messages(messages: Messages, shape: Shape, ranks: int) -> None:
    """Raises Wrong where this rank sends more than N-1 times K and V in forward, or N times K, V
    and their gradients in backward, or in a way that cannot end on NCCL."""
    rank, pair = f"rank {dist.get_rank()} of {ranks}", _pair_bytes(shape)
    places = 8 * ranks * shape.tokens  # bytes of all positions
    for phase, calls in (("forward", messages.forward), ("backward", messages.backward or [])):
        # Whatever gathers, broadcasts or reduces K and V puts the keys of all tokens on each rank.
        # That is right, and in use; but the invariant of a ring is one piece at a time.
        for call in calls:
            if call.kind not in _MESSAGES and call.bytes > places:
                raise Wrong(f"{rank} calls {call.kind} of {call.bytes:,} bytes in {phase}, where "
                            f"its K and V have {pair:,}",
                            "To gather K and V, as Llama 3 does, is right, too, and comes in the "
                            "next section. This exercise is the ring: K and V are never all on one "
                            "rank, each piece is passed on to the next one.",
                            code="wrong_collective")
    require_no_deadlock(messages.of_all)
    if messages.forgotten:
        call = messages.forgotten[0]
        raise Wrong(f"{rank} does not wait for its {call.kind} of {call.bytes:,} bytes",
                    "batch_isend_irecv returns before they are done: wait() for each.",
                    code="never_waited")
    # The invariant: N blocks need N-1 passes in forward. In backward dK and dV need an N-th pass,
    # to get back to the rank that has the keys.
    _judge_passes(rank, "forward", messages.forward, ranks - 1, pair, places)
    if messages.backward is not None:
        _judge_passes(rank, "backward", messages.backward, ranks, 2 * pair, places)


def _judge_passes(rank, phase, calls, passes, size, places):
    what = "K and V" if phase == "forward" else "K, V, dK and dV"
    sent = sum(call.bytes for call in calls if call.kind in ("send", "all_to_all"))
    # One round too many sends K and V for nothing; K repeated for each query head is larger.
    if sent > passes * size + 2 * places:
        raise Wrong(f"{rank} sends {sent:,} bytes in {phase}, {sent / size:.3g} times its {what}; "
                    f"{passes} passes are enough, {passes * size:,} bytes and the positions",
                    "The last block needs no pass after it in forward. Send key and value heads "
                    "once, not once for each query head that uses them.", code="wrong_traffic")


def judge_growth(ring_attention: Callable, whole: dist.ProcessGroup,
                 half: dist.ProcessGroup) -> None:
    """Raises Wrong where a rank of 4 holds more than a rank of 2 with a piece of the same size."""
    def sequence(group):
        return WholeSequence(MEASURED, group, contiguous_places(MEASURED.tokens, group.size()))

    # Both groups of 2 run at once, so that all ranks take part, each in its own group.
    few = record_attention(ring_attention, sequence(half))
    judge_recorded(lambda: record_attention(ring_attention, sequence(whole)), _judge_growth, few)


def _judge_growth(many: memory.Report, few: memory.Report):
    pair = _pair_bytes(MEASURED)
    tokens = MEASURED.tokens
    for phase in ("forward", "backward"):
        before, now = few.peaks[phase].total, many.peaks[phase].total
        # The invariant: with pieces of one size, a rank's peak does not depend on N. Who keeps all
        # K and V, or the scores of its queries to all keys, holds more with each further rank.
        if now > before + _GROWTH * pair:
            raise Wrong(f"rank {dist.get_rank()} holds {now:,} bytes at the peak of {phase} on 4 "
                        f"ranks and {before:,} on 2, with {tokens} tokens on each: it grows by "
                        f"{(now - before) / pair:.1f} pieces of K and V",
                        "Keep one block of K and V, that which is used, and no scores of a block "
                        f"that is done: a score matrix is {tokens} × {tokens} here, whatever N.",
                        code="memory_grows")


def _pair_bytes(shape) -> int:
    """Bytes of one rank's K and V."""
    return 2 * shape.batch * shape.kv_heads * shape.tokens * shape.d * BYTES


