"""What the check of exercise 7.12 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("07a_tensor_parallel")


def test_unfilled():
    assert_waits(lab.check_assign, "7.12", functions=2)


# 7.12


def contiguous(chunks, ranks):
    each = chunks // ranks
    return [list(range(each * rank, each * (rank + 1))) for rank in range(ranks)]


def round_robin(chunks, ranks):
    return [list(range(rank, chunks, ranks)) for rank in range(ranks)]


def two_only(chunks, ranks):
    return [[rank, chunks - 1 - rank] for rank in range(ranks)]


WRONG_ASSIGNMENTS = [
    (contiguous, "not_balanced contiguous"),
    (round_robin, "not_balanced robin"),
    (lambda chunks, ranks: [list(range(chunks))] + [[]] * (ranks - 1), "unequal_pieces"),
    (lambda chunks, ranks: [list(range(chunks))] * ranks, "chunk_not_assigned_once"),
    (lambda chunks, ranks: [[rank, rank + 1] for rank in range(ranks)], "chunk_not_assigned_once"),
    (lambda chunks, ranks: [[rank, chunks - rank] for rank in range(ranks)],
     "chunk_not_assigned_once"),
    (two_only, "chunk_not_assigned_once"),
    (lambda chunks, ranks: [[rank] for rank in range(ranks)], "chunk_not_assigned_once"),
    (lambda chunks, ranks: right.assign(chunks, ranks)[0], "wrong_type"),
    (lambda chunks, ranks: contiguous(chunks, ranks)[::-1], "not_balanced"),
    (lambda chunks, ranks: [f"{rank}" for rank in range(ranks)], "wrong_type numbers")]


@pytest.mark.parametrize("answer, words", WRONG_ASSIGNMENTS)
def test_wrong_assignment(answer, words):
    assert_rejected(lab.check_assign(answer, right.critical_path), words)


def snake(chunks, ranks):
    """Forwards and backwards in turn."""
    found = [[] for _ in range(ranks)]
    for chunk in range(chunks):
        turn, place = divmod(chunk, ranks)
        found[place if turn % 2 == 0 else ranks - 1 - place].append(chunk)
    return found


def blocks_of_pairs(chunks, ranks):
    half = chunks // 2 // ranks
    return torch.tensor([[*range(rank * half, (rank + 1) * half),
                          *range(chunks - (rank + 1) * half, chunks - rank * half)]
                         for rank in range(ranks)])


@pytest.mark.parametrize("answer", [
    right.assign, snake, lambda *sizes: list(blocks_of_pairs(*sizes)),
    lambda *sizes: [tuple(reversed(each)) for each in reversed(right.assign(*sizes))]])
def test_right_assignment(answer):
    verdict = lab.check_assign(answer, right.critical_path)
    assert verdict.passed, verdict


def rounds_of(places):
    """Round -> rank -> the pairs that it computes."""
    return [[sum(key <= query for query in queries
                 for key in places[(rank - passed) % len(places)])
             for rank, queries in enumerate(places)] for passed in range(len(places))]


def pairs_where(sees):
    """The critical path of another mask."""
    return lambda places: sum(max(
        sum(sees(query, key) for query in queries for key in places[(rank - passed) % len(places)])
        for rank, queries in enumerate(places)) for passed in range(len(places)))


WRONG_PATHS = [
    (lambda places: None, "not_a_number"),
    (lambda places: 0, "wrong_number"),
    (lambda places: sum(map(sum, rounds_of(places))), "ranks_added"),
    (lambda places: sum(map(sum, rounds_of(places))) / len(places), "mean_of_ranks"),
    (lambda places: max(map(sum, zip(*rounds_of(places), strict=True))),
     "rounds_not_synchronized"),
    (lambda places: sum(map(min, rounds_of(places))), "fastest_rank"),
    (lambda places: max(rounds_of(places)[0]), "one_round"),
    (lambda places: len(places) * max(rounds_of(places)[0]), "keys_stay"),
    (lambda places: max(map(max, rounds_of(places))), "wrong_number"),
    (lambda places: sum(map(max, rounds_of(places)[1:])), "wrong_number"),
    (lambda places: rounds_of(places), "not_a_number"),
    (pairs_where(lambda query, key: True), "mask_missing"),
    (pairs_where(lambda query, key: key < query), "own_key_missing")]


@pytest.mark.parametrize("answer, words", WRONG_PATHS)
def test_wrong_path(answer, words):
    assert_rejected(lab.check_assign(right.assign, answer), words)


def with_tensors(places):
    """The masks of all rounds of a rank, and of those the largest sum in each round."""
    positions = torch.stack([torch.tensor(each) for each in places])
    return sum((positions[:, :, None] >= positions.roll(passed, 0)[:, None]).sum((1, 2)).max()
               for passed in range(len(places)))


@pytest.mark.parametrize("answer", [
    right.critical_path, with_tensors, lambda places: sum(map(max, rounds_of(places)))])
def test_right_path(answer):
    verdict = lab.check_assign(right.assign, answer)
    assert verdict.passed, verdict
