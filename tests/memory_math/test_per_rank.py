"""What the check of exercise 1.3 must reject, and what it must accept."""

import math
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


class Fewest:
    def everything_divided(count, recipe, stage, room):
        return math.ceil(count * sum(recipe) / room)

    def rounded_down(count, recipe, stage, room):
        found = right.fewest_ranks(count, recipe, stage, room)
        return found and max(1, found - 1)

    def one_more(count, recipe, stage, room):
        found = right.fewest_ranks(count, recipe, stage, room)
        return found and found + (stage > 0)

    def not_rounded(count, recipe, stage, room):
        divided = sum(count * size for size, at in zip(recipe, (3, 2, 1), strict=True)
                      if stage >= at)
        left = room - count * sum(recipe) + divided
        return None if left < 0 or left == 0 < divided else divided / left if divided else 1

    def negative(count, recipe, stage, room):
        divided = sum(count * size for size, at in zip(recipe, (3, 2, 1), strict=True)
                      if stage >= at)
        left = room - count * sum(recipe) + divided
        return math.ceil(divided / left) if left else 1

    def infinity(count, recipe, stage, room):
        found = right.fewest_ranks(count, recipe, stage, room)
        return float("inf") if found is None else found

    def zero_for_none(count, recipe, stage, room):
        return right.fewest_ranks(count, recipe, stage, room) or 0

    def strictly(count, recipe, stage, room):
        for ranks in range(1, 2000):
            if sum(right.per_rank(count, recipe, stage, ranks)) < room:
                return ranks
        return None

    def always_stage_3(count, recipe, stage, room):
        return right.fewest_ranks(count, recipe, 3, room)

    def at_least_two(count, recipe, stage, room):
        found = right.fewest_ranks(count, recipe, stage, room)
        return found and max(2, found)

    def powers_of_two(count, recipe, stage, room):
        for power in range(20):
            if sum(right.per_rank(count, recipe, stage, 2**power)) <= room:
                return 2**power
        return None

    def none_at_once(count, recipe, stage, room):
        return None

    def kept_counted_twice(count, recipe, stage, room):
        kept = sum(count * size for size, at in zip(recipe, (3, 2, 1), strict=True) if stage < at)
        return math.ceil(count * sum(recipe) / (room - kept)) if kept < room else None

    def a_tuple(count, recipe, stage, room):
        return right.fewest_ranks(count, recipe, stage, room), stage


FEWEST = [
    (Fewest.everything_divided, "impossible_room"),
    (Fewest.rounded_down, "one_rank_too_few"),
    (Fewest.one_more, "equal_does_not_fit"),
    (Fewest.not_rounded, "everything_divided"),
    (Fewest.negative, "impossible_room"),
    (Fewest.infinity, "impossible_room"),
    (Fewest.zero_for_none, "impossible_room"),
    (Fewest.strictly, "equal_does_not_fit"),
    (Fewest.always_stage_3, "impossible_room"),
    (Fewest.at_least_two, "equal_does_not_fit 10B"),
    (Fewest.powers_of_two, "wrong_number fewest"),
    (Fewest.none_at_once, "nothing_returned"),
    (Fewest.kept_counted_twice, "undivided_part_twice"),
    (Fewest.a_tuple, "impossible_room tuple")]
WRONG = [
    *(((answer, right.fewest_ranks), words) for answer, words in [
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
    (Rank.in_gb, "wrong_number")]),
    *(((right.per_rank, answer), words) for answer, words in FEWEST)]


@pytest.mark.parametrize("answers, expected", WRONG)
def test_wrong(answers, expected):
    assert_rejected(lab.check_per_rank(*answers), expected)


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

    def fewest_by_search(count, recipe, stage, room):
        if sum(right.per_rank(count, recipe, stage, 10**15)) > room + 1e-3:
            return None
        ranks = 1
        while sum(right.per_rank(count, recipe, stage, ranks)) > room:
            ranks += 1
            if ranks > 10**4:
                return None
        return ranks

    def per_rank_in_float32(count, recipe, stage, ranks):
        divisors = torch.tensor([ranks if stage >= first else 1 for first in (3, 2, 1)])
        return torch.tensor(recipe, dtype=torch.float32) * count / divisors

    def per_rank_as_array(count, recipe, stage, ranks):
        return np.multiply(recipe, count) / np.where(np.array([3, 2, 1]) <= stage, ranks, 1)

    def per_rank_as_fractions(count, recipe, stage, ranks):
        return [Fraction(int(count) * size, ranks if stage >= first else 1)
                for size, first in zip(recipe, (3, 2, 1), strict=True)]

    def fewest_of_numpy(count, recipe, stage, room):
        found = right.fewest_ranks(count, recipe, stage, room)
        return found if found is None else np.float64(found)


@pytest.mark.parametrize("answers", [
    [right.per_rank, right.fewest_ranks],
    [Right.per_rank_in_float32, right.fewest_ranks],
    [Right.per_rank_as_array, right.fewest_ranks],
    [Right.per_rank_as_fractions, right.fewest_ranks],
    [shares(3, 2, 1), Right.fewest_by_search],
    [Right.per_rank_by_cases, Right.fewest_of_numpy]])
def test_a_right_answer_passes(answers):
    verdict = lab.check_per_rank(*answers)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_per_rank, "1.3", functions=2)
