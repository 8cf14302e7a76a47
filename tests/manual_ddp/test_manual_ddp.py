"""What the check of exercise 2.4 must reject, and what it must accept."""

import copy
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ddp_answers import (
    Answers,
    N,
    accepted,
    broadcast_state,
    rejected,
    right,
    trainable,
    wrapping,
)

import labs.manual_ddp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["ddp_answers"])
# slow: the first case of a group tries all answers of the group, in one launch
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
# 2.4 ManualDDP


class Base(lab.Wrapper):
    """The right answer in pieces that a wrong one replaces."""

    def __init__(self, module):
        super().__init__(module)
        self.begin(module)
        for parameter in trainable(module):
            parameter.register_post_accumulate_grad_hook(self.average)

    def begin(self, module):
        broadcast_state(module)

    def average(self, parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= N()


class DoesNothing(lab.Wrapper):
    pass


class TorchInside(lab.Wrapper):
    def __init__(self, module):
        super().__init__(torch.nn.parallel.DistributedDataParallel(module))


class NoStart(Base):
    def begin(self, module):
        pass


class Sums(Base):
    def average(self, parameter):
        dist.all_reduce(parameter.grad)


class Once(Base):
    """Synchronizes in the first step only."""

    def average(self, parameter):
        if parameter not in self.__dict__.setdefault("done", set()):
            self.done.add(parameter)
            super().average(parameter)


class TensorHook(lab.Wrapper):
    """A tensor hook that computes the mean, and returns None: the gradient stays as it was."""

    def __init__(self, module):
        super().__init__(module)
        broadcast_state(module)
        for parameter in trainable(module):
            parameter.register_hook(self.average)

    def average(self, gradient):
        mean = gradient.clone()
        dist.all_reduce(mean)
        gradient = mean / N()


class HookReturns(Base):
    """The hook returns the mean; torch refuses that."""

    def average(self, parameter):
        mean = parameter.grad.clone()
        dist.all_reduce(mean)
        return mean / N()


class AveragesParameters(Base):
    def average(self, parameter):
        with torch.no_grad():
            dist.all_reduce(parameter)
            parameter /= N()


class FrozenHook(lab.Wrapper):
    def __init__(self, module):
        super().__init__(module)
        broadcast_state(module)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: None)


class TwoHooks(Base):
    """As a second wrapper around the first: every gradient is averaged, and travels, twice."""

    def __init__(self, module):
        super().__init__(module)
        for parameter in trainable(module):
            parameter.register_post_accumulate_grad_hook(self.average)


class InForward(lab.Wrapper):
    """Averages what the previous backward left, one step late."""

    def __init__(self, module):
        super().__init__(module)
        broadcast_state(module)

    def forward(self, *inputs, **named):
        for parameter in trainable(self.module):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= N()
        return super().forward(*inputs, **named)


class ScalesTheLoss(Base):
    """The gradients are right; the loss that the loop prints is not."""

    def average(self, parameter):
        dist.all_reduce(parameter.grad)

    def forward(self, *inputs, **named):
        out = super().forward(*inputs, **named)
        out.loss = out.loss / N()
        return out


class AveragesTheLossToo(Base):
    def forward(self, *inputs, **named):
        out = super().forward(*inputs, **named)
        dist.all_reduce(out.loss.data)
        out.loss.data /= N()
        return out


class NotAwaited(Base):
    def average(self, parameter):
        parameter.grad /= N()
        dist.all_reduce(parameter.grad, async_op=True)


class Sleeps(Base):
    """For longer than a rank is delayed, instead of waiting."""

    def average(self, parameter):
        dist.all_reduce(parameter.grad, async_op=True)
        time.sleep(0.2)
        parameter.grad /= N()


class WaitsInTheNextStep(Base):
    """By then the optimizer has read the gradients; a pause hides it."""

    works = ()

    def forward(self, *inputs, **named):
        for work in self.works:
            work.wait()
        self.works = []
        return super().forward(*inputs, **named)

    def average(self, parameter):
        parameter.grad /= N()
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))
        time.sleep(0.2)


class Hidden(torch.nn.Module):
    """A list hides the module from parameters()."""

    def __init__(self, module):
        super().__init__()
        self.inner = [module]
        broadcast_state(module)
        for parameter in trainable(module):
            parameter.register_post_accumulate_grad_hook(lambda p: Base.average(self, p))

    def forward(self, *inputs, **named):
        return self.inner[0](*inputs, **named)


