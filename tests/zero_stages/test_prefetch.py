"""What the check of exercise 3.5 must reject, and what it must accept."""

import sys
import time

import cloudpickle
import pytest
from zero_answers import (
    accepted,
    rejected,
    right,
)

import labs.zero_stages as lab
from labs.zero_stages.collectives import all_gather

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["zero_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


def by(kind, optimizer=lab.ShardedOptimizer):
    """The strategy of a module class that is used as right.ZeRO3 is."""
    def strategy(model, optimizer_class, **settings):
        module = kind(model)
        for unit in module.units:
            unit.free()
        inner = optimizer_class([unit.shard for unit in module.units], **settings)
        return module, optimizer(inner, module.units)

    strategy.__name__ = kind.__name__ if optimizer is lab.ShardedOptimizer else optimizer.__name__
    return strategy


def gather(unit):
    all_gather(unit.allocate(), unit.shard)


# 3.5 prefetching


class AtOnce(right.Prefetching):
    """Fetches the next one, and waits for it."""

    def fetch(self, unit):
        if unit is not None and not unit.is_gathered:
            gather(unit)


class WaitsForIt(right.Prefetching):
    """Asynchronous by name: waits for the next one's gather when it has begun it."""

    def fetch(self, unit):
        super().fetch(unit)
        if unit is not None:
            unit.wait()


class WaitsForItInBackward(right.Prefetching):
    def before_backward(self, unit):
        super().before_backward(unit)
        if self.next_unit(unit):
            self.next_unit(unit).wait()


class Unheld(right.Prefetching):
    """Keeps no handle, so that nothing waits for the gather before its memory is freed."""

    def fetch(self, unit):
        super().fetch(unit)
        if unit is not None:
            unit.handle = None


class Sleeps(right.Prefetching):
    """For longer than a gather takes, instead of waiting."""

    def before_forward(self, unit):
        self.fetch(unit)
        self.fetch(self.next_unit(unit))
        time.sleep(0.05)
        unit.handle = None


class OnlyForward(right.Prefetching):
    def before_backward(self, unit):
        gather(unit) if not unit.is_gathered else unit.wait()


class Backwards(right.Prefetching):
    """Waits first, twice, then begins the next one, which is still gathered during the compute."""

    def before_forward(self, unit):
        self.fetch(unit)
        if unit.handle is not None:
            unit.handle.wait()
        unit.wait()
        self.fetch(self.next_unit(unit))


class FetchedAgain(right.Prefetching):
    """Forgets to ask whether the unit has memory."""

    def fetch(self, unit):
        if unit is not None:
            unit.wait()
            unit.handle = all_gather(unit.allocate(), unit.shard, async_op=True)


class AllAhead(right.Prefetching):
    """Fetches all that follow."""

    def before_forward(self, unit):
        following = unit
        while following is not None:
            self.fetch(following)
            following = self.next_unit(following)
        unit.wait()


class TwoAhead(right.Prefetching):
    def before_forward(self, unit):
        self.fetch(unit)
        following = self.next_unit(unit)
        self.fetch(following)
        self.fetch(following and self.next_unit(following))
        unit.wait()


class NeverWaits(right.Prefetching):
    """Computes with what has arrived by then: nothing."""

    def before_forward(self, unit):
        super().before_forward(unit)
        unit.full.zero_()


class Itself(right.Prefetching):
    """Asynchronous, and waited for at once."""

    def before_forward(self, unit):
        self.fetch(unit)
        unit.wait()


class TooLate(right.Prefetching):
    """Begins the next one when this one has computed."""

    def before_forward(self, unit):
        self.fetch(unit)
        unit.wait()

    def after_forward(self, unit):
        unit.free()
        self.fetch(self.next_unit(unit))


WRONG_PREFETCH = [
    (right.zero3, "no_overlap"),
    (right.zero2, "too_few_gathers"),
    (by(AtOnce), "blocking_collective"),
    (by(WaitsForIt), "waits_too_early forward"),
    (by(WaitsForItInBackward), "waits_too_early backward"),
    (by(Sleeps), "never_waited|rank_died"),
    (by(OnlyForward), "no_overlap backward"),
    (by(Itself), "no_overlap"),
    (by(TooLate), "no_overlap"),
    (by(FetchedAgain), "gathered_again"),
    (by(AllAhead), "too_far_ahead"),
    (by(TwoAhead), "too_far_ahead"),
    (by(NeverWaits), "wrong_loss")]


@pytest.mark.parametrize("answer, words", WRONG_PREFETCH,
                         ids=[answer.__name__ for answer, _ in WRONG_PREFETCH])
def test_wrong_prefetch(answer, words):
    rejected(lab.check_prefetch(answer), words)


def test_a_gather_without_a_handle_is_explained():
    """It may crash a rank, or compute with what is there: either is explained."""
    rejected(lab.check_prefetch(by(Unheld)),
             "rank_died|wrong_loss|raised_RuntimeError|never_waited")


class ByFuture(right.Prefetching):
    """Waits for the future of the handle, and only then for the handle."""

    def before_forward(self, unit):
        self.fetch(unit)
        self.fetch(self.next_unit(unit))
        if unit.handle is not None:
            unit.handle.get_future().wait()
        unit.wait()


@pytest.mark.parametrize("answer", [right.zero3_prefetch, by(Backwards), by(ByFuture)])
def test_right_prefetch(answer):
    accepted(lab.check_prefetch(answer))
