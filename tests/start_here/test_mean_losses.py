"""What the check of exercise 0.4 must reject, and what it must accept."""

import sys
from fractions import Fraction

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from answers import assert_rejected

import labs.start_here as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")


def _sum(mine):
    everyone = mine.clone()
    dist.all_reduce(everyone)
    return everyone


def _means(losses):
    return [_sum(torch.tensor(loss)).item() / dist.get_world_size() for loss in losses]


def _fewest(losses):
    steps = torch.tensor(len(losses))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    return steps.item()


def _dropped(losses):
    dropped = torch.tensor(len(losses) - _fewest(losses))
    dist.all_reduce(dropped)
    return dropped.item()


class AndZero:
    """A wrong answer with a number beside its means that no collective has made: the means are
    judged first."""

    def __init__(self, means):
        self.means, self.__name__ = means, means.__name__

    def __call__(self, losses):
        return self.means(losses), 0


class AndDropped(AndZero):
    """The same with the right number."""

    def __call__(self, losses):
        return self.means(losses), _dropped(losses)


# 0.4: stop together


def does_not_agree(losses):
    return _means(losses)


def always_two(losses):
    return _means(losses[:2])


def longest(losses):
    steps = torch.tensor(len(losses))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return _means(losses + [0.0] * (steps.item() - len(losses)))


def sums_together(losses):
    return [mean * dist.get_world_size() for mean in _means(losses[: _fewest(losses)])]


def own_losses(losses):
    return losses[: _fewest(losses)]


def last_batches(losses):
    return _means(losses[-_fewest(losses) :])


def rank_0_decides(losses):
    steps = torch.tensor(len(losses))
    dist.broadcast(steps, src=0)
    return _means(losses[: steps.item()])


def all_steps_of_all_ranks(losses):
    steps = torch.tensor(len(losses))
    dist.all_reduce(steps)
    return _means(losses[: steps.item()])


def runs_out_of_losses(losses):
    steps = torch.tensor(len(losses))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return _means([losses[step] for step in range(steps.item())])


def takes_what_the_collective_returns(losses):
    steps = dist.all_reduce(torch.tensor(len(losses)), op=dist.ReduceOp.MIN)
    return _means([losses[step] for step in range(steps)])


def no_numbers(losses):
    return [None] * _fewest(losses)


def not_a_number(losses):
    return [float("nan")] * _fewest(losses)


def rank_0_returns(losses):
    means = _means(losses[: _fewest(losses)])
    return means if dist.get_rank() == 0 else None


def first_batches_of_own(losses):
    return [loss / dist.get_world_size() for loss in losses[: _fewest(losses)]]


def never_waits_for_the_fewest(losses):
    steps = torch.tensor(len(losses))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN, async_op=True)
    return _means(losses[: _fewest(losses)])


def one_step_less(losses):
    return _means(losses[: _fewest(losses) - 1])


def of_all_that_each_has(losses):
    return _means(losses[: _fewest(losses)]) + losses[_fewest(losses):]


def sums_of_steps(losses):
    means = _means(losses[: _fewest(losses)])
    return [sum(means[: step + 1]) for step in range(len(means))]


def one_number(losses):
    means = _means(losses[: _fewest(losses)])
    return sum(means) / len(means)


def a_dictionary(losses):
    return dict(enumerate(_means(losses[: _fewest(losses)])))


def largest_loss(losses):
    return [_largest(loss) for loss in losses[: _fewest(losses)]]


def _largest(loss):
    highest = torch.tensor(loss)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return highest.item()


def averages_the_number_of_steps(losses):
    steps = _sum(torch.tensor(len(losses))) // dist.get_world_size()
    return _means(losses[:steps])


def in_words(losses):
    return [f"{mean}" for mean in _means(losses[: _fewest(losses)])]


def mean_over_steps(losses):
    means = _means(losses[: _fewest(losses)])
    return [sum(means) / len(means)] * len(means)


def running_mean(losses):
    return [sum(losses[: step + 1]) / (step + 1) for step in range(_fewest(losses))]


LOSSES = [
    (does_not_agree, "deadlock all_reduce", "Agree on the number of steps first"),
    (always_two, "wrong_count"),
    (longest, "wrong_count"),
    (sums_together, "sum_not_mean"),
    (own_losses, "not_summed rank's"),
    (last_batches,
     "wrong_number mean"),
    (rank_0_decides, "deadlock all_reduce", "Agree on the number of steps first"),
    (all_steps_of_all_ranks, "deadlock all_reduce",
     "a collective can take a minimum"),
    (runs_out_of_losses, "raised_IndexError",
     "a collective can take a minimum"),
    (takes_what_the_collective_returns, "raised_TypeError",
     "writes into its tensor and returns None"),
    (no_numbers, "not_a_number",
     "one mean for each step"),
    (not_a_number, "not_a_number"),
    (rank_0_returns, "wrong_type nothing"),
    (mean_over_steps, "wrong_number mean"),
    (running_mean, "not_summed rank's"),
    (first_batches_of_own, "wrong_number mean"),
    (never_waits_for_the_fewest, "never_waited", "wait()"),
    (one_step_less, "wrong_count"),
    (of_all_that_each_has, "wrong_count"),
    (sums_of_steps, "wrong_number mean"),
    (one_number, "wrong_type float"),
    (a_dictionary, "wrong_type dict"),
    (largest_loss, "wrong_number mean"),
    (averages_the_number_of_steps, "deadlock all_reduce", "Agree on the number of steps"),
    (in_words, "not_a_number"),
]


