"""What the check of exercise 7.14 must reject, and what it must accept."""

import numpy as np
import pytest
from answers import assert_rejected, assert_waits, named
from schedule_answers import (
    gpipe,
    one_at_a_time,
    one_f_one_b,
    same_on_all,
    torchs_text,
    with_rank,
    zb_h1,
)

import labs.pipeline_parallel as lab
from labs.pipeline_parallel import B, F
from labs.predictions.pipelines import Action

all_on_rank_0 = with_rank(lambda p, m, rank: [] if rank else
                          [F(i) for i in range(m)] + [B(i) for i in range(m)])
WRONG = named(
    nothing=(lambda ranks, micro_batches: None, "wrong_type nothing"),
    empty=(lambda ranks, micro_batches: [[] for _ in range(ranks)],
           "action_missing"),
    all_on_rank_0=(all_on_rank_0, "action_missing"),
    all_on_the_last_rank=(with_rank(lambda p, m, rank: [] if rank < p - 1 else
                                    [F(i) for i in range(m)] + [B(i) for i in range(m)]),
                          "action_missing output"),
    one_at_a_time=(one_at_a_time, "one_rank_at_a_time"),
    one_batch=(same_on_all(lambda m: [F(0), B(0)]), "action_missing"),
    no_backward=(same_on_all(lambda m: [F(i) for i in range(m)]),
                 "action_missing"),
    backward_first=(same_on_all(lambda m: [kind(i) for kind in (B, F) for i in range(m)]),
                    "wrong_order"),
    for_8=(lambda ranks, micro_batches: gpipe(ranks, 8), "no_such_micro_batch"),
    for_4_and_8=(lambda ranks, micro_batches: gpipe(4, 8), "wrong_count"),
    from_1=(same_on_all(lambda m: [kind(i) for kind in (F, B) for i in range(1, m + 1)]),
            "no_such_micro_batch"),
    one_list=(lambda ranks, micro_batches: gpipe(1, micro_batches)[0],
              "wrong_count"),
    by_rank=(lambda ranks, micro_batches: dict(enumerate(gpipe(ranks, micro_batches))),
             "wrong_type dict"),
    twice=(same_on_all(lambda m: [kind(i) for kind in (F, F, B) for i in range(m)]),
           "duplicate_action already"),
    not_called=(same_on_all(lambda m: [F] * m), "wrong_type"),
    tuples=(same_on_all(lambda m: [("F", i) for i in range(m)]), "wrong_type 'F'"),
    floats=(same_on_all(lambda m: [F(i / 1) for i in range(m)]), "raised_TypeError"),
    other_stage=(same_on_all(lambda m: [Action("F", i, 0) for i in range(m)]),
                 "wrong_rank"),
    waits_for_pairs=(same_on_all(lambda m: [
        action for i in range(0, m, 2) for pair in [range(i, min(i + 2, m))]
        for action in [*map(F, pair), *map(B, pair)]]), "too_many_slots"),
    crossed=(with_rank(lambda p, m, rank: gpipe(1, m)[0] if rank != 1 else [
        *map(F, range(m - 1)), B(0), F(m - 1), *map(B, range(1, m))]),
        "deadlock"))


def reversed_backwards(ranks, micro_batches):
    m = micro_batches
    return [tuple([F(np.int64(i)) for i in range(m)] + [B(i) for i in reversed(range(m))])
            for _ in range(ranks)]


RIGHT = [
    gpipe, one_f_one_b, reversed_backwards, torchs_text(gpipe), zb_h1]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_gpipe(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_gpipe(answer)
    assert verdict.passed, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_gpipe, "7.14")