class Copied(Base):
    def __init__(self, module):
        super().__init__(copy.deepcopy(module))


class NoSuper(lab.Wrapper):
    def __init__(self, module):
        self.module = module


class NoSuperEither(lab.Wrapper):
    def __init__(self, module):
        broadcast_state(module)


class HookInForward(Base):
    """A further hook in each forward: from the second step on each gradient travels twice."""

    def __init__(self, module):
        lab.Wrapper.__init__(self, module)
        broadcast_state(module)

    def forward(self, *inputs, **named):
        for parameter in trainable(self.module):
            parameter.register_post_accumulate_grad_hook(self.average)
        return super().forward(*inputs, **named)


class Flags(Base):
    def average(self, parameter):
        dist.all_reduce(torch.ones(1))
        super().average(parameter)


class BuffersEachForward(Base):
    def forward(self, *inputs, **named):
        for buffer in self.module.buffers():
            dist.broadcast(buffer, src=0)
        return super().forward(*inputs, **named)


class HooksOfTheLargest(lab.Wrapper):
    def __init__(self, module):
        super().__init__(module)
        broadcast_state(module)
        for parameter in trainable(module):
            if parameter.dim() == 2:
                parameter.register_post_accumulate_grad_hook(lambda p: Base.average(self, p))


class HookWithoutArgument(Base):
    def average(self):
        pass


WRONG = [
    (DoesNothing, "not_broadcast"),
    (TorchInside, "ready_made"),
    (NoStart, "not_broadcast"),
    (Sums, "sum_not_mean step"),
    (Once, "gradient_of_one_rank"),
    (TensorHook, "gradient_of_one_rank"),
    (HookReturns, "raised_RuntimeError should"),
    (AveragesParameters, "gradient_of_one_rank"),
    (FrozenHook, "raised_RuntimeError doesn't"),
    (TwoHooks, "too_much_sent"),
    (InForward, "gradient_of_one_rank"),
    (ScalesTheLoss, "wrong_loss"),
    (AveragesTheLossToo, "wrong_loss"),
    (NotAwaited, "never_waited all-reduce"),
    (Sleeps, "never_waited"),
    (WaitsInTheNextStep, "never_waited"),
    (Hidden, "parameters_hidden"),
    (Copied, "not_broadcast"),
    (NoSuper, "raised_AttributeError"),
    (NoSuperEither, "raised_AttributeError"),
    (HookInForward, "too_much_sent"),
    (Flags, "too_much_sent"),
    (BuffersEachForward, "too_much_sent"),
    (HooksOfTheLargest, "gradient_of_one_rank"),
    (HookWithoutArgument, "raised_TypeError called")]
WRONG_ANSWERS = Answers([(lab.check_manual_ddp, *row) for row in WRONG])


@pytest.mark.parametrize("number", **WRONG_ANSWERS.parameters)
def test_wrong(number, request):
    rejected(WRONG_ANSWERS.verdict(number, request), WRONG_ANSWERS.rows[number][2])


class PlainDDP(torch.nn.Module):
    """Not a lab.Wrapper; tensor hooks that return the mean."""

    def __init__(self, module):
        super().__init__()
        broadcast_state(module)
        self.inner = module
        for parameter in trainable(module):
            parameter.register_hook(self.mean)

    def mean(self, gradient):
        gradient = gradient / N()
        dist.all_reduce(gradient)
        return gradient

    def forward(self, *inputs, **named):
        return self.inner(*inputs, **named)


class FunctionalDDP(Base):
    def average(self, parameter):
        parameter.grad = functional.all_reduce(parameter.grad, "avg", dist.group.WORLD)


class AtTheEnd(Base):
    """Begins in the hooks, waits for all at the end of backward."""

    def average(self, parameter):
        if not self.__dict__.setdefault("works", []):
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        parameter.grad /= N()
        self.works.append(dist.all_reduce(parameter.grad, async_op=True))

    def wait(self):
        torch.futures.wait_all([work.get_future() for work in self.works])
        self.works.clear()


RIGHT = [right.ManualDDP, PlainDDP, FunctionalDDP, AtTheEnd,
         lambda model: wrapping(right.OverlappedDDP)(model, 700)]
RIGHT_ANSWERS = Answers([(lab.check_manual_ddp, answer) for answer in RIGHT], ranks=(3, 2, 4))


@pytest.mark.parametrize("number", **RIGHT_ANSWERS.parameters)
def test_right(number, request):
    accepted(RIGHT_ANSWERS.verdict(number, request))