def as_a_tensor(losses):
    return torch.tensor(_means(losses[: _fewest(losses)]))


def as_an_array(losses):
    return np.array(_means(losses[: _fewest(losses)]))


def as_fractions(losses):
    return tuple(Fraction(mean) for mean in _means(losses[: _fewest(losses)]))


def one_by_one(losses):
    for loss in losses[: _fewest(losses)]:
        yield _sum(torch.tensor(loss, dtype=torch.float64)) / dist.get_world_size()


def one_all_reduce_for_all(losses):
    kept = torch.tensor(losses[: _fewest(losses)])
    dist.all_reduce(kept, async_op=True).wait()
    return list(kept / dist.get_world_size())


def agrees_first(losses):
    return _means(losses[: _fewest(losses)])


def gathers_all(losses):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    return [sum(step) / len(step) for step in zip(*everyone, strict=False)]


def asks_before_each_step(losses):
    means = []
    while True:
        more = torch.tensor(int(len(means) < len(losses)))
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        if not more:
            return means
        means += _means([losses[len(means)]])


# the number of dropped batches


def means_alone(losses):
    return _means(losses[: _fewest(losses)])


def dropped_on_this_rank(losses):
    steps = _fewest(losses)
    return _means(losses[:steps]), len(losses) - steps


def dropped_on_the_longest(losses):
    most = torch.tensor(len(losses))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return agrees_first(losses), most.item() - _fewest(losses)


def drops_nothing(losses):
    return agrees_first(losses), 0


def all_batches(losses):
    return agrees_first(losses), _sum(torch.tensor(len(losses))).item()


def batches_of_the_steps(losses):
    return agrees_first(losses), _fewest(losses) * dist.get_world_size()


def dropped_on_average(losses):
    return agrees_first(losses), _dropped(losses) / dist.get_world_size()


def dropped_on_rank_0(losses):
    left = torch.tensor(len(losses) - _fewest(losses))
    dist.reduce(left, dst=0)
    return agrees_first(losses), left.item() if dist.get_rank() == 0 else None


def the_losses_that_are_left(losses):
    return agrees_first(losses), losses[_fewest(losses):]


def in_another_order(losses):
    return _dropped(losses), agrees_first(losses)


def rank_0_alone_counts(losses):
    return agrees_first(losses), _dropped(losses) if dist.get_rank() == 0 else 0


DROPPED = [
    (means_alone, "wrong_count|wrong_type", "the number of dropped batches"),
    (drops_nothing, "wrong_number dropped"),
    (dropped_on_this_rank, "not_summed this rank"),
    (dropped_on_the_longest, "longest_rank_only|not_summed"),
    (all_batches, "all_batches_counted"),
    (batches_of_the_steps, "kept_not_dropped"),
    (dropped_on_average, "averaged"),
    (dropped_on_rank_0, "not_a_number nothing"),
    (the_losses_that_are_left, "not_a_number"),
    (in_another_order, "wrong_type int"),
    (rank_0_alone_counts, "deadlock"),
]


def numbers_in_one_tensor(losses):
    own = torch.tensor([len(losses), -len(losses)])
    least = own.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(own)
    return [_means(losses[: least[0].item()]), own[0] - dist.get_world_size() * least[0]]


def counts_while_others_train(losses):
    means, more = [], 1
    while more:
        flag = torch.tensor([int(len(means) < len(losses))])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        if more := flag.item():
            means += _means([losses[len(means)]])
    return means, float(_sum(torch.tensor(len(losses[len(means):]))))


CHECKS = {"0.4": lab.check_mean_losses}
# Two steps are right for some ranks, so the number has to be right, too.
WRONG = {"0.4": [(AndDropped(means) if means is always_two else AndZero(means), *why)
                 for means, *why in LOSSES] + DROPPED}
RIGHT = {"0.4": [*map(AndDropped, [
    agrees_first, gathers_all, asks_before_each_step, as_a_tensor, as_an_array, as_fractions,
    one_by_one, one_all_reduce_for_all]), numbers_in_one_tensor, counts_while_others_train]}


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


@pytest.mark.parametrize("exercise, answer", [
    pytest.param(exercise, answer, id=f"{exercise}-{answer.__name__}")
    for exercise in RIGHT for answer in RIGHT[exercise]])
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
