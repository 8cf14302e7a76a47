"""What the check of exercise 2.11 must reject, with the words that must say why; and what it must
accept. `pytest -s` prints the verdict of each wrong answer."""

import sys

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
    broadcast_state,
    finish,
    finish_after_sleeping,
    flattened,
    give,
    make_buckets,
    rejected,
    right,
    start,
    trainable,
    zeros,
)
from torch.autograd import Variable

import labs.manual_ddp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["ddp_answers"])
# slow: the first case of a group tries all answers of the group, in one launch
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]


class LearnsTheOrder(torch.nn.Module):
    """A right answer, whose methods the wrong ones replace."""

    def __init__(self, module, cap_bytes):
        super().__init__()
        self.module, self.cap = module, cap_bytes
        self.begin()

    def begin(self):
        broadcast_state(self.module)
        self.mine = trainable(self.module)
        self.buckets, self.steps = make_buckets(self.mine, self.cap), 0
        self.ready, self.started = [], []
        for parameter in self.mine:
            parameter.register_post_accumulate_grad_hook(self.when_ready)

    def forward(self, *inputs, **named):
        return self.module(*inputs, **named)

    def when_ready(self, parameter):
        if not self.ready:
            Variable._execution_engine.queue_callback(self.when_over)
        self.ready.append(parameter)
        self.start_complete()

    def start_complete(self):
        for bucket in self.buckets[len(self.started):]:
            if not set(self.ready).issuperset(bucket):
                break
            self.started.append(start(bucket))

    def when_over(self):
        for bucket in self.buckets[len(self.started):]:
            self.started.append(start(bucket))
        self.finish_all()
        self.steps += 1
        self.learn()
        self.ready, self.started = [], []

    def finish_all(self):
        for bucket, begun in zip(self.buckets, self.started, strict=True):
            finish(bucket, *begun)

    def learn(self):
        if self.steps == 1:
            self.rebuild(self.agreed())

    def everything(self):
        """This rank's order, with what was not ready at its end."""
        return self.ready + [p for p in self.mine if p not in set(self.ready)]

    def agreed(self):
        number = {p: i for i, p in enumerate(self.mine)}
        numbers = torch.tensor([number[p] for p in self.everything()])
        dist.broadcast(numbers, src=0)
        return [self.mine[i] for i in numbers]

    def rebuild(self, order):
        self.buckets = make_buckets(order[::-1], self.cap)


class RegistrationOrder(LearnsTheOrder):
    """Laziest: exercise 2.7 once more, without the lab's classes."""

    def learn(self):
        pass


class Reversed(LearnsTheOrder):
    """Gives make_buckets, which begins at the end, the order as it was noted."""

    def rebuild(self, order):
        self.buckets = make_buckets(order, self.cap)


class OwnOrder(LearnsTheOrder):
    """Each rank takes its own order."""

    agreed = LearnsTheOrder.everything


class EachStepAnew(LearnsTheOrder):
    """Learns in each step, and nobody agrees on it."""

    def learn(self):
        self.rebuild(self.everything())


class AgreesInEachStep(LearnsTheOrder):
    def learn(self):
        self.rebuild(self.agreed())


class FromTheLastRank(LearnsTheOrder):
    def agreed(self):
        orders = [None] * N()
        number = {p: i for i, p in enumerate(self.mine)}
        dist.all_gather_object(orders, [number[p] for p in self.everything()])
        return [self.mine[i] for i in orders[-1]]


class LosesUnused(LearnsTheOrder):
    """What rank 0 did not use in the first step is in no bucket."""

    def agreed(self):
        names = {p: name for name, p in self.module.named_parameters()}
        order = [[names[p] for p in self.ready]]
        dist.broadcast_object_list(order, src=0)
        by_name = dict(self.module.named_parameters())
        return [by_name[name] for name in order[0]]


class UnusedFirst(LearnsTheOrder):
    """What rank 0 did not use comes first, so that all others wait for it."""

    def everything(self):
        return [p for p in self.mine if p not in set(self.ready)] + self.ready


class RebuildsInTheMiddle(LearnsTheOrder):
    """Cuts new buckets with the last gradient, while the old ones are in flight."""

    def when_ready(self, parameter):
        super().when_ready(parameter)
        if self.steps == 0 and len(self.ready) == len(self.mine):
            self.rebuild(self.agreed())

    def learn(self):
        pass


class RebuildsBeforeFinishing(LearnsTheOrder):
    """Has new buckets when the old ones arrive."""

    def finish_all(self):
        if self.steps == 0:
            self.rebuild(self.agreed())
        for bucket, begun in zip(self.buckets, self.started, strict=False):
            finish(bucket, *begun)

    def learn(self):
        pass


