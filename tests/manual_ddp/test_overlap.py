"""What the check of exercise 2.7 must reject, and what it must accept."""

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
    OverlappedDDP,
    accepted,
    finish,
    finish_after_sleeping,
    flattened,
    give,
    rejected,
    start,
    trainable,
    wrapping,
    zeros,
)

import labs.manual_ddp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["ddp_answers"])
# slow: the first case of a group tries all answers of the group, in one launch
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]


# 2.7 overlap, as classes over lab.BucketedWrapper


class AfterBackward(lab.BucketedWrapper):
    def backward_done(self):
        begun = [start(bucket) for bucket in self.buckets]
        for bucket, one in zip(self.buckets, begun, strict=True):
            finish(bucket, *one)


class OneForAll(lab.BucketedWrapper):
    """One all-reduce when the last gradient is ready, sold as overlap."""

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        everything = [p for bucket in self.buckets for p in bucket]
        if len(self.ready) == len(everything):
            finish(everything, *start(everything))


class WaitsAtOnce(lab.BucketedWrapper):
    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for bucket in self.buckets:
            if parameter in set(bucket) and self.ready.issuperset(bucket):
                finish(bucket, *start(bucket))


class Synchronous(lab.BucketedWrapper):
    def gradient_ready(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= N()


class IfForWhile(OverlappedDDP):
    """`if` for `while`: of several buckets that one gradient completes, only the first leaves."""

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        turn = len(self.started)
        if turn < len(self.buckets) and self.ready.issuperset(self.buckets[turn]):
            self.started.append(start(self.buckets[turn]))


class UnusedForgotten(OverlappedDDP):
    """Never sends a bucket that did not get ready."""

    def backward_done(self):
        for bucket, one in zip(self.buckets, self.started, strict=False):
            finish(bucket, *one)


class AsksTheList(lab.BucketedWrapper):
    """`in` on a list of tensors compares numbers."""

    def gradient_ready(self, parameter):
        for bucket in self.buckets:
            if parameter in bucket:
                self.ready.add(parameter)


class AsTheyGetReady(lab.BucketedWrapper):
    """Starts whichever bucket is complete, in whatever order."""

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for bucket in self.buckets:
            if parameter in set(bucket) and self.ready.issuperset(bucket):
                self.started.append((bucket, start(bucket)))

    def backward_done(self):
        sent = [p for bucket, _ in self.started for p in bucket]
        for bucket in self.buckets:
            if not set(bucket) <= set(sent):
                self.started.append((bucket, start(bucket)))
        for bucket, one in self.started:
            finish(bucket, *one)


class NotFinished(OverlappedDDP):
    def backward_done(self):
        for _, handle in self.started:
            handle.wait()


class LastBucketDropped(OverlappedDDP):
    def __init__(self, module, buckets):
        super().__init__(module, buckets)
        self.buckets = self.buckets[:-1]


class Nothing(lab.BucketedWrapper):
    pass


class OnlyTheFirstEarly(OverlappedDDP):
    """One bucket leaves during backward, all others at its end."""

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        if not self.started and self.ready.issuperset(self.buckets[0]):
            self.started.append(start(self.buckets[0]))


class OneForEachGradient(OverlappedDDP):
    """At most one bucket leaves for each bucket's last gradient; those that waited stay behind."""

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        number = len(self.started)
        if number < len(self.buckets) - 2 and self.ready.issuperset(self.buckets[number]):
            self.started.append(start(self.buckets[number]))


class WaitsForTheOneBefore(OverlappedDDP):
    def gradient_ready(self, parameter):
        before = len(self.started)
        super().gradient_ready(parameter)
        if before and len(self.started) > before:
            self.started[before - 1][1].wait()


class WaitsByFuture(OverlappedDDP):
    def gradient_ready(self, parameter):
        super().gradient_ready(parameter)
        if self.started:
            self.started[-1][1].get_future().wait()


class WaitsByPolling(OverlappedDDP):
    def gradient_ready(self, parameter):
        super().gradient_ready(parameter)
        while self.started and not self.started[-1][1].is_completed():
            pass


class WaitsInAThread(OverlappedDDP):
    def gradient_ready(self, parameter):
        super().gradient_ready(parameter)
        if self.started:
            thread = threading.Thread(target=self.started[-1][1].wait)
            thread.start()
            thread.join()


class SynchronousFunctional(lab.BucketedWrapper):
    """A functional collective returns at once, and each use of its result waits."""

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.started):]:
            if not self.ready.issuperset(bucket):
                break
            self.started.append(bucket)
            give(bucket, functional.all_reduce(flattened(bucket), "avg", dist.group.WORLD) + 0)


class WithTheFirstGradient(OverlappedDDP):
    """Starts a bucket when its first gradient is ready."""

    def gradient_ready(self, parameter):
        number = len(self.started)
        if number < len(self.buckets) and parameter in set(self.buckets[number]):
            self.started.append(start(self.buckets[number]))


