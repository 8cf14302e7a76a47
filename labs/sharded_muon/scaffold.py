"""What a student of notebook 07d calls: Muon's Newton-Schulz iterations, and where the pieces of
matrices lie that ZeRO-1 splits at multiples of a shard's length.

Source of the update: Jordan et al., "Muon: an optimizer for hidden layers in neural networks"
(2024); of its use on shards: Liu et al., "Muon is scalable for LLM training" (arXiv 2502.16982),
section 2.3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_A, _B, _C = 3.4445, -4.7750, 2.0315  # Jordan's coefficients
_EPSILON = 1e-7


def newton_schulz(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Returns the orthogonalised matrix: same singular vectors, singular values near 1 (0.7 to
    1.2), in the matrix's shape and dtype. Products of the full matrix, so no element of the result
    depends on a part of the matrix alone."""
    # The Frobenius norm is at least the largest singular value, so all are at most 1 now, which the
    # iteration needs.
    x = matrix / (matrix.norm() + _EPSILON)
    # gram is (rows, rows): the smaller of both products.
    if x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@dataclass(frozen=True)
class Piece:
    """What a rank has of a matrix. in_matrix: where it lies in the flattened matrix; in_shard:
    where it lies in the rank's shard."""

    in_matrix: slice
    in_shard: slice


def pieces_of(shapes: Sequence[tuple[int, int]], ranks: int) -> list[dict[int, Piece]]:
    """For each matrix rank -> Piece, of the ranks that have some of it. The matrices lie end to end
    in one flat tensor, which is cut into `ranks` equal shards, with zeros after its end."""
    length, begin, found = shard_length(shapes, ranks), 0, []
    for shape in shapes:
        end, pieces = begin + math.prod(shape), {}
        for rank in range(begin // length, (end - 1) // length + 1):
            first, last = max(begin, rank * length), min(end, (rank + 1) * length)
            pieces[rank] = Piece(slice(first - begin, last - begin),
                                 slice(first - rank * length, last - rank * length))
        found.append(pieces)
        begin = end
    return found


def shard_length(shapes: Sequence[tuple[int, int]], ranks: int) -> int:
    """Elements of each rank's shard of these matrices."""
    return -(-sum(map(math.prod, shapes)) // ranks)