class WaitsAtOnce(LearnsTheOrder):
    def start_complete(self):
        before = len(self.started)
        super().start_complete()
        for _, handle in self.started[before:]:
            handle.wait()


class SleepsAtTheEnd(LearnsTheOrder):
    """Never waits: sleeps until the sums are there."""

    def finish_all(self):
        for bucket, begun in zip(self.buckets, self.started, strict=True):
            finish_after_sleeping(bucket, *begun)


class AfterBackward(LearnsTheOrder):
    """The right buckets, sent when backward is over."""

    def start_complete(self):
        pass


class SendsParameters(LearnsTheOrder):
    """What arrives are copies, which never get a gradient."""

    def agreed(self):
        order = [[p.detach() for p in self.everything()]]
        dist.broadcast_object_list(order, src=0)
        return [torch.nn.Parameter(p) for p in order[0]]


class OnlyRank0(LearnsTheOrder):
    def learn(self):
        if self.steps == 1 and dist.get_rank() == 0:
            self.rebuild(self.agreed())


class LearnsTooLate(LearnsTheOrder):
    def learn(self):
        if self.steps == 2:
            self.rebuild(self.agreed())


class StartedNotCleared(LearnsTheOrder):
    def when_over(self):
        started = self.started
        super().when_over()
        self.started = started


class CallbackForEachGradient(LearnsTheOrder):
    def when_ready(self, parameter):
        Variable._execution_engine.queue_callback(self.when_over)
        self.ready.append(parameter)
        self.start_complete()


class CallbackInForward(LearnsTheOrder):
    def forward(self, *inputs, **named):
        Variable._execution_engine.queue_callback(self.when_over)
        return super().forward(*inputs, **named)


class OverWhenAllAreReady(LearnsTheOrder):
    """No callback: where a rank does not use a parameter, its backward is never over."""

    def when_ready(self, parameter):
        self.ready.append(parameter)
        self.start_complete()
        if len(self.ready) == len(self.mine):
            self.when_over()


class OneForEachGradient(LearnsTheOrder):
    """No buckets any more from the second step on."""

    def rebuild(self, order):
        self.buckets = [[p] for p in order]


class OneForAll(LearnsTheOrder):
    def rebuild(self, order):
        self.buckets = [list(order)]


class AsTheyGetComplete(LearnsTheOrder):
    """Whichever bucket is complete leaves, in whatever order."""

    def start_complete(self):
        sent = {p for bucket, _ in self.started for p in bucket}
        for bucket in self.buckets:
            if not sent & set(bucket) and set(self.ready).issuperset(bucket):
                self.started.append((bucket, start(bucket)))

    def when_over(self):
        sent = {p for bucket, _ in self.started for p in bucket}
        for bucket in self.buckets:
            if not sent.issuperset(bucket):
                self.started.append((bucket, start(bucket)))
        for bucket, begun in self.started:
            finish(bucket, *begun)
        self.steps += 1
        self.learn()
        self.ready, self.started = [], []


class OnlyWhatIsReady(LearnsTheOrder):
    """A bucket that did not become complete is not sent."""

    def when_over(self):
        for bucket, begun in zip(self.buckets, self.started, strict=False):
            finish(bucket, *begun)
        self.steps += 1
        self.learn()
        self.ready, self.started = [], []


class NeverForgets(LearnsTheOrder):
    """What was ready in the first step stays ready: later buckets leave too early."""

    def when_over(self):
        ready = self.ready
        super().when_over()
        self.old = ready

    def start_complete(self):
        ready, self.ready = self.ready, self.ready + getattr(self, "old", [])
        super().start_complete()
        self.ready = ready


class NoBroadcast(LearnsTheOrder):
    """Each rank keeps the weights that it drew."""

    def begin(self):
        with torch.no_grad():
            super().begin()

    def __init__(self, module, cap_bytes):
        state = {name: t.clone() for name, t in module.state_dict().items()}
        super().__init__(module, cap_bytes)
        module.load_state_dict(state)


class NotDivided(LearnsTheOrder):
    def finish_all(self):
        for bucket, (flat, handle) in zip(self.buckets, self.started, strict=True):
            handle.wait()
            give(bucket, flat)


class SentTwice(LearnsTheOrder):
    """Sends once more after the rebuilding, to be sure."""

    def finish_all(self):
        super().finish_all()
        for bucket in self.buckets:
            finish(bucket, *start(bucket))


class NoSuper(LearnsTheOrder):
    def __init__(self, module, cap_bytes):
        self.module, self.cap = module, cap_bytes


class LabsWrapper(lab.Wrapper):
    def __init__(self, module, cap_bytes):
        super().__init__(module)


