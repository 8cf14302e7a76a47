"""Three ways of attention over a sequence whose tokens are divided among ranks: what a rank sends,
by formula and measured, and its peak.

GATHER: K and V of all ranks come before the attention (Llama 3, arXiv 2407.21783, section 3.3.2;
torch's default). RING: they come one piece at a time (Liu, Zaharia, Abbeel, arXiv 2310.01889).
ULYSSES: an all-to-all gives each rank all tokens of some heads, a second one gives them back
(Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch.distributed as dist

from labs.meters import memory
from labs.meters.traffic import CollectiveCall, Traffic
from labs.predictions.traffic import passes
from labs.start_here.recording import run, where_messages_pass
from labs.tensor_parallel.ring.blocks import TILE, in_tiles
from labs.tensor_parallel.ring.cases import Shape, WholeSequence, contiguous_places
from labs.tensor_parallel.ring.peaks import BYTES, record_attention

GATHER, RING, ULYSSES = "K and V gathered", "ring", "Ulysses"
WAYS = (GATHER, RING, ULYSSES)
COMPARED = Shape(1, 8, 2, 512, 64)  # tokens: of the whole sequence
_POSITION = 8  # bytes
_FACTOR = 4  # as long as usual for gloo's thread to drop what it holds


@dataclass(frozen=True)
class Measured:
    """Of all ranks the largest. sent: bytes in forward and backward, by kind of collective. Peaks,
    beside the rank's piece of q, k and v: with the scores of a block in memory, and in tiles. off:
    largest difference of out, dq, dk and dv from those of full attention."""

    sent: dict[str, float]
    peak: int
    peak_in_tiles: int
    off: float


def key_heads(shape: Shape, ranks: int) -> int | None:
    """Key heads that Ulysses sends, all copies counted: a head that several ranks need is sent to
    each. None where it cannot be: a rank must have equally many whole heads."""
    fits = shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0
    return max(shape.kv_heads, ranks) if shape.heads % ranks == 0 and fits else None


def predicted_sent(way: str, shape: Shape, ranks: int, nbytes: int = 4,
                   positions: bool = True) -> tuple[float, float]:
    """Bytes that a rank sends in forward and in backward. shape: of its piece; nbytes: of a number;
    positions: whether those of the tokens are sent too.

    With K the bytes of a rank's keys, gathering sends K and V N-1 times, and reduce-scatters their
    gradients; a ring passes K and V N-1 times, and with their gradients N times. Ulysses sends
    (N-1)/N of q, k, v and out, each way.
    """
    head = nbytes * shape.batch * shape.tokens * shape.d
    keys = head * shape.kv_heads
    places = _POSITION * shape.tokens * positions
    if way == GATHER:
        return (ranks - 1) * (2 * keys + places), (ranks - 1) * 2 * keys
    if way == RING:
        return (ranks - 1) * (2 * keys + places), ranks * (4 * keys + places)
    exchanged = 2 * head * (shape.heads + key_heads(shape, ranks)) * (ranks - 1) / ranks
    return exchanged + (ranks - 1) * places, exchanged


def predicted_peak(way: str, shape: Shape, ranks: int, tiled: bool = False) -> float:
    """Bytes at the peak, which is in backward, beside the rank's piece of q, k and v, in fp32.
    shape: of its piece. tiled: whether the blocks are computed in tiles, without their scores.

    With Q, K the bytes of a piece of q and of k. GATHER: out, dq, and K, V and their gradients of
    all ranks: 2Q + 4N·K. RING: out, dq and two contributions to it; K, V, dK, dV, two contributions
    to both gradients, and the dV that was sent: 4Q + 9K. ULYSSES: q, out and their gradients, K, V
    and theirs, of fewer heads and all tokens: 4Q + 4K. In addition two blocks of scores
    (probabilities and their gradient) or two tiles of them, the block's mask, and twice lse.
    """
    heads, keys, rows, columns = shape.heads, shape.kv_heads, shape.tokens, shape.tokens
    if way != RING:
        columns *= ranks
    if way == ULYSSES:
        heads, keys, rows = heads // ranks, key_heads(shape, ranks) // ranks, rows * ranks
    number = BYTES * shape.batch
    q, k = (number * each * rows * shape.d for each in (heads, keys))
    kept = {GATHER: 2 * q + 4 * ranks * k, RING: 4 * q + 9 * k, ULYSSES: 4 * q + 4 * k}[way]
    mask = rows * columns * (way == RING or not tiled)  # a ring's is the student's, of one block
    tiles = 2 if tiled and TILE < max(rows, columns) else 1
    if tiled:
        rows = columns = min(TILE, rows)
    # queries that share a key head are put side by side: a copy of them and of out's gradient
    copies = 2 * (heads > keys and (tiled or way != ULYSSES))
    block = 2 * heads * rows * columns + copies * heads * rows * shape.d
    if tiled:  # the contributions to dq, dk and dv of a tile, and of the tile before
        block += tiles * (heads + 2 * keys) * rows * shape.d
    return kept + number * block + mask + 2 * number * shape.heads * shape.tokens


def measure(attentions: dict[str, Callable], ranks: int,
            shape: Shape = COMPARED) -> dict[str, Measured]:
    """Way -> what its attention(q, k, v, positions, group) does on `ranks` ranks. shape: of the
    whole sequence."""
    with where_messages_pass(ranks):
        by_rank = run(_measure, attentions, replace(shape, tokens=shape.tokens // ranks),
                      ranks=ranks)
    found = {}
    for way in attentions:
        sent, *numbers = zip(*(each[way] for each in by_rank), strict=True)
        found[way] = Measured(max(sent, key=lambda kinds: sum(kinds.values())), *map(max, numbers))
    return found


def _measure(attentions, shape) -> dict[str, tuple]:
    group = dist.group.WORLD

    def sequence(shape=shape):
        return WholeSequence(shape, group, contiguous_places(shape.tokens, group.size()))

    found = {}
    for way, attention in attentions.items():
        few = sequence(replace(shape, tokens=8))
        off = _difference(attention, few)  # on a GPU, cuBLAS's workspaces come with the first run
        sent, peaks = _sent(attention, sequence()), []
        for tiles in (nullcontext(), in_tiles()):
            with tiles, memory.wait_longer(_FACTOR):
                peaks.append(record_attention(attention, sequence()).step_peak.total)
        found[way] = (sent, *peaks, off)
    return found


def _difference(attention, sequence) -> float:
    leaves = sequence.inputs()
    out = attention(*leaves, sequence.positions, sequence.group)
    out.backward(sequence.piece(sequence.weights))
    want, gradients = sequence.expected()
    pairs = zip([out.detach(), *(leaf.grad for leaf in leaves)], [want, *gradients], strict=True)
    return max((got - sequence.piece(whole)).abs().max().item() for got, whole in pairs)


def _sent(attention, sequence) -> dict[str, float]:
    with in_tiles(), Traffic() as traffic:
        out = attention(*sequence.inputs(), sequence.positions, sequence.group)
        out.backward(sequence.piece(sequence.weights))
    kinds = dict.fromkeys(call.kind for call in traffic.calls if call.kind != "recv")
    return {kind: sum(map(_bytes_sent, traffic.of(kind))) for kind in kinds}


def _bytes_sent(call: CollectiveCall) -> float:
    if call.kind == "send":
        return call.bytes
    return passes(call.kind) * (call.ranks - 1) / call.ranks * call.bytes
