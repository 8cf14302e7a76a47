"""Bytes that a collective must move over the links, per rank.

size is always the whole tensor in bytes: what every rank holds after an all-gather or before a
reduce-scatter. The counts are those of ring algorithms, and for all-reduce no algorithm sends
less. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 69(2), 2009; and NCCL tests, doc/PERFORMANCE.md, whose factor from
"algbw" to "busbw" is each function's result for size 1.
"""


def reduce_scatter(size: float, ranks: int) -> float:
    """Bytes each rank sends, and receives: (N-1)/N · S; N-1 steps with one piece of S/N each."""
    return (_counted(ranks) - 1) * size / ranks


def all_gather(size: float, ranks: int) -> float:
    """Bytes each rank sends, and receives: (N-1)/N · S, S being the gathered tensor."""
    return (_counted(ranks) - 1) * size / ranks


def all_reduce(size: float, ranks: int) -> float:
    """Bytes each rank sends, and receives: 2(N-1)/N · S, a reduce-scatter and an all-gather."""
    return reduce_scatter(size, ranks) + all_gather(size, ranks)


def broadcast(size: float, ranks: int) -> float:
    """Bytes the busiest rank sends: S, because all of it must leave the source once."""
    return float(size) if _counted(ranks) > 1 else 0.0


def reduce(size: float, ranks: int) -> float:
    """Bytes the busiest rank receives: S, because every number must reach the target once."""
    return broadcast(size, ranks)


def all_to_all(size: float, ranks: int) -> float:
    """Bytes each rank sends, and receives: (N-1)/N · S; only its own piece stays."""
    return (_counted(ranks) - 1) * size / ranks


def gradient_bytes(parameters: int, bytes_each: int = 4) -> int:
    """Logical bytes that data parallelism all-reduces per step: every gradient once, however it
    is cut into buckets (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2)."""
    return parameters * bytes_each


def _counted(ranks: int) -> int:
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least 1 rank is needed")
    return ranks