def torchs(module, cap_bytes):
    return torch.nn.parallel.DistributedDataParallel(module)


def nothing(module, cap_bytes):
    return module


CHECK = lab.check_ready_order
MISMATCH = "collectives_differ|deadlock|no_progress"
WRONG = [
    (CHECK, nothing, "nothing_sent"),
    (CHECK, RegistrationOrder, "order_of_registration"),
    (CHECK, right.overlapped, "ready_made lab.BucketedWrapper"),
    (CHECK, LabsWrapper, "ready_made lab.Wrapper"),
    (CHECK, torchs, "ready_made DistributedDataParallel"),
    (CHECK, Reversed, "wrong_order"),
    (CHECK, OwnOrder, MISMATCH, ALONE),
    (CHECK, EachStepAnew, MISMATCH, ALONE),
    (CHECK, AgreesInEachStep, "extra_collective"),
    (CHECK, FromTheLastRank, "wrong_order"),
    (CHECK, LosesUnused, "unused_left_out"),
    (CHECK, UnusedFirst, "wrong_order"),
    (CHECK, RebuildsInTheMiddle, "raised_RuntimeError", ALONE),
    (CHECK, RebuildsBeforeFinishing, "raised_RuntimeError", ALONE),
    (CHECK, WaitsAtOnce, "waits_too_early"),
    (CHECK, SleepsAtTheEnd, "never_waited"),
    (CHECK, AfterBackward, "no_overlap"),
    (CHECK, SendsParameters, "no_overlap"),
    (CHECK, OnlyRank0, MISMATCH, ALONE),
    (CHECK, LearnsTooLate, "order_of_registration"),
    (CHECK, StartedNotCleared, "raised_RuntimeError", ALONE),
    (CHECK, CallbackForEachGradient, "too_much_sent 114"),
    (CHECK, CallbackInForward, "raised_RuntimeError callback"),
    (CHECK, OverWhenAllAreReady, MISMATCH, ALONE),
    (CHECK, OneForEachGradient, "bucket_not_filled"),
    (CHECK, OneForAll, "cap_exceeded"),
    (CHECK, AsTheyGetComplete, MISMATCH, ALONE),
    (CHECK, OnlyWhatIsReady,
     "collectives_differ|deadlock|no_progress|too_much_sent|too_little_sent", ALONE),
    (CHECK, NeverForgets, "leaves_too_early"),
    (CHECK, NoBroadcast, "not_broadcast"),
    (CHECK, NotDivided, "sum_not_mean"),
    (CHECK, SentTwice, "too_much_sent"),
    (CHECK, NoSuper, "raised_AttributeError")]
WRONG_ANSWERS = Answers(WRONG)


@pytest.mark.parametrize("number", **WRONG_ANSWERS.parameters)
def test_wrong(number, request):
    rejected(WRONG_ANSWERS.verdict(number, request), WRONG[number][2])


class AsTorchDoes(torch.nn.Module):
    """Counts what a bucket still misses; cuts new buckets in the second forward."""

    def __init__(self, module, cap_bytes):
        super().__init__()
        broadcast_state(module)
        self.module, self.cap, self.order = module, cap_bytes, []
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.has_rebuilt = False
        self.set_buckets(make_buckets(module.parameters(), cap_bytes))
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(self.mark)

    def set_buckets(self, buckets):
        self.buckets = buckets
        self.home = {p: i for i, bucket in enumerate(buckets) for p in bucket}
        self.reset()

    def reset(self):
        self.missing, self.works = [len(bucket) for bucket in self.buckets], []
        self.is_queued = False

    def forward(self, *inputs, **named):
        if self.order and not self.has_rebuilt:
            names = [[self.names[p] for p in self.order]]
            dist.broadcast_object_list(names, src=0)
            by_name = {name: p for p, name in self.names.items()}
            first = [by_name[name] for name in names[0]]
            late = [p for p in self.names if p not in set(first)]
            self.set_buckets(make_buckets(reversed(first + late), self.cap))
            self.has_rebuilt = True
        return self.module(*inputs, **named)

    def mark(self, parameter):
        if not self.is_queued:
            Variable._execution_engine.queue_callback(self.end)
            self.is_queued = True
        if not self.has_rebuilt:
            self.order.append(parameter)
        self.missing[self.home[parameter]] -= 1
        while len(self.works) < len(self.buckets) and self.missing[len(self.works)] == 0:
            self.works.append(start(self.buckets[len(self.works)]))

    def end(self):
        while len(self.works) < len(self.buckets):
            self.works.append(start(self.buckets[len(self.works)]))
        for bucket, (flat, handle) in zip(self.buckets, self.works, strict=True):
            handle.wait()
            give(bucket, flat / N())
        self.reset()


