"""Bytes that a collective must move over the links, per rank.

size is always the full tensor in bytes: what every rank holds after an all-gather or before a
reduce-scatter. The counts are those of ring algorithms, and for all-reduce no algorithm sends
less. Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 69(2), 2009; and NCCL tests, doc/PERFORMANCE.md, whose factor from
"algbw" to "busbw" is each function's result for size 1.
"""


def reduce_scatter(size: float, ranks: int) -> float:
    """Bytes each rank sends, and receives: (N-1)/N · S; N-1 steps with one piece of S/N each."""
    return (_checked(ranks) - 1) * size / ranks


def all_gather(size: float, ranks: int) -> float:
    """Bytes each rank sends, and receives: (N-1)/N · S, S being the gathered tensor."""
    return (_checked(ranks) - 1) * size / ranks


def all_reduce(size: float, ranks: int) -> float:
    """Bytes each rank sends, and receives: 2(N-1)/N · S, a reduce-scatter and an all-gather."""
    return reduce_scatter(size, ranks) + all_gather(size, ranks)


def gradient_bytes(parameters: int, bytes_each: int = 4) -> int:
    """Logical bytes that data parallelism all-reduces per step: every gradient once, however it
    is cut into buckets (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2)."""
    return parameters * bytes_each


def passes(kind: str) -> int:
    """How many times a collective of this kind sends its tensor, on the mean over ranks: each rank
    sends passes · (N-1)/N · S. An all-reduce is a reduce-scatter and an all-gather; of a broadcast
    or a reduce every rank but one must get, or give, S."""
    return {"all_reduce": 2, "barrier": 0}.get(kind, 1)


def stage_passes(stage: int, reshard: bool = True) -> dict[str, int]:
    """Collective -> how often all Ψ parameters, or their gradients, go through it in one step.

    stage 0 is DDP; in ZeRO-1 and -2 a rank gets the sum of its own gradients alone, and all get the
    updated parameters; in ZeRO-3 parameters are gathered for forward and again for backward, or
    only once without `reshard`. No stage ever sends optimizer state. Source: Rajbhandari et al.,
    "ZeRO", SC 2020 (arXiv 1910.02054), section 7.
    """
    found = {}
    for collectives in passes_by_phase(stage, reshard).values():
        for kind in collectives:
            found[kind] = found.get(kind, 0) + 1
    return found


def passes_by_phase(stage: int, reshard: bool = True) -> dict[str, tuple[str, ...]]:
    """Phase of a step, "forward", "backward" or "step" -> the collectives through which all Ψ
    parameters, or their gradients, go once in it. stage, reshard: as for `stage_passes`."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage}: ZeRO has stages 1, 2 and 3; 0 is DDP")
    if stage == 0:
        return {"forward": (), "backward": ("all_reduce",), "step": ()}
    if stage < 3:  # gathered once the optimizer has updated its shard
        return {"forward": (), "backward": ("reduce_scatter",), "step": ("all_gather",)}
    again = ("all_gather",) if reshard else ()
    return {"forward": ("all_gather",), "backward": (*again, "reduce_scatter"), "step": ()}


def _checked(ranks: int) -> int:
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: at least 1 rank is needed")
    return ranks
