"""What the check of ZeRO-2 must reject, and what it must accept. `pytest -s` prints the verdict
of each wrong answer."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.fsdp import fully_shard
from zero_answers import (
    N,
    accepted,
    ddp_by_hand,
    plain,
    rejected,
    right,
    torchs_ddp,
    torchs_zero,
    trainable,
)

import labs.zero_stages as lab
from labs.zero_stages.collectives import all_gather

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["zero_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


def by(kind, optimizer=right.ZeRO2Optimizer):
    """The strategy of a module class with the arguments of right.ZeRO2."""
    def strategy(model, optimizer_class, **settings):
        module = kind(model)
        return module, optimizer(module.units, optimizer_class, **settings)

    strategy.__name__ = kind.__name__ if kind is not right.ZeRO2 else optimizer.__name__
    return strategy


def torchs_fsdp2(model, optimizer_class, **settings):
    fully_shard(model, reshard_after_forward=False)
    return model, optimizer_class(model.parameters(), **settings)


class Base(right.ZeRO2):
    """The right answer in pieces that a wrong one replaces."""

    def after_backward(self, unit):
        gradients = unit.flatten_gradients()
        self.forget(unit)
        self.backward_done()
        self.in_flight = unit, self.begin(gradients)

    def forget(self, unit):
        for parameter in unit.parameters:
            parameter.grad = None

    def begin(self, gradients):
        return lab.reduce_scatter(gradients)


class Nothing(lab.ShardedModule):
    pass


class AllReduces(Base):
    """Gives every rank the whole sum, of which it keeps its piece."""

    def after_backward(self, unit):
        gradients = unit.flatten_gradients()
        self.forget(unit)
        dist.all_reduce(gradients)
        unit.add_gradient(gradients.view(N(), -1)[dist.get_rank()] / N())


class NotFreed(Base):
    """A hook on each gradient that returns None, meant to free it."""

    def __init__(self, model):
        super().__init__(model)
        for parameter in trainable(model):
            parameter.register_hook(lambda gradient: None)

    def forget(self, unit):
        pass


class FreedByZeros(Base):
    def forget(self, unit):
        for parameter in unit.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()


class AfterBackward(Base):
    """Reduces everything at the end."""

    def after_backward(self, unit):
        self.__dict__.setdefault("late", []).append(unit)

    def backward_done(self):
        for unit in self.__dict__.pop("late", []):
            super().after_backward(unit)
            super().backward_done()


class AllInFlight(Base):
    """Starts every reduce-scatter in time and takes none in before the end."""

    def after_backward(self, unit):
        gradients = unit.flatten_gradients()
        self.forget(unit)
        self.__dict__.setdefault("all", []).append((unit, lab.reduce_scatter(gradients)))

    def backward_done(self):
        for unit, arriving in self.__dict__.pop("all", []):
            unit.add_gradient(arriving.wait() / N())


class FreedAtTheEnd(Base):
    """In buckets, during backward; the gradients themselves go only in step."""

    def forget(self, unit):
        self.__dict__.setdefault("waiting", []).append(unit)

    def backward_done(self):
        super().backward_done()
        if len(self.__dict__.get("waiting", [])) == len(self.units):
            for unit in self.__dict__.pop("waiting"):
                super().forget(unit)


class Sums(Base):
    def backward_done(self):
        if self.in_flight:
            unit, arriving = self.in_flight
            unit.add_gradient(arriving.wait())
        self.in_flight = None


class LastForgotten(right.ZeRO2):
    """Waits for each when the next one comes; no unit comes after the last."""

    def after_backward(self, unit):
        super().after_backward(unit)
        if unit is self.units[0]:
            self.in_flight[1].wait()
            self.in_flight = None


class FreedTooEarly(Base):
    def after_backward(self, unit):
        self.forget(unit)
        super().after_backward(unit)


class Overwrites(Base):
    def backward_done(self):
        if self.in_flight:
            unit, arriving = self.in_flight
            unit.shard.grad = arriving.wait() / N()
        self.in_flight = None


class NeverWaits(Base):
    """Reads the sum before it is there."""

    def backward_done(self):
        if self.in_flight:
            unit, arriving = self.in_flight
            unit.add_gradient(torch.zeros_like(unit.shard))
            arriving.wait()
        self.in_flight = None


class GathersGradients(Base):
    """Puts whole gradients back, so that parameters have a .grad as usual."""

    def backward_done(self):
        if self.in_flight:
            unit = self.in_flight[0]
            super().backward_done()
            all_gather(torch.empty_like(unit.full), unit.shard.grad)


class Stale(right.ZeRO2Optimizer):
    def gather(self):
        pass


class OnlyTheFirst(right.ZeRO2Optimizer):
    """Gathers one layer for all."""

    def gather(self):
        all_gather(self.flats[0].full, self.flats[0].shard)


class WholeStates(right.ZeRO2Optimizer):
    def __init__(self, flats, optimizer_class, **settings):
        super().__init__(flats, optimizer_class, **settings)
        self.spare = [torch.zeros_like(flat.full) for flat in flats]


LATE = "leaves_too_late leaves"
WRONG = [
    (plain, "gradient_of_one_rank"),
    (ddp_by_hand, LATE),
    (torchs_ddp, "ready_made DistributedDataParallel"),
    (torchs_zero, "ready_made ZeroRedundancyOptimizer"),
    (torchs_fsdp2, "ready_made fully_shard"),
    (right.zero1, LATE),
    (by(Nothing), "not_updated"),
    (by(AllReduces), "all_reduced_not_scattered"),
    (by(NotFreed), "reduced_twice"),
    (by(FreedByZeros), "gradient_memory_too_high"),
    (by(AfterBackward), LATE),
    (by(AllInFlight), "too_many_in_flight"),
    (by(FreedAtTheEnd), "peak_too_high"),
    (by(Sums), "sum_not_mean"),
    (by(LastForgotten), "not_updated"),
    (by(FreedTooEarly), "zero_gradient"),
    (by(Overwrites), "not_accumulated"),
    (by(NeverWaits), "zero_gradient"),
    (by(GathersGradients), "too_much_sent"),
    (by(right.ZeRO2, Stale), "not_updated"),
    (by(right.ZeRO2, OnlyTheFirst), "not_updated"),
    (by(right.ZeRO2, WholeStates), "memory_too_high")]


@pytest.mark.parametrize("answer, words", WRONG, ids=[answer.__name__ for answer, _ in WRONG])
def test_wrong(answer, words):
    rejected(lab.check_zero2(answer), words)


class WaitsEverySecond(Base):
    """Every second layer is waited for at once."""

    def after_backward(self, unit):
        super().after_backward(unit)
        self.turn = not self.__dict__.get("turn", False)
        if self.turn:
            self.backward_done()


class TwoInFlight(Base):
    def after_backward(self, unit):
        gradients = unit.flatten_gradients()
        self.forget(unit)
        flying = self.__dict__.setdefault("flying", [])
        if len(flying) == 2:
            self.take(*flying.pop(0))
        flying.append((unit, self.begin(gradients)))

    def take(self, unit, arriving):
        unit.add_gradient(arriving.wait() / N())

    def backward_done(self):
        for pair in self.__dict__.pop("flying", []):
            self.take(*pair)


class OnlyTheFirstLeaves(Base):
    """The first layer's gradients leave during backward, the others' at its end."""

    def after_backward(self, unit):
        if not self.__dict__.get("late"):
            super().after_backward(unit)
        self.__dict__.setdefault("late", []).append(unit)

    def backward_done(self):
        super().backward_done()
        for unit in self.__dict__.pop("late", [])[1:]:
            Base.after_backward(self, unit)
            super().backward_done()


# once right, before overlap was asked for


class Waiting(lab.ShardedModule):
    """No overlap: each layer is reduced at once."""

    def after_backward(self, unit):
        total = lab.reduce_scatter(unit.flatten_gradients()).wait()
        unit.add_gradient(total.div_(N()))
        for parameter in unit.parameters:
            parameter.grad = None


class TorchsScatter(lab.ShardedModule):
    """torch's own collective, and gradients that are divided before they leave."""

    def after_backward(self, unit):
        flat = unit.flatten_gradients().div_(N())
        mine = torch.empty_like(unit.shard)
        dist.reduce_scatter_tensor(mine, flat)
        unit.add_gradient(mine)
        for parameter in unit.parameters:
            parameter.grad = None


