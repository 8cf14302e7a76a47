"""Which of three ways of context parallelism exposes least communication, for the heads of
published models: by formula, of one layer, forward and backward.

In 16 bits, batch 1, causal, with equal work on all ranks. A rank sends what `ways.predicted_sent`
says. Gathering and the exchange of heads are over before the attention begins, so all of it is
exposed; a ring's pass runs beside the block before it, and only what takes longer shows. A head's
forward takes 4·d FLOPs for each visible pair, backward 2.5 times that, because a kernel that keeps
no scores computes them again (Dao, "FlashAttention-2", arXiv 2307.08691, section 3.1). Left out:
latency, and that small blocks are slower.
"""

from dataclasses import dataclass

from labs.tensor_parallel.ring.cases import Shape
from labs.tensor_parallel.ring.ways import GATHER, RING, ULYSSES, WAYS, key_heads, predicted_sent

PACE = 380e12  # FLOP/s of an H100: Llama 3's with 131,072 tokens (arXiv 2407.21783, table 4)
LINK = 50e9  # bytes/s: 400 Gbit/s for each GPU, as in Llama 3's clusters (section 3.3.1)
BYTES = 2
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
    sent = predicted_sent(way, shape, ranks, BYTES, positions=False)
    piece = 2 * BYTES * shape.tokens * shape.d  # K and V of one head
    held = {GATHER: 2 * ranks * shape.kv_heads, RING: 4 * shape.kv_heads,
            ULYSSES: 2 * (key_heads(shape, ranks) or 0)}[way]
    exposed = sum(sent) / LINK
    if way == RING:
        # forward has a pass between two blocks, backward also one after the last
        forward = case.forward_seconds / ranks
        exposed = sum(max(0, nbytes / LINK - rounds * seconds) for nbytes, rounds, seconds in
                      ((sent[0], ranks - 1, forward), (sent[1], ranks, _BACKWARD * forward)))
    return Cost(sum(sent), exposed, held * piece)
