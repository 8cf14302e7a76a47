"""What the check of exercise 0.3 must reject, and what it must accept."""

import sys
from fractions import Fraction

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from answers import assert_rejected

import labs.start_here as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
# 0.3: the bytes of a ring

BYTES = [
    (lambda size, ranks: (ranks - 1) * size / ranks, "one_half_only"),
    (lambda size, ranks: 2 * size, "limit_for_many_ranks"),
    (lambda size, ranks: (ranks - 1) * size, "sent_to_every_rank"),
    (lambda size, ranks: 2 * (ranks - 1) * size, "whole_tensor_each_step"),
    (lambda size, ranks: 2 * (ranks - 1) // ranks * size, "one_round_only"),
    (lambda size, ranks: 2 * (ranks - 1), "steps_not_bytes"),
    (lambda size, ranks: 2 * (ranks - 1) * (size / 4) / ranks, "elements_not_bytes"),
    (lambda size, ranks: 2 * (ranks - 1) * size / ranks / 1e6, "megabytes_not_bytes"),
    (lambda size, ranks: 1.5 * size, "wrong_number 128"),
    (lambda size, ranks: 2 * (ranks + 1) * size / ranks, "wrong_number 240"),
    (lambda size, ranks: None, "not_a_number", "Return the number"),
    (lambda size, ranks: float("nan"), "not_a_number"),
    (lambda size, ranks: size / (ranks - ranks), "raised_ZeroDivisionError"),
    (lambda size: size, "wrong_signature"),
    (lambda size, ranks: ranks * size,
     "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
    (lambda size, ranks: size * (ranks - 1) / ranks * 4,
     "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
    (lambda size, ranks: 2 * (ranks - 1) * (size // ranks // 4), "elements_not_bytes"),
    (lambda size, ranks: 2 * size - size / (2 * ranks),
     "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
    (lambda size, ranks: size * 2 ** (ranks - 1) / ranks,
     "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
    (lambda size, ranks: f"{2 * (ranks - 1) * size / ranks}", "not_a_number"),
    (lambda size, ranks: (2 * (ranks - 1), size / ranks),
     "not_a_number tuple"),
    (lambda size, ranks: 2 * (ranks - 1) * size / ranks * 8,
     "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
    (lambda size, ranks: [2 * (ranks - 1) * size / ranks] * ranks, "not_a_number"),
    (lambda size, ranks: 2 * size / ranks, "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
]


def as_fraction(size, ranks):
    return 2 * (1 - Fraction(1, ranks)) * size


def of_numpy(size, ranks):
    return np.array(2 * (ranks - 1)) * np.float32(size) / ranks


def counted_up(size, ranks):
    return sum(size / ranks for _ in range(2 * (ranks - 1)))


def as_tensor(size, ranks):
    return 2 * (ranks - 1) * torch.tensor(size) / ranks


def in_whole_numbers(size, ranks):
    return 2 * (ranks - 1) * size // ranks


# 0.3: the second half of a ring


def _parts(mine):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = mine.chunk(ranks)
    return rank, ranks, pieces, torch.empty_like(pieces[0])


def ring(mine):
    rank, ranks, pieces, received = _parts(mine)
    for step in range(ranks - 1):
        lab.send_recv(pieces[(rank + 1 - step) % ranks], received)
        pieces[(rank - step) % ranks].copy_(received)
    return mine


def does_nothing(mine):
    return mine


def all_gathers(mine):
    rank, ranks, pieces, _ = _parts(mine)
    full = torch.empty_like(mine)
    dist.all_gather_single(full, pieces[(rank + 1) % ranks])
    return full.roll(len(mine) // ranks)


def all_reduces(mine):
    rank, ranks, pieces, _ = _parts(mine)
    for number, piece in enumerate(pieces):
        if number != (rank + 1) % ranks:
            piece.zero_()
    dist.all_reduce(mine)
    return mine


def first_half_again(mine):
    rank, ranks, pieces, received = _parts(mine)
    for step in range(ranks - 1):
        lab.send_recv(pieces[(rank + 1 - step) % ranks], received)
        target = pieces[(rank - step) % ranks]
        target += received
    return mine


def sends_its_own_piece(mine):
    rank, ranks, pieces, received = _parts(mine)
    for step in range(ranks - 1):
        lab.send_recv(pieces[(rank - step) % ranks], received)
        pieces[(rank - step - 1) % ranks].copy_(received)
    return mine


def always_the_first_piece(mine):
    rank, ranks, pieces, received = _parts(mine)
    for step in range(ranks - 1):
        lab.send_recv(pieces[(rank + 1) % ranks], received)
        pieces[(rank - step) % ranks].copy_(received)
    return mine


def goes_on_upwards(mine):
    rank, ranks, pieces, received = _parts(mine)
    for step in range(ranks - 1):
        lab.send_recv(pieces[(rank + 1 + step) % ranks], received)
        pieces[(rank + 2 + step) % ranks].copy_(received)
    return mine


def one_step_only(mine):
    rank, ranks, pieces, received = _parts(mine)
    lab.send_recv(pieces[(rank + 1) % ranks], received)
    pieces[rank].copy_(received)
    return mine


def one_step_too_many(mine):
    rank, ranks, pieces, received = _parts(mine)
    for step in range(ranks):
        lab.send_recv(pieces[(rank + 1 - step) % ranks], received)
        pieces[(rank - step) % ranks].copy_(received)
    return mine


def assigns_to_the_tuple(mine):
    rank, ranks, pieces, received = _parts(mine)
    for step in range(ranks - 1):
        lab.send_recv(pieces[(rank + 1 - step) % ranks], received)
        pieces[(rank - step) % ranks] = received
    return mine


def assigns_to_a_list(mine):
    rank, ranks, pieces, _ = _parts(mine)
    pieces = list(pieces)
    for step in range(ranks - 1):
        received = torch.empty_like(pieces[0])
        lab.send_recv(pieces[(rank + 1 - step) % ranks], received)
        pieces[(rank - step) % ranks] = received
    return mine


def never_copies(mine):
    rank, ranks, pieces, received = _parts(mine)
    for step in range(ranks - 1):
        lab.send_recv(pieces[(rank + 1 - step) % ranks], received)
    return mine


def full_tensors(mine):
    ranks, size = dist.get_world_size(), len(mine) // dist.get_world_size()
    for step in range(ranks - 1):
        received = torch.empty_like(mine)
        lab.send_recv(mine, received)
        place = (dist.get_rank() - step) % ranks * size
        mine[place : place + size] = received[place : place + size]
    return mine


def rank_0_leaves_early(mine):
    rank, ranks, pieces, received = _parts(mine)
    for step in range(ranks - 1 - (rank == 0)):
        lab.send_recv(pieces[(rank + 1 - step) % ranks], received)
        pieces[(rank - step) % ranks].copy_(received)
    return mine


def returns_nothing(mine):
    ring(mine)


def returns_its_pieces(mine):
    return ring(mine).chunk(dist.get_world_size())


def returns_one_piece(mine):
    return ring(mine).chunk(dist.get_world_size())[0]


RING = [
    (does_nothing, "all_gather_missing", "copied into `mine`"),
    (all_gathers, "ready_made all_gather"),
    (all_reduces, "ready_made all_reduce"),
    (first_half_again, "added_not_copied", "copy it"),
    (sends_its_own_piece, "wrong_output"),
    (always_the_first_piece, "wrong_output"),
    (goes_on_upwards, "wrong_output"),
    (one_step_only, "wrong_output as at the start", "N - 1 steps"),
    (assigns_to_the_tuple, "raised_TypeError", "copy_ writes into a view"),
    (assigns_to_a_list, "all_gather_missing", "copy_ writes into a view"),
    (never_copies, "all_gather_missing"),
    (rank_0_leaves_early, "deadlock|no_progress", "N - 1 steps"),
    (returns_nothing, "nothing_returned"),
    (returns_its_pieces, "wrong_type tuple"),
    (returns_one_piece, "wrong_shape"),
    (lambda: None, "wrong_signature"),
    (full_tensors, "wrong_traffic pieces in 3 sends", "one piece in each"),
    (one_step_too_many, "wrong_traffic 4 sends", "N - 1 steps"),
]


def sends_what_it_received(mine):
    rank, ranks, pieces, received = _parts(mine)
    sent = pieces[(rank + 1) % ranks].clone()
    for step in range(ranks - 1):
        lab.send_recv(sent, received)
        pieces[rank - step][:] = received
        sent.copy_(received)
    return mine


def by_its_own_sends(mine):
    rank, ranks, pieces, _ = _parts(mine)
    for step in range(ranks - 1):
        both = [dist.P2POp(dist.isend, pieces[(rank + 1 - step) % ranks], (rank + 1) % ranks),
                dist.P2POp(dist.irecv, pieces[(rank - step) % ranks], (rank - 1) % ranks)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
    return mine


def into_a_new_tensor(mine):
    return ring(mine.clone())


def formula(size, ranks):
    return 2 * (ranks - 1) * size / ranks


def both(ring_all_gather=ring, ring_bytes=formula):
    """Both answers to 0.3, one of them another one than the right one."""
    return ring_all_gather, ring_bytes


CHECKS = {"0.3": lab.check_ring}
WRONG = {"0.3": [*((both(ring_all_gather=answer), *why) for answer, *why in RING),
                 *((both(ring_bytes=answer), *why) for answer, *why in BYTES)]}
RIGHT = {"0.3": [*(both(ring_all_gather=answer) for answer in (
                     ring, sends_what_it_received, by_its_own_sends, into_a_new_tensor)),
                 *(both(ring_bytes=answer) for answer in (
                     counted_up, in_whole_numbers, as_tensor, as_fraction, of_numpy))]}


@pytest.mark.parametrize("exercise, answer, words, hint", [
    pytest.param(exercise, answer, words, "".join(hint),
                 id=f"{exercise}-{'-'.join(one.__name__ for one in answer)}-{number}")
    for exercise, answers in WRONG.items()
    for number, (answer, words, *hint) in enumerate(answers)])
def test_rejected_with_the_reason(exercise, answer, words, hint):
    verdict = CHECKS[exercise](*answer)
    assert_rejected(verdict, words)
    assert hint in verdict.hint
    print(verdict)


@pytest.mark.parametrize("answer, words", [
    (lambda size, ranks: None, "not_a_number"),
    (lambda size, ranks: "24", "not_a_number"),
    (lambda size, ranks: float("inf"), "not_a_number inf"),
    (lambda size: size, "wrong_signature")])
def test_a_formula_that_cannot_be_drawn(answer, words):
    verdict = lab.ring_traffic(ring, answer)
    assert_rejected(verdict, words)
    assert verdict.hint


@pytest.mark.parametrize("exercise, answer", [
    pytest.param(exercise, answer, id=f"{exercise}-{'-'.join(one.__name__ for one in answer)}")
    for exercise in RIGHT for answer in RIGHT[exercise]])
def test_right_in_another_way(exercise, answer):
    verdict = CHECKS[exercise](*answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("exercise", CHECKS)
def test_unfilled_waits(exercise):
    def gap(*_):
        raise NotImplementedError(f"Exercise {exercise}")

    for answer in ((gap, gap), (gap, formula), (ring, gap), (..., ...), (ring, ...)):
        verdict = CHECKS[exercise](*answer)
        assert verdict.passed is None and "waiting" in verdict.sentence