AT_ONCE = "waits_too_early"


@pytest.mark.parametrize("answer, words", [
    (by(Waiting), AT_ONCE), (by(TorchsScatter), AT_ONCE), (by(WaitsEverySecond), AT_ONCE),
    (by(TwoInFlight), "too_many_in_flight"),
    (by(OnlyTheFirstLeaves), "leaves_too_late layers'")],
    ids=["Waiting", "TorchsScatter", "WaitsEverySecond", "TwoInFlight", "OnlyTheFirstLeaves"])
def test_gradients_must_travel_while_the_next_layer_computes(answer, words):
    rejected(lab.check_zero2(answer), words)


# right, and written in another way


class BeginsFirst(lab.ShardedModule):
    """Begins the next one before it takes the last one in."""

    flying = None

    def after_backward(self, unit):
        before, self.flying = self.flying, (unit, self.begin(unit))
        self.take(before)

    def begin(self, unit):
        flat = unit.flatten_gradients()
        for parameter in unit.parameters:
            parameter.grad = None
        return lab.reduce_scatter(flat)

    def arrived(self, arriving):
        return arriving.wait()

    def take(self, pair):
        if pair:
            pair[0].add_gradient(self.arrived(pair[1]) / N())

    def backward_done(self):
        self.take(self.flying)
        self.flying = None


class ListBased(BeginsFirst):
    """torch's reduce-scatter with a list."""

    def begin(self, unit):
        flat = unit.flatten_gradients()
        for parameter in unit.parameters:
            parameter.grad = None
        mine = torch.empty_like(unit.shard, requires_grad=False)
        return dist.reduce_scatter(mine, list(flat.view(N(), -1)), async_op=True), mine

    def arrived(self, arriving):
        arriving[0].wait()
        return arriving[1]


class Futures(BeginsFirst):
    """torch's all-to-all, waited for by its future."""

    def begin(self, unit):
        flat = unit.flatten_gradients()
        for parameter in unit.parameters:
            parameter.grad = None
        received = torch.empty_like(flat)
        work = dist.all_to_all_single(received, flat, async_op=True)
        return work.get_future(), received, work

    def arrived(self, arriving):
        arriving[0].wait()
        return arriving[1].view(N(), -1).sum(0)


class Functional(BeginsFirst):
    """A functional collective, which waits where its result is used."""

    def begin(self, unit):
        flat = unit.flatten_gradients()
        for parameter in unit.parameters:
            parameter.grad = None
        return funcol.reduce_scatter_tensor(flat, "sum", 0, dist.group.WORLD)

    def arrived(self, arriving):
        return funcol.wait_tensor(arriving)


@pytest.mark.parametrize("answer", [right.zero2, by(BeginsFirst), by(Futures), by(ListBased),
                                    by(Functional)])
def test_right(answer):
    accepted(lab.check_zero2(answer))
