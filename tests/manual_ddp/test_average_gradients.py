"""What the check of exercise 2.2 must reject, and what it must accept, in its second half."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ddp_answers import (
    ALONE,
    Answers,
    N,
    accepted,
    flattened,
    give,
    rejected,
    right,
    trainable,
    zeros,
    zeros_for_none,
)

import labs.manual_ddp as lab
from labs.workers import collectives

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["ddp_answers"])
# slow: the first case of a group tries all answers of the group, in one launch
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
# 2.2 average_gradients


class Average:
    def nothing(model):
        pass

    def a_sum(model):
        for parameter in zeros_for_none(model):
            dist.all_reduce(parameter.grad)

    def only_divided(model):
        for parameter in zeros_for_none(model):
            parameter.grad /= N()

    def divided_by_two(model):
        for parameter in zeros_for_none(model):
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2

    def divided_twice(model):
        for parameter in zeros_for_none(model):
            parameter.grad /= N()
            dist.all_reduce(parameter.grad)
            parameter.grad /= N()

    def parameters_averaged(model):
        for parameter in trainable(model):
            with torch.no_grad():
                parameter += 1e-2 * dist.get_rank()
                dist.all_reduce(parameter)
                parameter /= N()

    def none_skipped(model):
        for parameter in trainable(model):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= N()

    def none_communicated(model):
        for parameter in trainable(model):
            dist.all_reduce(parameter.grad)
            parameter.grad /= N()

    def sleeps(model):
        """For longer than a rank is delayed, instead of waiting."""
        for parameter in zeros_for_none(model):
            dist.all_reduce(parameter.grad, async_op=True)
        time.sleep(0.5)
        for parameter in trainable(model):
            parameter.grad /= N()

    def reduced_to_rank_0(model):
        for parameter in zeros_for_none(model):
            dist.reduce(parameter.grad, dst=0)
            if dist.get_rank() == 0:
                parameter.grad /= N()

    def rank_0s_gradients(model):
        for parameter in zeros_for_none(model):
            dist.broadcast(parameter.grad, src=0)

    def first_parameter_only(model):
        parameter = zeros_for_none(model)[0]
        dist.all_reduce(parameter.grad)
        parameter.grad /= N()

    def everything_gathered(model):
        for parameter in zeros_for_none(model):
            everyone = [torch.empty_like(parameter.grad) for _ in range(N())]
            dist.all_gather(everyone, parameter.grad)
            parameter.grad = sum(everyone) / N()

    def frozen_too(model):
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= N()

    def torchs_ddp(model):
        torch.nn.parallel.DistributedDataParallel(model)

    def over_the_users(model):
        for parameter in trainable(model):
            used = torch.tensor(float(parameter.grad is not None))
            zeros([parameter])
            dist.all_reduce(parameter.grad)
            dist.all_reduce(used)
            parameter.grad /= used.clamp(min=1)

    def not_awaited(model):
        for parameter in zeros_for_none(model):
            parameter.grad /= N()
            dist.all_reduce(parameter.grad, async_op=True)

    def wait_without_a_call(model):
        for parameter in zeros_for_none(model):
            work = dist.all_reduce(parameter.grad, async_op=True)
            work.wait  # noqa: B018
            parameter.grad /= N()

    def what_rank_0_used(model):
        for parameter in trainable(model):
            used = torch.tensor(float(parameter.grad is not None))
            dist.broadcast(used, src=0)
            if used:
                dist.all_reduce(zeros([parameter])[0].grad)
                parameter.grad /= N()

    def tied_twice(model):
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    dist.all_reduce(zeros([parameter])[0].grad)
                    parameter.grad /= N()

    def objects_gathered(model):
        for parameter in zeros_for_none(model):
            everyone = [None] * N()
            dist.all_gather_object(everyone, parameter.grad)
            parameter.grad = sum(everyone) / N()

    def averages_and_divides(model):
        for parameter in zeros_for_none(model):
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            parameter.grad /= N()

    def the_largest(model):
        for parameter in zeros_for_none(model):
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)

    def takes_the_result(model):
        for parameter in zeros_for_none(model):
            parameter.grad = dist.all_reduce(parameter.grad) / N()

    def into_a_copy(model):
        for parameter in zeros_for_none(model):
            mean = parameter.grad / N()
            dist.all_reduce(mean)

    def matrices_only(model):
        for parameter in zeros_for_none(model):
            if parameter.dim() == 2:
                dist.all_reduce(parameter.grad)
                parameter.grad /= N()

    def from_rank_1(model):
        for parameter in zeros_for_none(model):
            dist.broadcast(parameter.grad, src=1)


WRONG = [
    (Average.nothing, "gradient_of_one_rank"),
    (Average.a_sum, "sum_not_mean"),
    (Average.only_divided, "not_summed"),
    (Average.divided_by_two, "wrong_divisor"),
    (Average.divided_twice, "mean_twice"),
    (Average.parameters_averaged, "differs_from_reference"),
    (Average.none_skipped, "collectives_differ takes", ALONE),
    (Average.none_communicated, "collectives_differ sends", ALONE),
    (Average.reduced_to_rank_0, "wrong_gradient"),
    (Average.rank_0s_gradients, "gradient_of_one_rank"),
    (Average.first_parameter_only, "gradient_of_one_rank 'first.weight'"),
    (Average.everything_gathered, "too_much_sent 1.5x"),
    (Average.frozen_too, "frozen_parameter"),
    (Average.torchs_ddp, "ready_made"),
    (Average.over_the_users, "too_much_sent"),
    (Average.not_awaited, "never_waited all-reduce"),
    (Average.wait_without_a_call, "never_waited all-reduce"),
    (Average.sleeps, "never_waited"),
    (Average.what_rank_0_used, "too_much_sent"),
    (Average.tied_twice, "too_much_sent 1.8x"),
    (Average.objects_gathered, "too_much_sent"),
    (Average.averages_and_divides, "mean_twice"),
    (Average.the_largest, "wrong_gradient"),
    (Average.takes_the_result, "raised_TypeError collective"),
    (Average.into_a_copy, "gradient_of_one_rank"),
    (Average.matrices_only, "gradient_of_one_rank"),
    (Average.from_rank_1, "gradient_of_another_rank")]
WRONG_ANSWERS = Answers([(lab.check_average_gradients, (right.broadcast_state, answer), *more)
                         for answer, *more in WRONG])


@pytest.mark.parametrize("number", **WRONG_ANSWERS.parameters)
def test_wrong(number, request):
    rejected(WRONG_ANSWERS.verdict(number, request), WRONG_ANSWERS.rows[number][2])


# right, and written in another way


class Right:
    def polls_all_in_turn(model):
        pending = {dist.all_reduce(p.grad, async_op=True): p for p in zeros_for_none(model)}
        while pending:
            for work in [work for work in pending if work.is_completed()]:
                parameter = pending.pop(work)
                parameter.grad /= N()

    def average_flat(model):
        parameters = zeros_for_none(model)
        flat = flattened(parameters) / N()
        dist.all_reduce(flat)
        give(parameters, flat)

    def average_asynchronously(model):
        works = [dist.all_reduce(p.grad, async_op=True) for p in zeros_for_none(model)]
        for work, parameter in zip(works, trainable(model), strict=True):
            work.wait()
            parameter.grad.div_(N())

    def average_by_op(model):
        for parameter in zeros_for_none(model):
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)

    def average_by_future(model):
        for parameter in zeros_for_none(model):
            future = dist.all_reduce(parameter.grad, async_op=True).get_future()
            parameter.grad = future.then(lambda done: done.value()[0] / N()).wait()

    def average_polling(model):
        works = [dist.all_reduce(p.grad, async_op=True) for p in zeros_for_none(model)]
        while not all(work.is_completed() for work in works):
            pass
        for parameter in trainable(model):
            parameter.grad /= N()

    def average_functional(model):
        for parameter in zeros_for_none(model):
            parameter.grad = functional.all_reduce(parameter.grad, "sum", dist.group.WORLD) / N()

    def average_functional_avg(model):
        for parameter in zeros_for_none(model):
            mean = functional.all_reduce(parameter.grad, "avg", dist.group.WORLD)
            parameter.grad = functional.wait_tensor(mean)

    def functional_not_waited(model):
        """Whoever reads the gradient waits."""
        for parameter in zeros_for_none(model):
            mean = functional.all_reduce(parameter.grad, "avg", dist.group.WORLD)
            parameter.grad = mean.view_as(parameter)

    def average_coalesced(model):
        with dist._coalescing_manager():
            for parameter in zeros_for_none(model):
                dist.all_reduce(parameter.grad)
        for parameter in trainable(model):
            parameter.grad /= N()

    def average_in_halves(model):
        """A reduce-scatter and an all-gather are what an all-reduce is made of."""
        parameters = zeros_for_none(model)
        flat = flattened(parameters)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % N()))
        shard = torch.empty(len(padded) // N())
        collectives.reduce_scatter_single(shard, padded)
        collectives.all_gather_single(padded, shard / N())
        give(parameters, padded[:len(flat)])

    def average_at_rank_0(model):
        for parameter in zeros_for_none(model):
            dist.reduce(parameter.grad, dst=0)
            parameter.grad /= N()
            dist.broadcast(parameter.grad, src=0)


RIGHT = [
        right.average_gradients, Right.average_flat, Right.average_asynchronously,
        Right.average_by_op, Right.average_by_future, Right.average_polling,
        Right.average_functional, Right.average_functional_avg, Right.average_coalesced,
        Right.average_in_halves, Right.functional_not_waited, Right.polls_all_in_turn,
        Right.average_at_rank_0]
RIGHT_ANSWERS = Answers([(lab.check_average_gradients, (right.broadcast_state, answer))
                         for answer in RIGHT],
                        ranks=(3, 2, 4))


@pytest.mark.parametrize("number", **RIGHT_ANSWERS.parameters)
def test_right(number, request):
    accepted(RIGHT_ANSWERS.verdict(number, request))
