"""What the check of exercise 7.17 must reject, and what it must accept."""

import pytest
from answers import assert_rejected, assert_waits, named
from schedule_answers import gpipe, one_f_one_b, same_on_all, with_rank, zb_h1, zb_h2

import labs.pipeline_parallel as lab
from labs.pipeline_parallel import B, F, W
from labs.predictions.pipelines import schedules as known
from labs.predictions.pipelines.simulate import simulate


def delayed(by):
    """1F1B with W that many backwards later, the rest at the end."""
    def actions(p, m, rank):
        found = []
        for action in one_f_one_b(p, m)[rank]:
            found.append(action)
            if action.kind == "B" and action.micro_batch >= by(p, m, rank):
                found.append(W(action.micro_batch - by(p, m, rank)))
        return found + [W(i) for i in range(max(0, m - by(p, m, rank)), m)]

    return with_rank(actions)


def w_when_full(ranks, micro_batches):
    """A W only where an F needs its memory, the rest at the end."""
    lists = []
    for actions in one_f_one_b(ranks, micro_batches):
        found, waiting, in_flight = [], [], 0
        for action in actions:
            if action.kind == "F" and in_flight == ranks:
                found.append(W(waiting.pop(0)))
                in_flight -= 1
            in_flight += action.kind == "F"
            waiting += [action.micro_batch] * (action.kind == "B")
            found.append(action)
        lists.append(found + [W(i) for i in waiting])
    return lists


WRONG = named(
    no_w=(one_f_one_b, "backward_not_split"),
    gpipe=(gpipe, "backward_not_split"),
    w_at_once=(delayed(lambda p, m, rank: 0), "w_at_once"),
    w_at_the_end=(delayed(lambda p, m, rank: m), "w_at_the_end"),
    w_two_later=(delayed(lambda p, m, rank: 2 * rank), "too_many_slots rank 3 has 7 W"),
    w_when_full=(w_when_full, "too_many_slots many"),
    w_one_later=(delayed(lambda p, m, rank: min(rank, 1)), "too_many_slots few"),
    w_before_b=(with_rank(lambda p, m, rank: [
        other for action in one_f_one_b(p, m)[rank] for other in
        ([W(action.micro_batch), action] if action.kind == "B" else [action])]),
        "wrong_order"),
    zb_h2=(zb_h2, "too_many_in_flight"),
    delayed_the_wrong_way_round=(delayed(lambda p, m, rank: p - 1 - rank),
                                 "too_many_slots|too_many_in_flight"),
    some_w_forgotten=(with_rank(lambda p, m, rank: zb_h1(p, m)[rank][:-rank or None]),
                      "backward_not_split no W("),
    one_at_a_time=(same_on_all(lambda m: [kind(i) for i in range(m) for kind in (F, B, W)]),
                   "too_many_slots"),
    w_without_b=(with_rank(lambda p, m, rank: [action for action in zb_h1(p, m)[rank]
                                               if action.kind != "B"]), "action_missing without"))


def last_w_first(ranks, micro_batches):
    """ZB-H1 with the W at the end of each list in another order."""
    lists = []
    for actions in zb_h1(ranks, micro_batches):
        end = len(actions)
        while end and actions[end - 1].kind == "W":
            end -= 1
        lists.append(actions[:end] + actions[end:][::-1])
    return lists


RIGHT = [
    zb_h1, delayed(lambda p, m, rank: rank), last_w_first]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_zb_h1(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_zb_h1(answer)
    assert verdict.passed, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_zb_h1, "7.17")


def test_what_7_17_needs_of_7_15_is_waited_for():
    def unfilled(ranks, micro_batches):
        raise NotImplementedError("Exercise 7.15")

    verdict = lab.check_zb_h1(lambda ranks, micro_batches: unfilled(ranks, micro_batches))
    assert verdict.passed is None and "waits for Exercise 7.15" in str(verdict)


def test_w_at_once_is_between_1f1b_and_zb_h1():
    """The text says so: splitting alone saves p - 1 slots, W at the end as many."""
    lengths = [simulate(known.Schedule.from_lists(answer(4, 8), 8)).makespan for answer in (
        one_f_one_b, delayed(lambda p, m, rank: 0), zb_h1)]
    assert lengths == [33, 30, 27]
