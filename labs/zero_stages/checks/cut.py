"""Exercise 3.1: one flat tensor in N equal pieces."""

from collections.abc import Callable

import torch

from labs.exercises.verdicts import Wrong, check, kind_of
from labs.words import counted

CASES = [(size, ranks) for size in (1597, 12, 7, 3, 1) for ranks in (2, 3, 4, 8)]


@check("3.1")
def check_cut(cut: Callable):
    """cut(flat, ranks): `ranks` equal pieces of `flat`, in order, with zeros after its end."""
    for size, ranks in CASES:
        flat = torch.arange(1.0, size + 1)
        reject_wrong_pieces(cut(flat.clone(), ranks), flat, ranks)
    return "equal pieces of one tensor, in order, with no more padding than needed"


def reject_wrong_pieces(pieces, flat: torch.Tensor, ranks: int) -> None:
    """Raises Wrong if the pieces are not what exercise 3.1 asks for."""
    size, case = len(flat), f"{len(flat)} numbers on {ranks} ranks"
    if not isinstance(pieces, list | tuple) or not all(isinstance(p, torch.Tensor) for p in pieces):
        raise Wrong(f"cut returned {kind_of(pieces)}, not a list of tensors",
                    "A list with one piece for each rank.")
    if len(pieces) != ranks:
        raise Wrong(f"{case}: {counted(len(pieces), 'piece')}, not {ranks}",
                    "Every rank gets one, even if it is all padding: all ranks take part in every "
                    "collective.")
    # Collectives on one tensor need equal pieces; chunk() and a longer last piece have others.
    lengths = [piece.numel() for piece in pieces]
    if len(set(lengths)) > 1:
        raise Wrong(f"{case}: pieces of {', '.join(map(str, lengths))} numbers, not all equal",
                    "Collectives need equal pieces: put zeros after the end.")
    _reject_wrong_length(case, lengths[0], size, ranks)
    # Rank r owns piece r: an all-gather of the pieces must restore the tensor.
    joined = torch.cat([piece.flatten() for piece in pieces])
    if not joined[:size].equal(flat):
        raise Wrong(f"{case}: put together, the pieces are not the numbers in their order",
                    "Rank 0 gets the first piece, rank 1 the second, and so on.")
    # Padding takes part in norms and sums, so it must be zero.
    if joined[size:].any():
        raise Wrong(f"{case}: after the end there is something other than zeros",
                    "Zeros change no sum and no norm.")
    # Views: a gather into the flat tensor must update the pieces, and copies take memory twice.
    first = pieces[0].untyped_storage().data_ptr()
    if any(piece.untyped_storage().data_ptr() != first for piece in pieces):
        raise Wrong(f"{case}: the pieces are copies, each in memory of its own",
                    "Pad first, then take views of the padded tensor.")


def _reject_wrong_length(case, length, size, ranks):
    least = -(-size // ranks)  # rounded up
    if length < least:
        raise Wrong(f"{case}: {ranks} pieces of {length} hold {ranks * length}: the last "
                    f"{size - ranks * length} are lost", "Round the length of a piece up.")
    if length > least:
        raise Wrong(f"{case}: pieces of {length}, where {least} are enough",
                    "Round up, but only if the size does not divide.")
