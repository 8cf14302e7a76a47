"""What the check of exercise 2.6 must reject, and what it must accept."""

import sys
import threading

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
    finish,
    finish_after_sleeping,
    flattened,
    give,
    pieces,
    rejected,
    right,
    start,
    zeros,
)

import labs.manual_ddp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["ddp_answers"])
# slow: the first case of a group tries all answers of the group, in one launch
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]


# 2.6 start and finish


class Bucket:
    def two_calls(bucket):
        flat, handle = start(bucket)
        dist.all_reduce(flat.clone())
        return flat, handle

    def waits_in_start(bucket):
        flat, handle = start(bucket)
        handle.wait()
        return flat, handle

    def returns_nothing(bucket):
        start(bucket)

    def returns_one(bucket):
        return start(bucket)[0]

    def synchronous(bucket):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                          for p in bucket])
        dist.all_reduce(flat)
        return flat, torch.futures.Future()

    def one_call_each(bucket):
        works = [dist.all_reduce(p.grad, async_op=True) for p in zeros(bucket)]
        return None, works

    def none_left_out(bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket if p.grad is not None])
        return flat, dist.all_reduce(flat, async_op=True)

    def last_one_dropped(bucket):
        return start(bucket[:-1])

    def nothing(bucket):
        return None, None

    def does_not_wait(bucket, flat, handle):
        for parameter, piece in zip(bucket, pieces(bucket, flat / N()), strict=True):
            parameter.grad = piece.view_as(parameter)

    def a_sum(bucket, flat, handle):
        handle.wait()
        for parameter, piece in zip(bucket, pieces(bucket, flat), strict=True):
            parameter.grad = piece.view_as(parameter)

    def not_put_back(bucket, flat, handle):
        handle.wait()
        flat /= N()

    def stays_flat(bucket, flat, handle):
        handle.wait()
        for parameter, piece in zip(bucket, pieces(bucket, flat / N()), strict=True):
            parameter.grad = piece.clone().view(*parameter.shape, 1)

    def in_the_wrong_order(bucket, flat, handle):
        finish(bucket[::-1], flat, handle)

    def kept_from_the_first_call(bucket):
        """The flat tensor is made once, and filled once."""
        if not hasattr(bucket[0], "flat"):
            bucket[0].flat = flattened(bucket)
        flat = bucket[0].flat.clone()
        return flat, dist.all_reduce(flat, async_op=True)

    def one_flat_for_all(bucket):
        """All buckets share one tensor, which the second overwrites while the first is sent."""
        shared = kept.setdefault(bucket[0].dtype, torch.zeros(100, dtype=bucket[0].dtype))
        other = kept.setdefault("any", shared.double())
        other[:31] = flattened(bucket)
        flat = other[:31]
        return flat, dist.all_reduce(flat, async_op=True)

    def in_float32(bucket):
        flat = torch.zeros(sum(p.numel() for p in bucket))
        torch.cat([p.grad.flatten().float() for p in zeros(bucket)], out=flat)
        return flat, dist.all_reduce(flat, async_op=True)

    def waits_by_future(bucket):
        flat, work = start(bucket)
        work.get_future().wait()
        return flat, work

    def waits_by_polling(bucket):
        flat, work = start(bucket)
        while not work.is_completed():
            pass
        return flat, work

    def waits_by_use(bucket):
        flat = functional.all_reduce(flattened(bucket), "sum", dist.group.WORLD)
        return flat + 0, None

    def waits_in_a_thread(bucket):
        flat, work = start(bucket)
        thread = threading.Thread(target=work.wait)
        thread.start()
        thread.join()
        return flat, work

    def skips_what_is_none(bucket):
        if all(p.grad is None for p in bucket):
            return None, None
        return start(bucket)

    def reduced_only(bucket):
        flat = flattened(bucket)
        return flat, dist.reduce(flat, dst=0, async_op=True)

    def waits_without_a_call(bucket, flat, handle):
        handle.wait  # noqa: B018
        flat /= N()
        give(bucket, flat)

    def divides_first(bucket, flat, handle):
        flat /= N()
        handle.wait()
        give(bucket, flat)

    def into_what_is_there(bucket, flat, handle):
        handle.wait()
        for parameter, piece in zip(bucket, pieces(bucket, flat / N()), strict=True):
            parameter.grad.copy_(piece.view_as(parameter))

    def skips_what_was_none(bucket, flat, handle):
        handle.wait()
        for parameter, piece in zip(bucket, pieces(bucket, flat / N()), strict=True):
            if parameter.grad is not None:
                parameter.grad = piece.view_as(parameter)

    def first_parameter_only(bucket, flat, handle):
        handle.wait()
        bucket[0].grad = (flat / N())[:bucket[0].numel()].view_as(bucket[0])

    def takes_no_handle(bucket, flat):
        give(bucket, flat / N())


