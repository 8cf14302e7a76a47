"""What the check of exercise 7.14 must reject, and what it must accept."""

import numpy as np
import pytest
from answers import assert_rejected, assert_waits

import labs.pipeline_parallel as lab
from labs.pipeline_parallel import B, F, W
from labs.predictions.pipelines import Action
from labs.predictions.pipelines import schedules as known

WRONG, RIGHT = [], []


def lists_of(build):
    """A student's function that returns the lists of a known schedule."""
    def answer(ranks, micro_batches, chunks=1):
        sizes = (ranks, micro_batches, chunks) if build is known.interleaved else (ranks,
                                                                                   micro_batches)
        return [[{"F": F, "B": B, "W": W}[action.kind](action.micro_batch, action.stage // ranks)
                 for action in actions] for actions in build(*sizes).ranks]

    return answer


def two(answer):
    """With the signature of an exercise without chunks."""
    return lambda ranks, micro_batches: answer(ranks, micro_batches)


gpipe, one_f_one_b, zb_h1, zb_h2 = map(two, map(lists_of, (
    known.gpipe, known.one_f_one_b, known.zb_h1, known.zb_h2)))


def same_on_all(actions):
    return lambda ranks, micro_batches: [actions(micro_batches)] * ranks


def with_rank(actions):
    return lambda ranks, micro_batches: [actions(ranks, micro_batches, rank)
                                         for rank in range(ranks)]


def by_name(check, **answers):
    for name, (answer, words) in answers.items():
        WRONG.append(pytest.param(check, answer, words, id=f"{check.__name__}-{name}"))


# 7.14, GPipe: the laziest first

one_at_a_time = same_on_all(lambda m: [kind(i) for i in range(m) for kind in (F, B)])
all_on_rank_0 = with_rank(lambda p, m, rank: [] if rank else
                          [F(i) for i in range(m)] + [B(i) for i in range(m)])
by_name(
    lab.check_gpipe,
    nothing=(lambda ranks, micro_batches: None, "wrong_type nothing"),
    empty=(lambda ranks, micro_batches: [[] for _ in range(ranks)],
           "illegal_schedule"),
    all_on_rank_0=(all_on_rank_0, "illegal_schedule"),
    all_on_the_last_rank=(with_rank(lambda p, m, rank: [] if rank < p - 1 else
                                    [F(i) for i in range(m)] + [B(i) for i in range(m)]),
                          "illegal_schedule output"),
    one_at_a_time=(one_at_a_time, "one_rank_at_a_time"),
    one_batch=(same_on_all(lambda m: [F(0), B(0)]), "illegal_schedule"),
    no_backward=(same_on_all(lambda m: [F(i) for i in range(m)]),
                 "illegal_schedule"),
    backward_first=(same_on_all(lambda m: [kind(i) for kind in (B, F) for i in range(m)]),
                    "illegal_schedule"),
    for_8=(lambda ranks, micro_batches: gpipe(ranks, 8), "illegal_schedule"),
    for_4_and_8=(lambda ranks, micro_batches: gpipe(4, 8), "wrong_count"),
    from_1=(same_on_all(lambda m: [kind(i) for kind in (F, B) for i in range(1, m + 1)]),
            "illegal_schedule"),
    one_list=(lambda ranks, micro_batches: gpipe(1, micro_batches)[0],
              "wrong_count"),
    by_rank=(lambda ranks, micro_batches: dict(enumerate(gpipe(ranks, micro_batches))),
             "wrong_type dict"),
    twice=(same_on_all(lambda m: [kind(i) for kind in (F, F, B) for i in range(m)]),
           "illegal_schedule already"),
    not_called=(same_on_all(lambda m: [F] * m), "illegal_schedule"),
    tuples=(same_on_all(lambda m: [("F", i) for i in range(m)]), "illegal_schedule 'F'"),
    floats=(same_on_all(lambda m: [F(i / 1) for i in range(m)]), "raised_TypeError"),
    other_stage=(same_on_all(lambda m: [Action("F", i, 0) for i in range(m)]),
                 "illegal_schedule"),
    waits_for_pairs=(same_on_all(lambda m: [
        action for i in range(0, m, 2) for pair in [range(i, min(i + 2, m))]
        for action in [*map(F, pair), *map(B, pair)]]), "too_many_slots"),
    crossed=(with_rank(lambda p, m, rank: gpipe(1, m)[0] if rank != 1 else [
        *map(F, range(m - 1)), B(0), F(m - 1), *map(B, range(1, m))]),
        "illegal_schedule"))


def torchs_text(answer):
    """The same as text cells, with idle slots between."""
    return lambda ranks, micro_batches: [
        [cell for action in actions
         for cell in (f"{rank}{action.kind}{action.micro_batch}", None, "")]
        for rank, actions in enumerate(answer(ranks, micro_batches))]


def reversed_backwards(ranks, micro_batches):
    m = micro_batches
    return [tuple([F(np.int64(i)) for i in range(m)] + [B(i) for i in reversed(range(m))])
            for _ in range(ranks)]


RIGHT += [(lab.check_gpipe, answer) for answer in (
    gpipe, one_f_one_b, reversed_backwards, torchs_text(gpipe), zb_h1)]


@pytest.mark.parametrize("check, answer, words", WRONG)
def test_a_wrong_answer_is_rejected(check, answer, words):
    verdict = check(answer)
    print(verdict)
    assert_rejected(verdict, words)


@pytest.mark.parametrize("check, answer", RIGHT)
def test_a_right_answer_passes(check, answer):
    verdict = check(answer)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("check, exercise", [
    (lab.check_gpipe, "7.14")])
def test_an_unfilled_answer_is_waited_for(check, exercise):
    assert_waits(check, exercise)
