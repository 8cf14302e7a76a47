"""What the check of exercise 7.21 must reject, and what it must accept."""

from math import prod

import numpy as np
import pytest
import torch
from answers import assert_rejected, assert_waits

import labs.pipeline_parallel as lab
from labs.predictions.communication.mesh import Mesh

# 7.21 coordinates and group


def right_coordinates(rank, sizes):
    return Mesh(("",) * len(sizes), tuple(sizes)).coordinates(rank)


def right_group(rank, dimension, sizes):
    return Mesh(tuple(map(str, range(len(sizes)))), tuple(sizes)).group(rank, str(dimension))


def places(change):
    return lambda rank, sizes: change(right_coordinates(rank, sizes), rank, sizes), right_group


def groups(change):
    return right_coordinates, lambda rank, dimension, sizes: change(
        right_group(rank, dimension, sizes), rank, dimension, sizes)


def by_modulo(rank, sizes):  # the first dimension fastest
    found = []
    for size in sizes:
        found.append(rank % size)
        rank //= size
    return tuple(found)


def by_torch(rank, sizes):
    return torch.unravel_index(torch.tensor(rank), sizes)


def group_by_torch(rank, dimension, sizes):
    mesh = torch.arange(prod(sizes)).view(*sizes)
    own = list(by_torch(rank, sizes))
    own[dimension] = slice(None)
    return mesh[tuple(own)]


def group_by_looking(rank, dimension, sizes):
    if prod(sizes) > 500:
        return right_group(rank, dimension, sizes)

    def others(one):
        own = right_coordinates(one, sizes)
        return own[:dimension] + own[dimension + 1:]

    return [other for other in range(prod(sizes)) if others(other) == others(rank)]


WRONG = [
    ((lambda rank, sizes: None, right_group), "wrong_type"),
    ((lambda rank, sizes: rank, right_group), "wrong_type"),
    ((lambda rank, sizes: (rank // 96, rank // 8 % 12, rank % 8), right_group),
     "outside_the_mesh"),
    ((by_modulo, right_group), "first_dimension_fastest"),
    (places(lambda own, *_: own[::-1]), "reversed_order"),
    (places(lambda own, *_: tuple(place + 1 for place in own)), "counts_from_one"),
    (places(lambda own, rank, sizes: (*own[:-1], rank)), "outside_the_mesh"),
    (places(lambda own, *_: own[:2]), "wrong_count dimensions"),
    (places(lambda own, *_: [float("nan")] * len(own)), "not_a_number nan"),
    (places(lambda own, *_: tuple(place + 0.5 for place in own)), "not_a_number"),
    (groups(lambda own, *_: None), "wrong_type"),
    (groups(lambda own, *_: own[1:]), "own_rank_missing"),
    (groups(lambda own, rank, *_: [other for other in own if other != rank]), "own_rank_missing"),
    (groups(lambda own, *_: own[::-1]), "wrong_order"),
    (groups(lambda own, rank, dimension, sizes: right_group(
        rank, len(sizes) - 1 - dimension, sizes)), "wrong_count group"),
    (groups(lambda own, rank, dimension, sizes: list(range(
        rank // sizes[dimension] * sizes[dimension],
        rank // sizes[dimension] * sizes[dimension] + sizes[dimension]))), "wrong_group"),
    (groups(lambda own, rank, dimension, sizes: list(range(sizes[dimension]))),
     "wrong_group")]
RIGHT = [
    (lambda rank, sizes: np.unravel_index(rank, sizes), right_group),
    (by_torch, group_by_torch),
    (lambda rank, sizes: list(right_coordinates(rank, sizes)), group_by_looking)]


@pytest.mark.parametrize("answers, expected", WRONG)
def test_wrong(answers, expected):
    assert_rejected(lab.check_mesh(*answers), expected)


@pytest.mark.parametrize("answers", RIGHT)
def test_right(answers):
    verdict = lab.check_mesh(*answers)
    assert verdict.passed is True, str(verdict)


def test_what_is_not_filled_in_waits():
    assert_waits(lab.check_mesh, "7.21", functions=2)
