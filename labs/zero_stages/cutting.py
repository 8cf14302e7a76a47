"""Check of exercise 3.1: one flat tensor in N equal pieces."""

import torch

from labs.exercises.verdicts import Wrong, check, kind_of

CASES = [(size, ranks) for size in (1597, 12, 7, 3, 1) for ranks in (2, 3, 4, 8)]


@check("3.1")
def check_cut(cut):
    """cut(flat, ranks): `ranks` equal pieces of `flat`, in order, with zeros behind its end."""
    for size, ranks in CASES:
        flat = torch.arange(1.0, size + 1)
        judge_pieces(cut(flat.clone(), ranks), flat, ranks)
    return "equal pieces of one tensor, in order, and not one zero too many"


def judge_pieces(pieces, flat, ranks) -> None:
    """Raises Wrong where the pieces are not as exercise 3.1 wants them."""
    size, who = len(flat), f"{len(flat)} numbers on {ranks} ranks"
    if not isinstance(pieces, list | tuple) or not all(isinstance(p, torch.Tensor) for p in pieces):
        raise Wrong(f"cut returned {kind_of(pieces)}, not a list of tensors",
                    "A list with one piece for each rank.")
    if len(pieces) != ranks:
        raise Wrong(f"{who}: {len(pieces)} piece{'s' * (len(pieces) != 1)}, not {ranks}",
                    "Every rank gets one, if only of zeros: all take part in every collective.")
    lengths = [piece.numel() for piece in pieces]
    if len(set(lengths)) > 1:
        raise Wrong(f"{who}: pieces of {', '.join(map(str, lengths))} numbers, not all equal",
                    "Collectives want equal pieces: put zeros behind the end.")
    _judge_length(who, lengths[0], size, ranks)
    joined = torch.cat([piece.flatten() for piece in pieces])
    if not joined[:size].equal(flat):
        raise Wrong(f"{who}: put together, the pieces are not the numbers in their order",
                    "Rank 0 gets the first piece, rank 1 the second, and so on.")
    if joined[size:].any():
        raise Wrong(f"{who}: behind the end there is something else than zeros",
                    "Zeros change no sum and no norm.")
    first = pieces[0].untyped_storage().data_ptr()
    if any(piece.untyped_storage().data_ptr() != first for piece in pieces):
        raise Wrong(f"{who}: the pieces are copies, each in memory of its own",
                    "Pad first, then cut views out of the padded tensor.")


def _judge_length(who, length, size, ranks):
    least = -(-size // ranks)
    if length < least:
        raise Wrong(f"{who}: {ranks} pieces of {length} hold {ranks * length}: the last "
                    f"{size - ranks * length} are lost", "Round the length of a piece up.")
    if length > least:
        raise Wrong(f"{who}: pieces of {length}, where {least} are enough",
                    "Round up, but only where the size does not divide.")
