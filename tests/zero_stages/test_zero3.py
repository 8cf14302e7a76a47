"""What the check of exercise 3.4 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from zero_answers import (
    N,
    accepted,
    ddp_by_hand,
    plain,
    rejected,
    right,
    torchs_ddp,
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


def torchs_fsdp1(model, optimizer_class, **settings):
    module = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return plain(module, optimizer_class, **settings)


def torchs_fsdp2(model, optimizer_class, **settings):
    for child in model.children():
        fully_shard(child)
    fully_shard(model)
    return model, optimizer_class(model.parameters(), **settings)


def gather(unit):
    all_gather(unit.allocate(), unit.shard)


class KeptAfterForward(right.ZeRO3):
    """Gathered in forward and kept for backward."""

    def after_forward(self, unit):
        pass

    def before_backward(self, unit):
        pass


class GatheredOnce(right.ZeRO3):
    """Gathered in the first step, and never freed."""

    def before_forward(self, unit):
        if not unit.is_gathered:
            super().before_forward(unit)

    before_backward = before_forward

    def after_forward(self, unit):
        pass

    def after_backward(self, unit):
        right.ZeRO2.after_backward(self, unit)


class KeptAfterBackward(right.ZeRO3):
    def before_forward(self, unit):
        if not unit.is_gathered:
            super().before_forward(unit)

    def before_backward(self, unit):
        gather(unit)

    def after_backward(self, unit):
        right.ZeRO2.after_backward(self, unit)


class NotForBackward(right.ZeRO3):
    """Freed after forward, not gathered again."""

    def before_backward(self, unit):
        pass


class NotAllocated(right.ZeRO3):
    """Gathers into memory that has been given back."""

    def before_forward(self, unit):
        all_gather(unit.full, unit.shard)

    def before_backward(self, unit):
        gather(unit)


class NotForForward(right.ZeRO3):
    def before_forward(self, unit):
        pass

    def before_backward(self, unit):
        gather(unit)


class AllAtOnce(right.ZeRO3):
    """Gathers the whole model before forward, and frees it layer by layer."""

    def before_forward(self, unit):
        if unit is self.units[0]:
            for each in self.units:
                gather(each)
        elif not unit.is_gathered:
            gather(unit)

    def before_backward(self, unit):
        gather(unit)


class Allocated(right.ZeRO3):
    """Memory for the layer, and nothing in it but the own shard."""

    def before_forward(self, unit):
        unit.allocate().view(N(), -1).zero_()[dist.get_rank()] = unit.shard.detach()

    before_backward = before_forward


class GathersTwice(right.ZeRO3):
    def before_forward(self, unit):
        gather(unit)
        gather(unit)


class ReducesAll(right.ZeRO3):
    """The whole sum on every rank."""

    def after_backward(self, unit):
        unit.free()
        gradients = unit.flatten_gradients()
        for parameter in unit.parameters:
            parameter.grad = None
        dist.all_reduce(gradients)
        unit.add_gradient(gradients.view(N(), -1)[dist.get_rank()] / N())


class AfterBackward(right.ZeRO3):
    """Parameters are freed in time; gradients wait for the end."""

    def after_backward(self, unit):
        unit.free()
        self.__dict__.setdefault("late", []).append(unit)

    def backward_done(self):
        for unit in self.__dict__.pop("late", []):
            right.ZeRO2.after_backward(self, unit)
            right.ZeRO2.backward_done(self)


class NotReduced(right.ZeRO3):
    def after_backward(self, unit):
        unit.free()
        unit.add_gradient(unit.flatten_gradients().view(N(), -1)[dist.get_rank()].clone())
        for parameter in unit.parameters:
            parameter.grad = None


class Sums(right.ZeRO3):
    def backward_done(self):
        if self.in_flight:
            unit, arriving = self.in_flight
            unit.add_gradient(arriving.wait())
        self.in_flight = None


class GradientsKept(right.ZeRO3):
    """Frees parameters and forgets that gradients take as much."""

    def after_backward(self, unit):
        kept = [parameter.grad for parameter in unit.parameters]
        super().after_backward(unit)
        self.__dict__.setdefault("kept", {})[unit] = kept


class HalvesKept(right.ZeRO3):
    """A copy of half of each unit stays until its backward."""

    def after_forward(self, unit):
        self.__dict__.setdefault("kept", {})[unit] = unit.full[:len(unit.full) // 2].clone()
        super().after_forward(unit)

    def before_backward(self, unit):
        self.kept.pop(unit, None)
        super().before_backward(unit)


class EveryOtherKept(right.ZeRO3):
    """Every second unit stays gathered until its backward."""

    def after_forward(self, unit):
        if self.units.index(unit) % 2:
            super().after_forward(unit)

    def before_backward(self, unit):
        if not unit.is_gathered:
            super().before_backward(unit)


class CopiesUntilForwardEnds(right.ZeRO3):
    """Gathers into a tensor that it keeps until the last unit has computed."""

    def before_forward(self, unit):
        super().before_forward(unit)
        self.__dict__.setdefault("kept", []).append(unit.full.clone())

    def before_backward(self, unit):
        gather(unit)

    def after_forward(self, unit):
        super().after_forward(unit)
        if unit is self.units[0]:
            self.kept.clear()


class HalfGradientsKept(right.ZeRO3):
    """A copy of half of each unit's gradients stays."""

    def after_backward(self, unit):
        flat = unit.flatten_gradients()
        self.__dict__.setdefault("kept", {})[unit] = flat[:len(flat) // 2].clone()
        super().after_backward(unit)


class FullMaster(right.ZeRO3):
    """Keeps a full copy of each unit from the beginning."""

    def __init__(self, model):
        super().__init__(model)
        self.__dict__["masters"] = [unit.full.clone() for unit in self.units]


class SecondState(lab.ShardedOptimizer):
    """A second optimizer holds moments of the same shards."""

    def __init__(self, inner, units):
        super().__init__(inner, units)
        self.second = type(inner)([unit.shard for unit in units], lr=0.0, weight_decay=0.0)

    def gather(self):
        self.second.step()


def not_freed_at_first(model, optimizer_class, **settings):
    """The first forward frees the units, not __init__."""
    module = right.ZeRO3(model)
    for unit in module.units:
        unit.free()
        gather(unit)
    inner = optimizer_class([unit.shard for unit in module.units], **settings)
    return module, lab.ShardedOptimizer(inner, module.units)


class RemainderDropped(right.ZeRO3):
    """What does not divide is taken from memory that was never filled."""

    def before_forward(self, unit):
        super().before_forward(unit)
        rest = unit.elements % N()
        if rest:
            unit.full[unit.elements - rest:] = 0

    before_backward = before_forward


class GathersAfterStep(lab.ShardedOptimizer):
    """As in ZeRO-1, although the next forward gathers anyway."""

    def gather(self):
        for flat in self.flats:
            gather(flat)
            flat.free()


class GathersStates(lab.ShardedOptimizer):
    def gather(self):
        for flat in self.flats:
            for name in ("exp_avg", "exp_avg_sq"):
                state = self.state[flat.shard].get(name)
                if state is not None:
                    all_gather(flat.full.new_empty(flat.full.shape), state)


class RootGatheredOnce(right.ZeRO3):
    """Layers come and go; the root is gathered in the first forward and stays."""

    def before_forward(self, unit):
        if unit.module is not self.module or not unit.is_gathered:
            gather(unit)

    before_backward = before_forward

    def after_forward(self, unit):
        if unit.module is not self.module:
            unit.free()

    def after_backward(self, unit):
        if unit.module is not self.module:
            unit.free()
        right.ZeRO2.after_backward(self, unit)


class FreedAfterBackwardAlone(right.ZeRO3):
    """after_forward forgotten; gathered again all the same."""

    def after_forward(self, unit):
        pass


class WithoutSuper(right.ZeRO3):
    """Frees the unit, and leaves its gradients where they are."""

    def after_backward(self, unit):
        unit.free()


class LastUnitIsTheRoot(right.ZeRO3):
    """Takes the last unit for the root and leaves it whole: with old parameters where it is a
    layer."""

    def before_forward(self, unit):
        if not unit.is_gathered:
            gather(unit)

    before_backward = before_forward

    def after_backward(self, unit):
        right.ZeRO2.after_backward(self, unit)
        if unit is not self.units[-1] or unit.name != "4":
            unit.free()


class InHalfPrecision(right.ZeRO3):
    def before_forward(self, unit):
        whole = torch.empty_like(unit.full, dtype=torch.bfloat16)
        all_gather(whole, unit.shard.detach().bfloat16())
        unit.allocate().copy_(whole)

    before_backward = before_forward


WRONG = [
    (by(RootGatheredOnce), "not_updated|wrong_loss"),
    (by(LastUnitIsTheRoot), "not_updated|wrong_loss"),
    (by(InHalfPrecision), "wrong_loss"),
    (plain, "gradient_of_one_rank"),
    (ddp_by_hand, "leaves_too_late"),
    (torchs_ddp, "ready_made DistributedDataParallel"),
    (torchs_fsdp1, "ready_made FullyShardedDataParallel"),
    (torchs_fsdp2, "ready_made fully_shard"),
    (right.zero2, "parameter_memory_too_high"),
    (by(KeptAfterForward), "memory_kept"),
    (by(FreedAfterBackwardAlone), "memory_kept"),
    (by(WithoutSuper), "not_updated"),
    (by(GatheredOnce), "not_updated|wrong_loss"),
    (by(KeptAfterBackward), "not_updated|wrong_loss"),
    (by(NotForBackward), "not_gathered backward"),
    (by(NotAllocated), "raised_RuntimeError returns"),
    (by(NotForForward), "not_gathered forward"),
    (by(AllAtOnce), "peak_too_high"),
    (by(Allocated), "wrong_loss"),
    (by(GathersTwice), "too_much_sent"),
    (by(ReducesAll), "all_reduced_not_scattered"),
    (by(AfterBackward), "leaves_too_late"),
    (by(NotReduced), "gradient_of_one_rank"),
    (by(Sums), "sum_not_mean"),
    (by(GradientsKept), "memory_too_high"),
    (by(HalvesKept), "memory_too_high"),
    (by(EveryOtherKept), "memory_kept"),
    (by(CopiesUntilForwardEnds), "peak_too_high"),
    (by(HalfGradientsKept), "memory_too_high"),
    (by(FullMaster), "memory_too_high"),
    (by(right.ZeRO3, SecondState), "memory_too_high"),
    (not_freed_at_first, "parameter_memory_too_high"),
    (by(RemainderDropped), "wrong_loss"),
    (by(right.ZeRO3, GathersAfterStep), "too_much_sent"),
    (by(right.ZeRO3, GathersStates), "too_much_sent 5.0")]


@pytest.mark.parametrize("answer, words", WRONG, ids=[answer.__name__ for answer, _ in WRONG])
def test_wrong(answer, words):
    rejected(lab.check_zero3(answer), words)


# right, and written in another way


class Listed(lab.ShardedModule):
    """The methods of a base class, and torch's own collectives."""

    def before_forward(self, unit):
        dist.all_gather(list(unit.allocate().view(N(), -1)), unit.shard.detach())

    before_backward = before_forward

    def after_forward(self, unit):
        unit.free()

    def after_backward(self, unit):
        flat = unit.flatten_gradients()
        unit.free()
        for parameter in unit.parameters:
            parameter.grad = None
        unit.add_gradient(lab.reduce_scatter(flat.div_(N())).wait())


class RootKept(right.ZeRO3):
    """The root's backward follows its forward at once: it may stay."""

    def after_forward(self, unit):
        if unit.module is not self.module:
            unit.free()

    def before_backward(self, unit):
        if not unit.is_gathered:
            gather(unit)


class LastLayerKept(right.ZeRO3):
    """Backward begins with the last layer: it may stay, too, and is gathered once less."""

    def after_forward(self, unit):
        if unit is not self.units[-1]:
            unit.free()

    def before_backward(self, unit):
        if not unit.is_gathered:
            gather(unit)

    def before_forward(self, unit):
        if not unit.is_gathered:
            gather(unit)


class Functional(right.ZeRO3):
    def before_forward(self, unit):
        whole = funcol.all_gather_tensor(unit.shard.detach(), 0, dist.group.WORLD)
        unit.allocate().copy_(whole)

    before_backward = before_forward


@pytest.mark.parametrize("answer", [right.zero3, right.zero3_prefetch, by(Listed),
                                    by(LastLayerKept), by(Functional)])
def test_right(answer):
    accepted(lab.check_zero3(answer))


def test_the_verdict_says_what_was_measured():
    """A root that stays is gathered once less."""
    accepted(verdict := lab.check_zero3(by(RootKept)))
    assert "moves 2.97Ψ elements a step (measured" in str(verdict)
