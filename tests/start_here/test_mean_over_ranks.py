"""What the check of exercise 0.1 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from answers import assert_rejected

import labs.start_here as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")


def _sum(mine):
    everyone = mine.clone()
    dist.all_reduce(everyone)
    return everyone


# 0.1: the mean over ranks


def own_value(mine):
    return mine


def sum_not_mean(mine):
    return _sum(mine)


def divided_by_two(mine):
    return _sum(mine) / 2


def only_rank_0(mine):
    mean = _sum(mine) / dist.get_world_size()
    return mean if dist.get_rank() == 0 else mine


def reduced_to_rank_0(mine):
    total = mine.clone()
    dist.reduce(total, dst=0)
    return total / dist.get_world_size() if dist.get_rank() == 0 else total * 0


def overwrites_its_argument(mine):
    dist.all_reduce(mine)
    return mine / dist.get_world_size()


def one_number_for_all(mine):
    return (_sum(mine) / dist.get_world_size()).mean()


def other_dtype(mine):
    return (_sum(mine) / dist.get_world_size()).double()


def returns_nothing(mine):
    _sum(mine)


def returns_a_word(mine):
    return "mean"


def returns_what_the_collective_returns(mine):
    return dist.all_reduce(mine.clone())


def divides_what_the_collective_returns(mine):
    return dist.all_reduce(mine.clone()) / dist.get_world_size()


def maximum(mine):
    highest = mine.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return highest


def rank_0_alone_reduces(mine):
    return _sum(mine) / dist.get_world_size() if dist.get_rank() == 0 else mine


def other_shapes(mine):
    return _sum(mine[: dist.get_rank() + 1]) / dist.get_world_size()


def never_waits(mine):
    everyone = mine.clone()
    dist.all_reduce(everyone, async_op=True)
    return everyone / dist.get_world_size()


def waits_after_the_division(mine):
    everyone = mine.clone()
    work = dist.all_reduce(everyone, async_op=True)
    mean = everyone / dist.get_world_size()
    work.wait()
    return mean


def asks_once_whether_it_is_done(mine):
    everyone = mine.clone()
    if dist.all_reduce(everyone, async_op=True).is_completed():
        return everyone / dist.get_world_size()
    return everyone / dist.get_world_size()


def average_of_integers(mine):
    everyone = mine.clone()
    dist.all_reduce(everyone)
    return everyone // dist.get_world_size()


def in_float32(mine):
    return _sum(mine.float()) / dist.get_world_size()


def sum_without_itself(mine):
    return (_sum(mine) - mine) / dist.get_world_size()


def divides_twice(mine):
    ranks = dist.get_world_size()
    return _sum(mine / ranks) / ranks


def broadcast_of_rank_0(mine):
    mean = mine.clone()
    dist.broadcast(mean, src=0)
    return mean


def mean_of_first_two(mine):
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return (everyone[0] + everyone[1]) / 2


def divides_own_then_sums_in_place(mine):
    mine /= dist.get_world_size()
    dist.all_reduce(mine)
    return mine


def sum_of_ranks(mine):
    everyone = mine + dist.get_rank()
    dist.all_reduce(everyone)
    return everyone / dist.get_world_size()


def misspelt(mine):
    return _sum(mine) / dist.get_worldsize()


MEAN = [
    (own_value, "not_summed"),
    (sum_not_mean, "sum_not_mean"),
    (divided_by_two, "wrong_divisor"),
    (only_rank_0, "result_on_one_rank returned"),
    (reduced_to_rank_0, "result_on_one_rank though"),
    (overwrites_its_argument, "changes_input"),
    (one_number_for_all, "wrong_shape"),
    (other_dtype, "wrong_dtype"),
    (returns_nothing, "nothing_returned", "Does it end with `return`?"),
    (returns_a_word, "wrong_type", "Return the tensor"),
    (returns_what_the_collective_returns, "nothing_returned", "A collective itself returns"),
    (divides_what_the_collective_returns, "raised_TypeError",
     "writes into its tensor and returns None"),
    (maximum, "wrong_output"),
    (rank_0_alone_reduces, "deadlock all_reduce"),
    (other_shapes, "collectives_differ"),
    (misspelt, "raised_AttributeError"),
    (never_waits, "never_waited", "call the handle's wait()"),
    (waits_after_the_division, "waits_too_late",
     "before you use the tensor"),
    (asks_once_whether_it_is_done, "never_waited"),
    (average_of_integers, "wrong_output"),
    (in_float32, "wrong_dtype"),
    (sum_without_itself, "wrong_output"),
    (divides_twice, "wrong_divisor"),
    (broadcast_of_rank_0, "not_summed"),
    (mean_of_first_two, "wrong_output"),
    (divides_own_then_sums_in_place, "changes_input"),
    (sum_of_ranks, "wrong_output"),
]


def mean_of_stack(mine):
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).mean(dim=0)


def shares_added(mine):
    return _sum(mine / dist.get_world_size())


def there_and_back(mine):
    total = mine.clone()
    dist.reduce(total, dst=0)
    dist.broadcast(total, src=0)
    return total.div_(dist.get_world_size())


def functional_mean(mine):
    return functional.all_reduce(mine, "sum", dist.group.WORLD) / dist.get_world_size()


def functional_result_itself(mine):
    return functional.all_reduce(mine / dist.get_world_size(), "sum", dist.group.WORLD)


def by_future(mine):
    everyone = mine.clone()
    dist.all_reduce(everyone, async_op=True).get_future().wait()
    return everyone / dist.get_world_size()


def polls(mine):
    everyone = mine.clone()
    work = dist.all_reduce(everyone, async_op=True)
    while not work.is_completed():
        pass
    return everyone / dist.get_world_size()


def coalesced(mine):
    everyone = [mine.clone()]
    dist.all_reduce_coalesced(everyone)
    return everyone[0] / dist.get_world_size()


def through_objects(mine):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return sum(everyone) / len(everyone)


def from_rank_to_rank(mine):
    ranks = dist.get_world_size()
    total, moving = mine.clone(), mine.clone()
    for _ in range(ranks - 1):
        arriving = torch.empty_like(moving)
        lab.send_recv(moving, arriving)
        moving = arriving
        total += moving
    return total / ranks


CHECKS = {"0.1": lab.check_mean_over_ranks}
WRONG = {"0.1": MEAN}
RIGHT = {"0.1": [mean_of_stack, shares_added, there_and_back, functional_mean,
                 functional_result_itself, by_future, polls, coalesced, through_objects,
                 from_rank_to_rank]}


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


@pytest.mark.parametrize("exercise, answer", [
    ("0.1", divides_what_the_collective_returns)])
def test_prints_of_a_rank_that_fails_are_shown(exercise, answer):
    def chatty(mine):
        print("length", len(mine))
        return answer(mine)

    assert CHECKS[exercise](chatty).printed.startswith("rank 0 │ length")
