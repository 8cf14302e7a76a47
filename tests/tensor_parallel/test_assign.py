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
    assert_waits(lab.check_assign, "7.12")


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
    assert_rejected(lab.check_assign(answer), words)


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
    verdict = lab.check_assign(answer)
    assert verdict.passed, verdict
