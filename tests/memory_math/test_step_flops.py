"""What the check of exercise 1.5 must reject, and what it must accept."""

import numpy as np
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.memory_math as lab
from labs.training.presets import preset

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("01_memory_math", PRESET=preset("laptop"))
# 1.5 step_flops

WRONG = [((answer,), words) for answer, words in [
    (lambda b, x, h, t, c: 6 * (b + h) * t, "nothing_computed_again"),
    (lambda b, x, h, t, c: 8 * (b + h) * t, "forward_runs_twice"),
    (lambda b, x, h, t, c: (8 if c else 6) * (b + h) * t, "all_products_again"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 2 * b * t * c, "last_product_again"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 2 * (b - x + h) * t * c,
     "head_product_again|last_product_again"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 2 * (b - x) * t, "forward_runs_twice"),
    (lambda b, x, h, t, c: (12 if c else 6) * (b + h) * t, "step_done_twice"),
    (lambda b, x, h, t, c: 6 * (b + h) * t + 6 * (b - x) * t * c, "backward_computed_again"),
    (lambda b, x, h, t, c: 4 * (b + h) * t + 2 * (b - x) * t * c, "backward_like_forward"),
    (lambda b, x, h, t, c: 2 * (b + h) * t, "forward_alone"),
    (lambda b, x, h, t, c: 3 * (b + h) * t + (b - x) * t * c, "one_flop_for_two"),
    (lambda b, x, h, t, c: 6 * b * t + 2 * (b - x) * t * c, "head_missing"),
    (lambda b, x, h, t, c: 6 * (b + x + h) * t + 2 * b * t * c,
     "last_matrices_counted_twice|forward_runs_twice"),
    (lambda b, x, h, t, c: (8 if c else 6) * (b + h), "tokens_missing"),
    (lambda b, x, h, t, c: 2 * (3 * (b + h) + c * (b - x)), "tokens_missing"),
    (lambda b, x, h, t, c: 4 / 3 if c else 1, "wrong_number"),
    (lambda b, x, h, t, c: None, "not_a_number"),
    (lambda p, t, c: 6 * p * t, "wrong_signature")]]


@pytest.mark.parametrize("answers, expected", WRONG)
def test_wrong(answers, expected):
    assert_rejected(lab.check_step_flops(*answers), expected)


# right, and written in another way


class Right:
    def flops_by_phase(blocks, last, head, tokens, checkpointing):
        forward = 2 * tokens * np.array([blocks - last, last, head])
        total = 3 * forward
        if checkpointing:
            total[0] += forward[0]
        return total.sum()


@pytest.mark.parametrize("answers", [
    [Right.flops_by_phase],
    [right.step_flops],
    [lambda b, x, h, t, c: 2 * t * (3 * h + (3 + c) * b - c * x)]])
def test_a_right_answer_passes(answers):
    verdict = lab.check_step_flops(*answers)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_step_flops, "1.5")
