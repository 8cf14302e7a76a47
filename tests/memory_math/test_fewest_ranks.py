"""What the check of exercise 1.10 must reject, and what it must accept."""

import math

import numpy as np
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.memory_math as lab
from labs.training.presets import preset

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("01_memory_math", PRESET=preset("laptop"))


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


WRONG = [
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


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_fewest_ranks(answer), expected)


# right, and written in another way


class Right:
    def fewest_by_search(count, recipe, stage, room):
        if sum(right.per_rank(count, recipe, stage, 10**15)) > room + 1e-3:
            return None
        ranks = 1
        while sum(right.per_rank(count, recipe, stage, ranks)) > room:
            ranks += 1
            if ranks > 10**4:
                return None
        return ranks

    def fewest_of_numpy(count, recipe, stage, room):
        found = right.fewest_ranks(count, recipe, stage, room)
        return found if found is None else np.float64(found)


@pytest.mark.parametrize("answer", [
    right.fewest_ranks, Right.fewest_by_search, Right.fewest_of_numpy])
def test_a_right_answer_passes(answer):
    verdict = lab.check_fewest_ranks(answer)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_fewest_ranks, "1.10")
