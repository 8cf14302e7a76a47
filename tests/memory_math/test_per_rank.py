"""What the check of exercise 1.3 must reject, and what it must accept."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.memory_math as lab
from labs.training.presets import preset

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("01_memory_math", PRESET=preset("laptop"))
# 1.3 per_rank


def shares(*first):
    """A function that divides parameters, gradients and optimizer state from these stages on."""
    def per_rank(count, recipe, stage, ranks):
        return [count * size / (ranks if stage >= at else 1)
                for size, at in zip(recipe, first, strict=True)]

    return per_rank


class Rank:
    def gradients_forgotten(count, recipe, stage, ranks):
        p, g, o = right.per_rank(count, recipe, stage, ranks)
        return p, g if stage < 2 else 0, o

    def one_parameter(count, recipe, stage, ranks):
        return right.per_rank(1, recipe, stage, ranks)

    def table(count, recipe, stage, ranks):
        known = {(7.5e9, 64), (70e9, 8)}
        if (count, ranks) not in known:
            raise KeyError(count)
        return right.per_rank(count, recipe, stage, ranks)

    def known_recipe(count, recipe, stage, ranks):
        return right.per_rank(count, (2, 2, 8 if ranks == 8 else 12), stage, ranks)

    def a_sum(count, recipe, stage, ranks):
        return sum(right.per_rank(count, recipe, stage, ranks))

    def rounded_down(count, recipe, stage, ranks):
        return [int(value) for value in right.per_rank(count, recipe, stage, ranks)]

    def in_gb(count, recipe, stage, ranks):
        return [value / 1e9 for value in right.per_rank(count, recipe, stage, ranks)]


WRONG = [
    (shares(9, 9, 9), "not_divided 560"),
    (shares(1, 1, 1),
     "divided_though_stage_keeps"),
    (shares(0, 0, 0), "divided_though_stage_keeps"),
    (shares(9, 9, 1), "not_divided"),
    (shares(9, 2, 1), "not_divided"),
    (shares(1, 2, 3), "divided_though_stage_keeps"),
    (Rank.gradients_forgotten,
     "nothing_counted missing"),
    (Rank.one_parameter,
     "wrong_number 2e-09"),
    (Rank.table, "raised_KeyError"),
    (Rank.known_recipe, "wrong_number job"),
    (Rank.a_sum, "wrong_count"),
    (Rank.rounded_down,
     "rounded"),
    (Rank.in_gb, "wrong_number")]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_per_rank(answer), expected)


# right, and written in another way


class Right:
    def per_rank_by_cases(count, recipe, stage, ranks):
        p, g, o = (size * count for size in recipe)
        if stage > 0:
            o /= ranks
        if stage > 1:
            g /= ranks
        if stage > 2:
            p /= ranks
        return [p, g, o]

    def per_rank_in_float32(count, recipe, stage, ranks):
        divisors = torch.tensor([ranks if stage >= first else 1 for first in (3, 2, 1)])
        return torch.tensor(recipe, dtype=torch.float32) * count / divisors

    def per_rank_as_array(count, recipe, stage, ranks):
        return np.multiply(recipe, count) / np.where(np.array([3, 2, 1]) <= stage, ranks, 1)

    def per_rank_as_fractions(count, recipe, stage, ranks):
        return [Fraction(int(count) * size, ranks if stage >= first else 1)
                for size, first in zip(recipe, (3, 2, 1), strict=True)]


@pytest.mark.parametrize("answer", [
    right.per_rank, Right.per_rank_in_float32, Right.per_rank_as_array,
    Right.per_rank_as_fractions, shares(3, 2, 1), Right.per_rank_by_cases])
def test_a_right_answer_passes(answer):
    verdict = lab.check_per_rank(answer)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_per_rank, "1.3")
