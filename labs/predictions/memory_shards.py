"""How parameters are divided among ranks: FSDP2's padded shards, ZeRO's even ones, DDP's buckets.

Sources: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py (each parameter is cut along its
first dimension by torch.chunk; every rank's piece is padded to the first one's size, because
all-gather wants equal inputs), _fsdp_collectives.py; nn/parallel/distributed.py (buckets).
"""

from math import ceil, prod


def rows_of(rows: int, rank: int, ranks: int) -> int:
    """Rows of the first dimension that `rank` owns: torch.chunk gives the first ranks
    ceil(rows/N) each, and the last ones fewer, or none."""
    each = ceil(rows / ranks)
    return max(0, min(each, rows - rank * each))


def owned(size: tuple, rank: int, ranks: int) -> int:
    """Elements of a parameter of this shape that `rank` owns under FSDP2."""
    _check(rank, ranks)
    return rows_of(size[0], rank, ranks) * prod(size[1:])


def padded(size: tuple, ranks: int) -> int:
    """Elements that every rank holds of a parameter of this shape under FSDP2, with padding."""
    return ceil(size[0] / ranks) * prod(size[1:])


def zero_share(parameters: int, rank: int, ranks: int) -> int:
    """Elements that `rank` owns where a flat list of all parameters is cut into N pieces of
    ceil(Ψ/N); the last piece is what is left."""
    _check(rank, ranks)
    each = ceil(parameters / ranks)
    return max(0, min(each, parameters - rank * each))


def buckets(sizes: list, cap: float, first: float) -> list:
    """Bytes of DDP's buckets, in the order they leave: gradients from last to first, each bucket
    closed as soon as it reaches its cap (`first` for the first one: 1 MiB in torch)."""
    filled, limit = [0], first
    for size in reversed(sizes):
        if filled[-1] >= limit:
            filled.append(0)
            limit = cap
        filled[-1] += size
    return filled


def fsdp_units(units: dict, wrap: str = "blocks") -> dict:
    """FSDP unit -> list of parameter shapes. wrap "blocks": each block is a unit, the root holds
    embeddings, final norm and head; "model": the root holds everything."""
    if wrap not in ("blocks", "model"):
        raise ValueError(f"no wrapping {wrap!r}: choose 'blocks' or 'model'")
    found = {"root": []}
    for name, sizes in units.items():
        unit = name if wrap == "blocks" and name.startswith("block") else "root"
        found.setdefault(unit, []).extend(sizes.values())
    return found


def _check(rank: int, ranks: int):
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} does not exist: ranks count from 0")
