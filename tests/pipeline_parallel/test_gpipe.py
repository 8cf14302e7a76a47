"""What the check of exercise 7.14 must reject, and what it must accept."""

from itertools import accumulate

import numpy as np
import pytest
from _build.definitions import definitions
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

peak_in_flight = definitions("07b_pipeline_parallel").peak_in_flight
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
    assert_rejected(lab.check_gpipe(answer, peak_in_flight), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_gpipe(answer, peak_in_flight)
    assert verdict.passed, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_gpipe, "7.14", functions=2)


def kinds_of(actions):
    return [action.kind for action in actions]


def counts(actions):
    """How many micro-batches are in flight after each action."""
    return list(accumulate(1 if action.kind == "F" else -1 for action in actions))


WRONG_PEAKS = named(
    nothing=(lambda actions: None, "not_a_number"),
    always_4=(lambda actions: 4, "wrong_number"),
    forwards=(lambda actions: kinds_of(actions).count("F"), "never_freed"),
    actions=(len, "actions_counted"),
    at_the_end=(lambda actions: counts(actions)[-1], "end_not_peak"),
    after_backwards=(lambda actions: max(
        count for kind, count in zip(kinds_of(actions), counts(actions), strict=True)
        if kind == "B"), "peak_missed"),
    before_the_first_backward=(lambda actions: kinds_of(actions).index("B"), "first_forwards"),
    without_a_backward_between=(lambda actions: max(map(len, "".join(
        kinds_of(actions)).split("B"))), "longest_run"),
    one_less=(lambda actions: max(counts(actions)) - 1, "wrong_number|peak_missed"),
    one_more=(lambda actions: max(counts(actions)) + 1, "wrong_number"),
    all_numbers=(counts, "not_a_number"))


@pytest.mark.parametrize("answer, expected", WRONG_PEAKS)
def test_wrong_peak(answer, expected):
    assert_rejected(lab.check_gpipe(gpipe, answer), expected)


def by_micro_batch(actions):
    """A set of what is in memory."""
    memory, peak = set(), 0
    for action in actions:
        (memory.add if action.kind == "F" else memory.discard)(action.micro_batch)
        peak = max(peak, len(memory))
    return peak


@pytest.mark.parametrize("answer", [
    lambda actions: max(counts(actions)), by_micro_batch,
    lambda actions: np.cumsum([1 if kind == "F" else -1 for kind in kinds_of(actions)]).max()])
def test_right_peak(answer):
    verdict = lab.check_gpipe(gpipe, answer)
    assert verdict.passed, str(verdict)


def test_gpipe_needs_memory_for_all_micro_batches():
    table = lab.show_activations(peak_in_flight, gpipe, one_f_one_b, ranks=8, activation_gb=1.25)
    assert [row[2:] for row in table.rows] == [
        ("10.0", "10.0"), ("20.0", "10.0"), ("40.0", "10.0"), ("80.0", "10.0")]
    assert [row[1] for row in table.rows] == ["47%", "30%", "18%", "10%"]


def test_the_table_waits_for_the_exercise():
    def unfilled(*_):
        raise NotImplementedError("Exercise 7.14")

    for functions in ([unfilled, gpipe], [peak_in_flight, unfilled]):
        assert "7.14" in str(lab.show_activations(*functions, ranks=8, activation_gb=1.0))
