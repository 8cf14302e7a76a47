"""What the check of exercise 0.3 must reject, and what it must accept."""

import sys
from fractions import Fraction

import cloudpickle
import numpy as np
import pytest
import torch
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


CHECKS = {"0.3": lab.check_ring_bytes}
WRONG = {"0.3": BYTES}
RIGHT = {"0.3": [counted_up, in_whole_numbers, as_tensor, as_fraction, of_numpy]}


@pytest.mark.parametrize("exercise, answer, words, hint", [
    pytest.param(exercise, answer, words, "".join(hint),
                 id=f"{exercise}-{answer.__name__}-{number}")
    for exercise, answers in WRONG.items()
    for number, (answer, words, *hint) in enumerate(answers)])
def test_rejected_with_the_reason(exercise, answer, words, hint):
    verdict = CHECKS[exercise](answer)
    assert_rejected(verdict, words)
    assert hint in verdict.hint
    print(verdict)


@pytest.mark.parametrize("answer, words", [
    (lambda size, ranks: None, "not_a_number"),
    (lambda size, ranks: "24", "not_a_number"),
    (lambda size, ranks: float("inf"), "not_a_number inf"),
    (lambda size: size, "wrong_signature")])
def test_a_formula_that_cannot_be_drawn(answer, words):
    verdict = lab.ring_traffic(answer)
    assert_rejected(verdict, words)
    assert verdict.hint


@pytest.mark.parametrize("exercise, answer", [(exercise, answer) for exercise in RIGHT
                                              for answer in RIGHT[exercise]])
def test_right_in_another_way(exercise, answer):
    verdict = CHECKS[exercise](answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("exercise", CHECKS)
def test_unfilled_waits(exercise):
    def gap(*_):
        raise NotImplementedError(f"Exercise {exercise}")

    for answer in (gap, ...):
        verdict = CHECKS[exercise](answer)
        assert verdict.passed is None and "waiting" in verdict.sentence
