"""How parameters are sharded over ranks under FSDP2: in padded shards.

Sources: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py (each parameter is cut along its
first dimension by torch.chunk; every rank's piece is padded to the first one's size, because
all-gather wants equal inputs), _fsdp_collectives.py.
"""

from math import ceil, prod


def rows_of(rows: int, rank: int, ranks: int) -> int:
    """Rows of the first dimension that `rank` owns: torch.chunk gives the first ranks
    ceil(rows/N) each, and the last ones fewer, or none."""
    # 5 rows on 4 ranks: 2, 2, 1, 0
    each = ceil(rows / ranks)
    return max(0, min(each, rows - rank * each))


def owned(size: tuple, rank: int, ranks: int) -> int:
    """Elements of a parameter of this shape that `rank` owns under FSDP2."""
    _check(rank, ranks)
    return rows_of(size[0], rank, ranks) * prod(size[1:])


def padded(size: tuple, ranks: int) -> int:
    """Elements that every rank holds of a parameter of this shape under FSDP2, with padding."""
    return ceil(size[0] / ranks) * prod(size[1:])


def fsdp_units(tensors: list[tuple], wrap: str = "blocks") -> dict[int | str, list[tuple]]:
    """FSDP unit -> shapes of its parameters, from [(block or None, shape)]. wrap "blocks": each
    block is a unit, the root holds embeddings, final norm and head; "model": the root holds all."""
    if wrap not in ("blocks", "model"):
        raise ValueError(f"no wrapping {wrap!r}: choose 'blocks' or 'model'")
    found = {"root": []}
    for block, shape in tensors:
        unit = block if wrap == "blocks" and block is not None else "root"
        found.setdefault(unit, []).append(shape)
    return found


def _check(rank: int, ranks: int):
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} does not exist: ranks count from 0")
