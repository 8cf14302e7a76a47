"""What the check of exercise 3.1 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
from zero_answers import (
    accepted,
    named,
    rejected,
    right,
)

import labs.zero_stages as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["zero_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


# 3.1 cut


class Cut:
    def nothing(flat, ranks):
        return None

    def chunks(flat, ranks):
        return list(flat.chunk(ranks))

    def remainder_dropped(flat, ranks):
        length = len(flat) // ranks
        return [flat[r * length:(r + 1) * length] for r in range(ranks)]

    def remainder_to_the_last(flat, ranks):
        length = len(flat) // ranks
        pieces = [flat[r * length:(r + 1) * length] for r in range(ranks - 1)]
        return [*pieces, flat[(ranks - 1) * length:]]

    def always_one_more(flat, ranks):
        length = len(flat) // ranks + 1
        padded = torch.cat([flat, flat.new_zeros(length * ranks - len(flat))])
        return list(padded.split(length))

    def dealt_out(flat, ranks):
        length = -(-len(flat) // ranks)
        padded = torch.cat([flat, flat.new_zeros(length * ranks - len(flat))])
        return list(padded.view(length, ranks).T)

    def copies(flat, ranks):
        return [piece.clone() for piece in right.cut(flat, ranks)]

    def padded_with_the_last(flat, ranks):
        length = -(-len(flat) // ranks)
        return list(torch.cat([flat, flat[-1:].expand(length * ranks - len(flat))]).split(length))

    def only_mine(flat, ranks):
        return right.cut(flat, ranks)[0]

    def resized_in_place(flat, ranks):
        size = len(flat)
        flat.resize_(-(-size // ranks) * ranks)[size:] = 0
        return list(flat.chunk(ranks))

    def zeroed_in_place(flat, ranks):
        pieces = right.cut(flat, ranks)
        flat.zero_()
        return pieces

    def zeros_of_float32(flat, ranks):
        padded = torch.cat([flat, torch.zeros(-len(flat) % ranks)])
        return list(padded.view(ranks, -1))

    def rows_of_a_matrix(flat, ranks):
        return list(torch.stack(right.cut(flat, ranks)).split(1))

    def padded_in_front(flat, ranks):
        return list(torch.cat([flat.new_zeros(-len(flat) % ranks), flat]).view(ranks, -1))

    def each_one_padded(flat, ranks):
        length = -(-len(flat) // ranks)
        return [torch.nn.functional.pad(piece, (0, length - len(piece)))
                for piece in flat.tensor_split(ranks)]

    def a_generator(flat, ranks):
        return (piece for piece in right.cut(flat, ranks))

    def numpys(flat, ranks):
        return [piece.numpy() for piece in right.cut(flat, ranks)]

    def one_tensor(flat, ranks):
        return torch.stack(right.cut(flat, ranks))


@pytest.mark.parametrize("answer, words", [
    (Cut.nothing, "wrong_type nothing"),
    (Cut.only_mine, "wrong_type"),
    (Cut.chunks, "unequal_pieces 531"),
    (Cut.remainder_dropped, "elements_lost"),
    (Cut.remainder_to_the_last, "unequal_pieces 532"),
    (Cut.always_one_more, "too_much_padding"),
    (Cut.dealt_out, "wrong_order"),
    (Cut.copies, "copies_not_views"),
    (Cut.resized_in_place, "changes_input"),
    (Cut.zeroed_in_place, "changes_input|wrong_order"),
    (Cut.zeros_of_float32, "wrong_dtype"),
    (Cut.rows_of_a_matrix, "wrong_shape"),
    (Cut.padded_in_front, "wrong_order"),
    (Cut.each_one_padded, "wrong_order|pieces_copied"),
    (Cut.a_generator, "wrong_type generator"),
    (Cut.numpys, "wrong_type"),
    (Cut.one_tensor, "wrong_type"),
    (Cut.padded_with_the_last, "padding_not_zero")], ids=named)
def test_wrong_cut(answer, words):
    rejected(lab.check_cut(answer), words)


def cut_by_pad(flat, ranks):
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % ranks))
    return padded.view(ranks, -1).unbind()


def cut_by_chunk(flat, ranks):
    whole = flat.new_zeros(-(-len(flat) // ranks) * ranks)
    whole[:len(flat)] = flat
    return whole.chunk(ranks)


def cut_by_strides(flat, ranks):
    length = -(-len(flat) // ranks)
    padded = torch.zeros(length * ranks, dtype=flat.dtype)
    padded.narrow(0, 0, len(flat)).copy_(flat)
    return [padded.as_strided((length,), (1,), rank * length) for rank in range(ranks)]


def cut_by_stack(flat, ranks):
    """Copies once, into one tensor, of which the pieces are views."""
    return torch.stack(right.cut(flat, ranks)).unbind(0)


def cut_by_index(flat, ranks):
    import math

    length = math.ceil(flat.numel() / ranks)
    padded = flat.new_zeros((ranks, length)).flatten()
    padded[torch.arange(flat.numel())] = flat
    return tuple(padded.tensor_split(ranks))


@pytest.mark.parametrize("answer", [right.cut, cut_by_pad, cut_by_chunk, cut_by_strides,
                                    cut_by_stack, cut_by_index])
def test_right_cut(answer):
    accepted(lab.check_cut(answer))
