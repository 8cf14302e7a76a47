"""What the check of exercise 2.8 must reject, and what it must accept."""

import contextlib
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from ddp_answers import (
    ALONE,
    Answers,
    OverlappedDDP,
    accepted,
    finish,
    finish_after_sleeping,
    rejected,
    right,
    start,
    trainable,
    wrapping,
)

import labs.manual_ddp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["ddp_answers"])
# slow: the first case of a group tries all answers of the group, in one launch
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
# 2.8 no_sync


def no_sync_by(function):
    class Wrong(OverlappedDDP):
        no_sync = contextlib.contextmanager(function)

    return wrapping(Wrong)


def does_nothing(self):
    yield


def never_raised_again(self):
    self.synchronize = False
    yield


def not_after_an_exception(self):
    self.synchronize = False
    yield
    self.synchronize = True


def drops_what_was_accumulated(self):
    self.synchronize = False
    try:
        yield
    finally:
        self.synchronize = True
        self.module.zero_grad()


def own_gradients_lost(self):
    self.synchronize = False
    def clear(parameter):
        parameter.grad = None

    hooks = [p.register_post_accumulate_grad_hook(clear) for p in trainable(self.module)]
    try:
        yield
    finally:
        self.synchronize = True
        [hook.remove() for hook in hooks]


def not_a_generator(self):
    self.synchronize = False


def other_flag(self):
    self.require_backward_grad_sync = False
    try:
        yield
    finally:
        self.require_backward_grad_sync = True


def always_up_again(self):
    """What an inner block leaves behind ends the outer one."""
    self.synchronize = False
    try:
        yield
    finally:
        self.synchronize = True


def keeps_errors_back(self):
    self.synchronize = False
    with contextlib.suppress(Exception):
        yield
    self.synchronize = True


def averages_on_leaving(self):
    before, self.synchronize = self.synchronize, False
    try:
        yield
    finally:
        self.synchronize = before
        for bucket in self.buckets:
            finish(bucket, *start(bucket))


def meets_on_entering(self):
    before, self.synchronize = self.synchronize, False
    dist.barrier()
    try:
        yield
    finally:
        self.synchronize = before


def down_for_good(self):
    self.synchronize = False
    yield


def other_way_round(self):
    self.synchronize = True
    try:
        yield
    finally:
        self.synchronize = False


def after_the_block(self):
    yield
    self.synchronize = False


def without_gradients(self):
    with torch.no_grad():
        yield


class ZerosForUnready(OverlappedDDP):
    """Sends zeros for a parameter that this backward did not use: what was accumulated is lost."""

    no_sync = contextlib.contextmanager(right.AccumulatingDDP.no_sync.__wrapped__)

    def backward_done(self):
        for bucket in self.buckets:
            for parameter in bucket:
                if parameter not in self.ready:
                    parameter.grad = None
        super().backward_done()


class SleepsAtTheEnd(OverlappedDDP):
    """Never waits: sleeps until the sums are there."""

    no_sync = contextlib.contextmanager(right.AccumulatingDDP.no_sync.__wrapped__)

    def backward_done(self):
        for bucket in self.buckets[len(self.started):]:
            self.started.append(start(bucket))
        for bucket, begun in zip(self.buckets, self.started, strict=True):
            finish_after_sleeping(bucket, *begun)


class Undecorated(OverlappedDDP):
    def no_sync(self):
        yield


class ReadyOnly(OverlappedDDP):
    """Never sends a bucket that holds an unready parameter; right while all are used."""

    no_sync = contextlib.contextmanager(right.AccumulatingDDP.no_sync.__wrapped__)

    def backward_done(self):
        for bucket in self.buckets[len(self.started):]:
            self.started.append(start([p for p in bucket if p in self.ready] or bucket[:0]))
        for bucket, begun in zip(self.buckets, self.started, strict=True):
            finish([p for p in bucket if p in self.ready], *begun)


WRONG = [
    (no_sync_by(does_nothing), "sync_inside_no_sync"),
    (no_sync_by(other_flag), "sync_inside_no_sync"),
    (no_sync_by(not_a_generator), "raised_TypeError yield"),
    (no_sync_by(never_raised_again), "silent_after_no_sync"),
    (no_sync_by(not_after_an_exception), "silent_after_exception"),
    (no_sync_by(drops_what_was_accumulated), "wrong_gradient no_sync"),
    (no_sync_by(own_gradients_lost), "not_accumulated"),
    (no_sync_by(always_up_again), "inner_block_ends_outer"),
    (no_sync_by(keeps_errors_back), "exception_swallowed"),
    (no_sync_by(averages_on_leaving), "sync_on_leaving"),
    (no_sync_by(meets_on_entering), "sync_on_entering"),
    (no_sync_by(down_for_good), "silent_after_no_sync"),
    (no_sync_by(other_way_round), "sync_inside_no_sync"),
    (no_sync_by(after_the_block), "sync_inside_no_sync"),
    (no_sync_by(without_gradients), "raised_RuntimeError require"),
    (wrapping(ZerosForUnready), "wrong_gradient no_sync"),
    (wrapping(SleepsAtTheEnd), "never_waited"),
    (wrapping(Undecorated), "raised_TypeError contextlib.contextmanager"),
    (wrapping(OverlappedDDP), "raised_AttributeError no_sync"),
    (wrapping(ReadyOnly), "collectives_differ|raised_RuntimeError", ALONE)]
WRONG_ANSWERS = Answers([(lab.check_no_sync, *row) for row in WRONG])


@pytest.mark.parametrize("number", **WRONG_ANSWERS.parameters)
def test_wrong(number, request):
    rejected(WRONG_ANSWERS.verdict(number, request), WRONG_ANSWERS.rows[number][2])


class Block:
    """A context manager as a class."""

    def __init__(self, module):
        self.module = module

    def __enter__(self):
        self.before, self.module.synchronize = self.module.synchronize, False

    def __exit__(self, *exception):
        self.module.synchronize = self.before


class WithAClass(OverlappedDDP):
    def no_sync(self):
        return Block(self)


class WithDepth(OverlappedDDP):
    """Counts the open blocks."""

    depth = 0

    @contextlib.contextmanager
    def no_sync(self):
        self.depth += 1
        self.synchronize = False
        try:
            yield self
        finally:
            self.depth -= 1
            self.synchronize = self.depth == 0


RIGHT_ANSWERS = Answers([
    *((lab.check_no_sync, wrapping(kind)) for kind in (
        right.AccumulatingDDP, WithAClass, WithDepth))],
    ranks=(3, 2, 4))


@pytest.mark.parametrize("number", **RIGHT_ANSWERS.parameters)
def test_right(number, request):
    accepted(RIGHT_ANSWERS.verdict(number, request))
