"""Exercise 3.1: one flat tensor in N equal pieces, and the picture of which rank owns what."""

from collections.abc import Callable

import torch

from labs.checks.comparison import model_of
from labs.checks.generator import new_generator
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.pictures import shards
from labs.pictures.picture import Picture
from labs.training import models
from labs.training.presets import Preset
from labs.words import counted
from labs.workers.progress import status
from labs.zero_stages.flat_parameter import layer_groups

# 1597 is prime: no number of ranks divides it. 12 needs no padding on 2, 3 and 4 ranks. Of 7, 3 and
# 1, the last ranks of 8 get padding only.
CASES = [(size, ranks, torch.float32) for size in (1597, 12, 7, 3, 1) for ranks in (3, 2, 4, 8)]
# Of bfloat16 or int64 numbers and float32 zeros, torch.cat makes float32: catches padding that is
# made without the dtype.
CASES += [(7, 3, torch.bfloat16), (7, 3, torch.float64), (12, 4, torch.int64),
          (5, 1, torch.float32)]


@check("3.1")
def check_cut(cut: Callable):
    """cut(flat, ranks): `ranks` equal pieces of `flat`, in order, with zeros after its end; `flat`
    stays as it is, with its dtype."""
    rng = new_generator()
    drawn = [(rng.randint(20, 400), rng.randint(2, 9), torch.float32) for _ in range(3)]
    for size, ranks, dtype in CASES + drawn:
        # no zero, which is what padding is
        flat = torch.tensor(rng.sample(range(1, 2 * size + 1), size)).to(dtype)
        given = flat.clone()
        pieces = cut(given, ranks)
        # Catches resize_ and other changes in place: who calls cut still uses the tensor.
        if given.shape != flat.shape or not given.equal(flat):
            raise Wrong(f"{size} numbers on {counted(ranks, 'rank')}: cut has changed the tensor "
                        "that it was given", "Pad a new tensor; flat itself stays as it is.",
                        code="changes_input")
        judge_pieces(pieces, flat, ranks)
    return "equal pieces of one tensor, in order, with no more padding than needed"


def judge_pieces(pieces, flat: torch.Tensor, ranks: int) -> None:
    """Raises Wrong if the pieces are not what exercise 3.1 asks for."""
    size, case = len(flat), f"{len(flat)} numbers on {counted(ranks, 'rank')}"
    if not isinstance(pieces, list | tuple) or not all(isinstance(p, torch.Tensor) for p in pieces):
        raise Wrong(f"cut returned {kind_of(pieces)}, not a list of tensors",
                    "A list with one piece for each rank.", code="wrong_type")
    if len(pieces) != ranks:
        raise Wrong(f"{case}: {counted(len(pieces), 'piece')}, not {ranks}",
                    "Every rank gets one, even if it is all padding: all ranks take part in every "
                    "collective.", code="wrong_count")
    # Collectives on one tensor need equal pieces; chunk() and a longer last piece have others.
    lengths = [piece.numel() for piece in pieces]
    if len(set(lengths)) > 1:
        raise Wrong(f"{case}: pieces of {', '.join(map(str, lengths))} numbers, not all equal",
                    "Collectives need equal pieces: put zeros after the end.",
                    code="unequal_pieces")
    _judge_length(case, lengths[0], size, ranks)
    for piece in pieces:
        # A shard is flat, as the tensor is: split(1) of a matrix gives rows in a matrix.
        if piece.dim() != 1:
            raise Wrong(f"{case}: a piece of shape {tuple(piece.shape)}, not ({lengths[0]},)",
                        "Each piece has one dimension, as flat has.", code="wrong_shape")
        if piece.dtype != flat.dtype:
            raise Wrong(f"{case}: flat holds {_name(flat)}, a piece {_name(piece)}",
                        "Zeros of another dtype change the dtype of all: flat.new_zeros(...) "
                        "makes some of the dtype of flat.", code="wrong_dtype")
    _judge_contents(case, pieces, flat)


def _name(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _judge_contents(case, pieces, flat):
    size = len(flat)
    # Rank r owns piece r: an all-gather of the pieces must restore the tensor.
    joined = torch.cat(list(pieces))
    if not joined[:size].equal(flat):
        raise Wrong(f"{case}: put together, the pieces are not the numbers in their order",
                    "Rank 0 gets the first piece, rank 1 the second, and so on.",
                    code="wrong_order")
    # Padding takes part in norms and sums, so it must be zero.
    if joined[size:].any():
        raise Wrong(f"{case}: after the end there is something other than zeros",
                    "Zeros change no sum and no norm.", code="padding_not_zero")
    # Views, one behind the other: a gather into the flat tensor must update the pieces, and copies
    # take memory twice.
    first, step = pieces[0].data_ptr(), pieces[0].numel() * pieces[0].element_size()
    if any(piece.data_ptr() != first + number * step or not piece.is_contiguous()
           for number, piece in enumerate(pieces)):
        raise Wrong(f"{case}: the pieces are copies, each in memory of its own",
                    "Pad first, then take views of the padded tensor.", code="copies_not_views")


def _judge_length(case, length, size, ranks):
    # The shortest pieces that hold all; each element more of a piece is N more to gather.
    least = -(-size // ranks)  # rounded up
    if length < least:
        raise Wrong(f"{case}: {ranks} pieces of {length} hold {ranks * length}: the last "
                    f"{size - ranks * length} are lost", "Round the length of a piece up.",
                    code="elements_lost")
    if length > least:
        raise Wrong(f"{case}: pieces of {length}, where {least} are enough",
                    "Round up, but only if the size does not divide.", code="too_much_padding")


@shows("3.1")
def show_owners(cut: Callable, preset: Preset, ranks: int | None = None) -> Picture:
    """The preset's GPT-2 sharded by the student's `cut`: as one flat tensor, and layer by layer."""
    ranks = ranks or max(preset.ranks, 3)
    with status("loading transformers for GPT-2"):  # once, and it takes seconds
        model = model_of(preset)
    layers = [(name, sum(p.numel() for p in parameters))
              for name, _, parameters in layer_groups(model)]
    rows = {"one flat tensor for all": [models.count_trainable(model)],
            "a flat tensor for each layer": [n for _, n in layers]}
    return shards.shard_owners(layers, {title: [_cut(cut, size, ranks) for size in sizes]
                                        for title, sizes in rows.items()}, ranks)


def _cut(cut, size, ranks) -> list[tuple[int, int]]:
    """(elements that are parameters, elements of padding) of each rank's piece."""
    flat = torch.ones(size)
    pieces = cut(flat, ranks)
    judge_pieces(pieces, flat, ranks)
    return [(int(piece.sum()), int((piece == 0).sum())) for piece in pieces]