class Functional(LearnsTheOrder):
    """Functional collectives, and an order that travels as one-hot sum of rank 0's."""

    def start_complete(self):
        for bucket in self.buckets[len(self.started):]:
            if not set(self.ready).issuperset(bucket):
                return
            self.send(bucket)

    def send(self, bucket):
        self.started.append(functional.all_reduce(flattened(bucket), "avg", dist.group.WORLD))

    def when_over(self):
        for bucket in self.buckets[len(self.started):]:
            self.send(bucket)
        for bucket, flat in zip(self.buckets, self.started, strict=True):
            give(bucket, functional.wait_tensor(flat))
        self.steps += 1
        self.learn()
        self.ready, self.started = [], []

    def agreed(self):
        place = torch.zeros(len(self.mine), dtype=torch.long)
        if dist.get_rank() == 0:
            number = {id(p): i for i, p in enumerate(self.mine)}
            place = torch.tensor([number[id(p)] for p in self.everything()])
        dist.all_reduce(place)
        return [self.mine[i] for i in place.tolist()]


class GatheredLists(LearnsTheOrder):
    """No flat tensor, own buckets, and everybody's order gathered, of which rank 0's counts."""

    def agreed(self):
        orders = [None] * N()
        dist.all_gather_object(orders, [id_of(self.mine, p) for p in self.ready])
        late = [i for i in range(len(self.mine)) if i not in orders[0]]
        return [self.mine[i] for i in orders[0] + late[::-1]]

    def start_complete(self, also=False):
        while len(self.started) < len(self.buckets):
            bucket = self.buckets[len(self.started)]
            if not also and any(id_of(self.ready, p) is None for p in bucket):
                return
            gradients = [p.grad for p in zeros(bucket)]
            self.started.append(dist.all_reduce_coalesced(gradients, async_op=True))

    def when_over(self):
        self.start_complete(also=True)
        for work in self.started:
            work.wait()
        for parameter in self.mine:
            parameter.grad /= N()
        self.steps += 1
        self.learn()
        self.ready, self.started = [], []


def id_of(parameters, wanted):
    return next((i for i, p in enumerate(parameters) if p is wanted), None)


class Views(LearnsTheOrder):
    """Gradients are views of one flat tensor for each bucket, divided before they are summed."""

    def rebuild(self, order):
        super().rebuild(order)
        self.flats = None

    flats = None

    def start_complete(self, also=False):
        self.flats = self.flats or [torch.zeros(sum(p.numel() for p in bucket),
                                                dtype=bucket[0].dtype) for bucket in self.buckets]
        for number in range(len(self.started), len(self.buckets)):
            bucket, flat = self.buckets[number], self.flats[number]
            if not also and not set(self.ready).issuperset(bucket):
                return
            flat.copy_(flattened(bucket) / N())
            give(bucket, flat)
            self.started.append(dist.all_reduce(flat, async_op=True))

    def when_over(self):
        self.start_complete(also=True)
        for work in self.started:
            work.wait()
        self.steps += 1
        self.learn()
        self.ready, self.started = [], []


class AgreesInTheSecondBackward(LearnsTheOrder):
    def learn(self):
        if self.steps == 1:
            self.first = self.everything()

    def when_ready(self, parameter):
        if self.steps == 1 and not self.ready:
            number = {p: i for i, p in enumerate(self.mine)}
            numbers = torch.tensor([number[p] for p in self.first])
            dist.broadcast(numbers, src=0)
            self.rebuild([self.mine[i] for i in numbers])
        super().when_ready(parameter)


class CutsItself(LearnsTheOrder):
    """Buckets without make_buckets, from the front, as tuples."""

    def learn(self):
        if self.steps == 1:
            order = self.agreed()
            sizes, buckets = 0, [[]]
            for p in order:
                nbytes = p.numel() * p.element_size()
                if buckets[-1] and (sizes + nbytes > self.cap or buckets[-1][0].dtype != p.dtype):
                    buckets.append([])
                    sizes = 0
                buckets[-1].append(p)
                sizes += nbytes
            self.buckets = tuple(tuple(bucket) for bucket in buckets)


RIGHT_ANSWERS = Answers([(CHECK, answer) for answer in (
    right.ReadyOrderDDP, LearnsTheOrder, AsTorchDoes, Functional, GatheredLists, CutsItself, Views,
    AgreesInTheSecondBackward)],
    ranks=(3,))


@pytest.mark.parametrize("number", **RIGHT_ANSWERS.parameters)
def test_right(number, request):
    accepted(RIGHT_ANSWERS.verdict(number, request))
