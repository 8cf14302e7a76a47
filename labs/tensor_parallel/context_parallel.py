"""Three ways of attention over a sequence whose tokens are sharded over ranks: what a rank sends,
by formula and measured, its peak, and which way exposes least communication for the heads of
published models.

GATHER: K and V of all ranks come before the attention (Llama 3, arXiv 2407.21783, section 3.3.2;
torch's default). RING: they come one piece at a time (Liu, Zaharia, Abbeel, arXiv 2310.01889).
ULYSSES: an all-to-all gives each rank all tokens of some heads, a second one gives them back
(Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509).

The choice is by formula, of one layer, forward and backward, in 16 bits, batch 1, causal, with
equal work on all ranks. A rank sends what `predicted_sent` says. Gathering and the exchange of
heads are over before the attention begins, so all of it is exposed; a ring's pass runs beside the
block before it, and only what takes longer shows. A head's forward takes 4·d FLOPs for each visible
pair, backward 2.5 times that, because a kernel that keeps no scores computes them again (Dao,
"FlashAttention-2", arXiv 2307.08691, section 3.1). Left out: latency, and that small blocks are
slower.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch.distributed as dist

from labs.checks.guesses import guessed
from labs.checks.tolerances import ATTENTION
from labs.checks.verdicts import Wrong, shows
from labs.meters import memory
from labs.meters.traffic import CollectiveCall, Traffic
from labs.pictures import marks, palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions.communication.traffic import passes
from labs.start_here.recorded_collectives import run
from labs.tensor_parallel.attention_blocks import TILE, in_tiles
from labs.tensor_parallel.ring_cases import (
    BYTES,
    Shape,
    WholeSequence,
    contiguous_places,
    record_attention,
)
from labs.workers import devices

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
    full sequence."""
    with devices.send_recv_device(ranks):
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
        # A short sequence for the comparison: its reference is full attention on every rank.
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


PACE = 380e12  # FLOP/s of an H100: Llama 3's with 131,072 tokens (arXiv 2407.21783, table 4)
LINK = 50e9  # bytes/s: 400 Gbit/s for each GPU, as in Llama 3's clusters (section 3.3.1)
BF16_BYTES = 2
_BACKWARD = 2.5  # FLOPs, of those of forward