kept = {}
WRONG_PAIRS = [
    (Bucket.nothing, finish, "wrong_collective"),
    (Bucket.two_calls, finish, "wrong_collective"),
    (Bucket.waits_in_start, finish, "waits_too_early"),
    (Bucket.returns_nothing, finish, "wrong_type"),
    (Bucket.returns_one, finish, "wrong_type Tensor"),
    (Bucket.synchronous, finish, "waits_too_early"),
    (Bucket.one_call_each, finish, "wrong_collective"),
    (Bucket.none_left_out, finish, "collectives_differ", ALONE),
    (Bucket.last_one_dropped, finish, "too_little_sent"),
    (start, Bucket.does_not_wait, "never_waited"),
    (start, Bucket.a_sum, "sum_not_mean"),
    (start, Bucket.not_put_back, "gradient_of_one_rank"),
    (start, Bucket.stays_flat, "raised_RuntimeError"),
    (start, Bucket.in_the_wrong_order, "wrong_gradient"),
    (Bucket.kept_from_the_first_call, finish, "wrong_gradient"),
    (Bucket.one_flat_for_all, finish, "wrong_dtype torch.float32"),
    (Bucket.in_float32, finish, "wrong_dtype torch.float64"),
    (Bucket.waits_by_future, finish, "waits_too_early"),
    (Bucket.waits_by_polling, finish, "waits_too_early"),
    (Bucket.waits_by_use, finish, "waits_too_early"),
    (Bucket.waits_in_a_thread, finish, "waits_too_early"),
    (Bucket.skips_what_is_none, finish, "collectives_differ|wrong_collective", ALONE),
    (Bucket.reduced_only, finish, "wrong_collective"),
    (start, Bucket.waits_without_a_call, "never_waited"),
    (start, finish_after_sleeping, "never_waited"),
    (start, Bucket.divides_first, "waits_too_late"),
    (start, Bucket.into_what_is_there, "raised_AttributeError gradient", ALONE),
    (start, Bucket.skips_what_was_none, "gradient_missing", ALONE),
    (start, Bucket.first_parameter_only, "gradient_of_one_rank"),
    (start, Bucket.takes_no_handle, "raised_TypeError")]
WRONG_ANSWERS = Answers([
    *((lab.check_bucket, (begin, end), *more) for begin, end, *more in WRONG_PAIRS)])


@pytest.mark.parametrize("number", **WRONG_ANSWERS.parameters)
def test_wrong(number, request):
    rejected(WRONG_ANSWERS.verdict(number, request), WRONG_ANSWERS.rows[number][2])


# right, and written in another way


class Right:
    def start_in_place(bucket):
        flat = bucket[0].new_empty(sum(p.numel() for p in bucket), requires_grad=False)
        offset = 0
        for parameter in bucket:
            end = offset + parameter.numel()
            flat[offset:end] = 0 if parameter.grad is None else parameter.grad.flatten()
            offset = end
        return [dist.all_reduce(flat, async_op=True), flat]

    def finish_in_place(bucket, work, flat):
        work.wait()
        for parameter, piece in zip(bucket, pieces(bucket, flat), strict=True):
            parameter.grad = (piece / N()).reshape(parameter.shape)

    def start_future(bucket):
        flat = flattened(bucket) / N()
        return flat, dist.all_reduce(flat, async_op=True).get_future()

    def finish_future(bucket, flat, future):
        future.wait()
        give(bucket, flat)

    def start_then(bucket):
        work = dist.all_reduce(flattened(bucket), async_op=True)
        return [work.get_future().then(lambda done: done.value()[0] / N())]

    def finish_then(bucket, future):
        give(bucket, future.wait())

    def start_functional(bucket):
        return flattened(bucket), functional.all_reduce(flattened(bucket), "sum",
                                                        dist.group.WORLD)

    def finish_functional(bucket, _, summed):
        give(bucket, functional.wait_tensor(summed) / N())

    def finish_by_use(bucket, _, summed):
        """Divides nothing that is waited for here: whoever reads a gradient waits."""
        give(bucket, summed / N())

    def start_list(bucket):
        gradients = [p.grad for p in zeros(bucket)]
        return gradients, dist.all_reduce_coalesced(gradients, async_op=True)

    def finish_list(bucket, gradients, work):
        work.wait()
        for parameter, gradient in zip(bucket, gradients, strict=True):
            parameter.grad = gradient / N()

    def start_cached(bucket):
        if not hasattr(bucket[0], "flat"):
            bucket[0].flat = torch.empty_like(flattened(bucket))
        flat = bucket[0].flat
        flat.copy_(flattened(bucket))
        return flat, dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True)

    def finish_polling(bucket, flat, work):
        while not work.is_completed():
            pass
        give(bucket, flat.clone())


RIGHT_ANSWERS = Answers([
    *((lab.check_bucket, pair) for pair in (
        (right.start, right.finish), (Right.start_in_place, Right.finish_in_place),
        (Right.start_future, Right.finish_future), (Right.start_then, Right.finish_then),
        (Right.start_functional, Right.finish_functional),
        (Right.start_functional, Right.finish_by_use), (Right.start_list, Right.finish_list),
        (Right.start_cached, Right.finish_polling)))], ranks=(3, 2, 4))


@pytest.mark.parametrize("number", **RIGHT_ANSWERS.parameters)
def test_right(number, request):
    accepted(RIGHT_ANSWERS.verdict(number, request))