class CountsOnce(OverlappedDDP):
    """Its counters are not put back: from the second step on nothing leaves during backward."""

    def __init__(self, module, buckets):
        super().__init__(module, buckets)
        self.missing = [len(bucket) for bucket in buckets]

    def gradient_ready(self, parameter):
        for number, bucket in enumerate(self.buckets):
            self.missing[number] -= parameter in set(bucket)
        while len(self.started) < len(self.buckets) and self.missing[len(self.started)] == 0:
            self.started.append(start(self.buckets[len(self.started)]))


class SkipsUnusedBuckets(OverlappedDDP):
    """A bucket in which this rank used nothing is not sent: another rank waits for it."""

    def backward_done(self):
        for bucket in self.buckets[len(self.started):]:
            if any(p.grad is not None for p in bucket):
                self.started.append(start(bucket))
            else:
                self.started.append(None)
        for bucket, begun in zip(self.buckets, self.started, strict=True):
            if begun:
                finish(bucket, *begun)


class SkipsWhatIsNotReady(OverlappedDDP):
    def backward_done(self):
        for bucket in self.buckets[len(self.started):]:
            if self.ready & set(bucket):
                self.started.append(start(bucket))
        for bucket, begun in zip(self.buckets, self.started, strict=False):
            finish(bucket, *begun)


class FinishesInReverse(OverlappedDDP):
    def backward_done(self):
        for bucket in self.buckets[len(self.started):]:
            self.started.append(start(bucket))
        for bucket, begun in zip(self.buckets, self.started[::-1], strict=True):
            finish(bucket, *begun)


class SleepsAtTheEnd(OverlappedDDP):
    """Never waits: sleeps until the sums are there."""

    def backward_done(self):
        for bucket in self.buckets[len(self.started):]:
            self.started.append(start(bucket))
        for bucket, begun in zip(self.buckets, self.started, strict=True):
            finish_after_sleeping(bucket, *begun)


class KeepsTheFlats(OverlappedDDP):
    """What it sent in the first step is sent again."""

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        flats = self.__dict__.setdefault("flats", {})
        for number, bucket in enumerate(self.buckets[len(self.started):], len(self.started)):
            if not self.ready.issuperset(bucket):
                break
            flat = flats.setdefault(number, flattened(bucket)).clone()
            self.started.append((flat, dist.all_reduce(flat, async_op=True)))


class SecondCopy(OverlappedDDP):
    """Sends all gradients once more when backward is over."""

    def backward_done(self):
        super().backward_done()
        for bucket in self.buckets:
            finish(bucket, *start(bucket))


class NoSuper(OverlappedDDP):
    def __init__(self, module, buckets):
        self.buckets = buckets


class NotDivided(OverlappedDDP):
    def backward_done(self):
        for bucket in self.buckets[len(self.started):]:
            self.started.append(start(bucket))
        for bucket, (flat, handle) in zip(self.buckets, self.started, strict=True):
            handle.wait()
            give(bucket, flat)


def torch_inside(model, cap_bytes):
    return torch.nn.parallel.DistributedDataParallel(model)


WRONG = [
    (wrapping(Nothing), "nothing_sent"),
    (torch_inside, "ready_made"),
    (wrapping(AfterBackward), "no_overlap"),
    (wrapping(OneForAll), "one_collective_for_all"),
    (wrapping(WaitsAtOnce), "waits_too_early"),
    (wrapping(Synchronous), "blocking_collective"),
    (wrapping(UnusedForgotten), "collectives_differ|deadlock|no_progress", ALONE),
    (wrapping(AsksTheList), "raised_RuntimeError Ask"),
    (wrapping(AsTheyGetReady), "collectives_differ", ALONE),
    (wrapping(NotFinished), "gradient_of_one_rank still"),
    (wrapping(LastBucketDropped),
     "missing_entry"),
    (wrapping(OnlyTheFirstEarly), "leaves_too_late gradients"),
    (wrapping(OneForEachGradient), "leaves_too_late"),
    (wrapping(IfForWhile), "leaves_too_late"),
    (wrapping(WaitsForTheOneBefore), "waits_too_early"),
    (wrapping(WaitsByFuture), "waits_too_early"),
    (wrapping(WaitsByPolling), "waits_too_early"),
    (wrapping(WaitsInAThread), "waits_too_early"),
    (wrapping(SynchronousFunctional), "waits_too_early"),
    (wrapping(WithTheFirstGradient), "leaves_too_early"),
    (wrapping(CountsOnce), "no_overlap"),
    (wrapping(SkipsUnusedBuckets), "collectives_differ|deadlock|no_progress", ALONE),
    (wrapping(SkipsWhatIsNotReady), "collectives_differ|deadlock|no_progress", ALONE),
    (wrapping(FinishesInReverse), "raised_RuntimeError split"),
    (wrapping(SleepsAtTheEnd), "never_waited"),
    (wrapping(KeepsTheFlats), "wrong_gradient step"),
    (wrapping(SecondCopy), "too_much_sent"),
    (wrapping(NoSuper), "raised_AttributeError .__init__"),
    (wrapping(NotDivided), "sum_not_mean")]