@dataclass(frozen=True)
class Case:
    """heads, kv_heads: of a layer on one tensor-parallel rank. tokens: of the sequence. ranks: that
    share it."""

    name: str
    heads: int
    kv_heads: int
    tokens: int
    ranks: int
    d: int = 128

    @property
    def shape(self) -> Shape:
        """Of a rank's piece."""
        return Shape(1, self.heads, self.kv_heads, self.tokens // self.ranks, self.d)

    @property
    def forward_seconds(self) -> float:
        """What a rank computes in forward: 4·d FLOPs a head for each of its visible pairs."""
        # A causal mask leaves half of the pairs; equal work on all ranks.
        return 4 * self.d * self.heads * self.tokens**2 / 2 / self.ranks / PACE

    @property
    def seconds(self) -> float:
        """What a rank computes in forward and backward."""
        return (1 + _BACKWARD) * self.forward_seconds


# Heads: arXiv 2407.21783, table 3; of Llama 2: arXiv 2307.09288, table 1 and section 2.2 (7B has no
# grouped queries). With tensor parallelism of 8, a rank has an eighth of them.
CASES = (Case("Llama-3-405B, TP 8", 16, 1, 131_072, 16),
         Case("Llama-3-8B", 32, 8, 131_072, 16),
         Case("Llama-3-8B", 32, 8, 8_192, 4),
         Case("Llama-3-8B", 32, 8, 1_048_576, 64),
         Case("Llama-2-7B's heads", 32, 32, 131_072, 16),
         Case("Llama-2-7B's heads", 32, 32, 1_048_576, 32))


@dataclass(frozen=True)
class Cost:
    """sent: bytes of a rank. exposed: seconds in which it only communicates. keys: bytes of K, V
    and their gradients on a rank, its own and others'."""

    sent: float
    exposed: float
    keys: float


def costs(case: Case) -> dict[str, Cost | None]:
    """Way -> its cost; None where it cannot be: the ranks do not divide the heads."""
    return {way: None if way == ULYSSES and key_heads(case.shape, case.ranks) is None
            else _cost(way, case) for way in WAYS}


def _cost(way, case) -> Cost:
    shape, ranks = case.shape, case.ranks
    sent = predicted_sent(way, shape, ranks, BF16_BYTES, positions=False)
    piece = 2 * BF16_BYTES * shape.tokens * shape.d  # K and V of one head
    held = {GATHER: 2 * ranks * shape.kv_heads, RING: 4 * shape.kv_heads,
            ULYSSES: 2 * (key_heads(shape, ranks) or 0)}[way]
    exposed = sum(sent) / LINK
    if way == RING:
        # forward has a pass between two blocks, backward also one after the last
        forward = case.forward_seconds / ranks
        exposed = sum(max(0, nbytes / LINK - rounds * seconds) for nbytes, rounds, seconds in
                      ((sent[0], ranks - 1, forward), (sent[1], ranks, _BACKWARD * forward)))
    return Cost(sum(sent), exposed, held * piece)


_RANKS = (2, 4, 8)
_HINTS = {GATHER: "GatherToRegion, exercise 7.7: forward gathers the tokens, backward sums the "
                  "gradients over the ranks and keeps this rank's.",
          RING: "Run the check of exercise 7.11.",
          ULYSSES: "A rank gets all tokens of its part of the heads, and gives them back: "
                   "dimension 1 is split and 2 joined, then 2 split and 1 joined."}


@shows("7.11")
def show_three_ways(ring_attention: Callable, gathered_attention: Callable,
                    ulysses_attention: Callable) -> Picture:
    """Draws, for K and V gathered, the ring and Ulysses on 2, 4 and 8 ranks, what a rank sends in
    forward and backward and its peak, with the scores of a block in memory and in tiles; with what
    the formulas say. Raises Wrong where one of the three is not full attention."""
    attentions = {GATHER: gathered_attention, RING: ring_attention, ULYSSES: ulysses_attention}
    found = {ranks: measure(attentions, ranks) for ranks in _RANKS}
    names, measured, sent, peaks, tiled = [], [], [], [], []
    for way in WAYS:
        for ranks in _RANKS:
            shape = replace(COMPARED, tokens=COMPARED.tokens // ranks)
            one = found[ranks][way]
            if one.off > ATTENTION:
                raise Wrong(f"{way} on {ranks} ranks: out or a gradient differs by {one.off:.1g} "
                            "from full attention's", _HINTS[way], code="differs_from_reference")
            names.append(f"{way}, {ranks} ranks")
            measured.append(one)
            sent.append(sum(predicted_sent(way, shape, ranks)))
            peaks.append(predicted_peak(way, shape, ranks))
            tiled.append(predicted_peak(way, shape, ranks, tiled=True))
    guess = guessed("7.11b")
    at = names.index(f"{ULYSSES}, 4 ranks")
    gathered = sum(measured[names.index(f"{GATHER}, 4 ranks")].sent.values())
    guesses = [guess * gathered if guess and place == at else None for place in range(len(names))]
    colour = palette.PHASES["communication"]
    panels = [Panel("sent by a rank", "MB", [one.sent for one in measured], 1e6, sent, guesses),
              Panel("peak, scores of a block", "MB", [one.peak for one in measured], 1e6, peaks,
                    colour=colour),
              Panel("peak, in tiles", "MB", [one.peak_in_tiles for one in measured], 1e6, tiled,
                    colour=colour)]
    size = COMPARED
    of_4 = {way: sum(found[4][way].sent.values()) for way in WAYS}
    return side_by_side(names, panels, f"{size.tokens:,} tokens, {size.heads} query heads and "
                        f"{size.kv_heads} key heads of {size.d}; peaks beside a piece of q, k, v",
                        "On 4 ranks, of the bytes of gathered K and V: "
                        + ", ".join(f"{way} {of_4[way] / of_4[GATHER]:.0%}" for way in WAYS[1:]),
                        marks.answered(guess, of_4[ULYSSES] / gathered, "times"))


@shows("Three ways, for published models")
def show_context_parallel_choice() -> Table:
    """A table of what each way sends, what it exposes and what it has of K and V, for one layer of
    published models."""
    rows = []
    for case in CASES:
        found = [cost and (cost.sent / 1e6, 100 * cost.exposed / case.seconds, cost.keys / 1e6)
                 for cost in costs(case).values()]
        cells = [" / ".join(f"{cost[column]:,.0f}" if cost else "–" for cost in found)
                 for column in range(3)]
        rows.append((f"{case.name}: {case.heads} / {case.kv_heads} heads", f"{case.tokens:,}",
                     case.ranks, *cells))
    return Table("One layer, forward and backward, in 16 bits: gathered / ring / Ulysses",
                 ("query / key heads of a rank", "tokens", "ranks", "sent, MB",
                  "exposed, % of attention's seconds", "K, V and gradients, MB"), rows,
                 note=f"By formula: {LINK / 1e9:.0f} GB/s for each GPU, "
                      f"{PACE / 1e12:.0f} TFLOP/s. – : fewer heads than ranks.")