WRONG_ANSWERS = Answers([(lab.check_overlap, *row) for row in WRONG])


@pytest.mark.parametrize("number", **WRONG_ANSWERS.parameters)
def test_wrong(number, request):
    rejected(WRONG_ANSWERS.verdict(number, request), WRONG_ANSWERS.rows[number][2])


# right, and written in another way


class CountingDDP(lab.BucketedWrapper):
    """Counts instead of keeping a set."""

    def __init__(self, module, buckets):
        super().__init__(module, buckets)
        self.home = {id(p): n for n, bucket in enumerate(buckets) for p in bucket}
        self.missing = [len(bucket) for bucket in buckets]

    def gradient_ready(self, parameter):
        self.missing[self.home[id(parameter)]] -= 1
        while len(self.started) < len(self.buckets) and not self.missing[len(self.started)]:
            self.started.append(start(self.buckets[len(self.started)]))

    def backward_done(self):
        while len(self.started) < len(self.buckets):
            self.started.append(start(self.buckets[len(self.started)]))
        for bucket, one in zip(self.buckets, self.started, strict=True):
            finish(bucket, *one)
        self.missing = [len(bucket) for bucket in self.buckets]


class FutureDDP(lab.BucketedWrapper):
    """The division is a continuation of the all-reduce."""

    def gradient_ready(self, parameter):
        self.ready.add(parameter)
        while len(self.started) < len(self.buckets) and (
                self.ready >= set(self.buckets[len(self.started)])):
            self.send(self.buckets[len(self.started)])

    def send(self, bucket):
        work = dist.all_reduce(flattened(bucket), async_op=True)
        self.started.append(work.get_future().then(lambda done: done.value()[0] / N()))

    def backward_done(self):
        for bucket in self.buckets[len(self.started):]:
            self.send(bucket)
        futures = torch.futures.wait_all(self.started)
        for bucket, flat in zip(self.buckets, futures, strict=True):
            give(bucket, flat)


class FunctionalDDP(FutureDDP):
    def send(self, bucket):
        self.started.append(functional.all_reduce(flattened(bucket), "avg", dist.group.WORLD))

    def backward_done(self):
        for bucket in self.buckets[len(self.started):]:
            self.send(bucket)
        for bucket, flat in zip(self.buckets, self.started, strict=True):
            give(bucket, functional.wait_tensor(flat))


class ListDDP(FutureDDP):
    """No flat tensor: each bucket's gradients in one coalesced call."""

    def send(self, bucket):
        gradients = [p.grad for p in zeros(bucket)]
        self.started.append(dist.all_reduce_coalesced(gradients, async_op=True))

    def backward_done(self):
        for bucket in self.buckets[len(self.started):]:
            self.send(bucket)
        for work in self.started:
            work.wait()
        for parameter in trainable(self.module):
            parameter.grad /= N()


class OwnHooks(lab.Wrapper):
    """Not a BucketedWrapper; the last hook of all waits."""

    def __init__(self, module, buckets):
        super().__init__(module)
        self.buckets, self.works, self.seen = buckets, [], set()
        for parameter in trainable(module):
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        if not self.seen:
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self.seen.add(parameter)
        while len(self.works) < len(self.buckets) and (
                self.seen.issuperset(self.buckets[len(self.works)])):
            self.works.append(start(self.buckets[len(self.works)]))

    def finish(self):
        for bucket in self.buckets[len(self.works):]:
            self.works.append(start(bucket))
        for bucket, begun in zip(self.buckets, self.works, strict=True):
            finish(bucket, *begun)
        self.works, self.seen = [], set()


class UsedMap(OverlappedDDP):
    """Says at the end which parameters were used, as torch's find_unused_parameters does."""

    def backward_done(self):
        super().backward_done()
        used = torch.tensor([float(p in self.ready) for b in self.buckets for p in b])
        dist.all_reduce(used)
        everything = [p for b in self.buckets for p in b]
        for parameter, users in zip(everything, used.tolist(), strict=True):
            if not users:
                parameter.grad = None


RIGHT_ANSWERS = Answers([
    *((lab.check_overlap, wrapping(kind)) for kind in (
        OverlappedDDP, CountingDDP, FutureDDP, FunctionalDDP, ListDDP, OwnHooks, UsedMap))],
    ranks=(3, 2, 4))


@pytest.mark.parametrize("number", **RIGHT_ANSWERS.parameters)
def test_right(number, request):
    accepted(RIGHT_ANSWERS.verdict(number, request))
