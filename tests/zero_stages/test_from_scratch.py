"""What the check of exercise 3.10 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from zero_answers import (
    N,
    accepted,
    plain,
    rejected,
    right,
)

import labs.zero_stages as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["zero_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


def torchs_fsdp2(model, optimizer_class, **settings):
    for child in model.children():
        fully_shard(child)
    fully_shard(model)
    return model, optimizer_class(model.parameters(), **settings)


# 3.10 without the scaffold


def units_in(model):
    return [right.FlatUnit(module, parameters)
            for _, module, parameters in lab.layer_groups(model)]


def never_freed(model, optimizer_class, **settings):
    """Units whose memory stays."""
    units = units_in(model)
    for unit in units:
        right.unshard_unit(unit)
        for parameter in unit.parameters:
            parameter.register_post_accumulate_grad_hook(
                lambda _, unit=unit: right.gradient_ready(unit))
    return model, optimizer_class([unit.shard for unit in units], **settings)


def without_backward(model, optimizer_class, **settings):
    """Gathered for forward alone."""
    units = units_in(model)
    for unit in units:
        unit.module.register_forward_pre_hook(lambda *_, unit=unit: right.unshard_unit(unit))
        unit.module.register_forward_hook(lambda *_, unit=unit: right.free_unit(unit))
    return model, optimizer_class([unit.shard for unit in units], **settings)


def sharded_module_used(model, optimizer_class, **settings):
    module = right.ZeRO3(model)
    return module, optimizer_class([unit.shard for unit in module.units], **settings)


def units_of(kind):
    """The solution with another class of units."""
    def strategy(model, optimizer_class, **settings):
        units = [kind(module, parameters) for _, module, parameters in lab.layer_groups(model)]
        for unit in units:
            right.add_hooks(unit)
        return model, optimizer_class([unit.shard for unit in units], **settings)

    strategy.__name__ = kind.__name__
    return strategy


def counted_by(ready):
    """The solution with another function for complete gradients."""
    def strategy(model, optimizer_class, **settings):
        units = units_in(model)
        for unit in units:
            right.add_hooks(unit)
            for parameter in unit.parameters:
                parameter._post_accumulate_grad_hooks.clear()
                parameter.register_post_accumulate_grad_hook(lambda _, unit=unit: ready(unit))
        return model, optimizer_class([unit.shard for unit in units], **settings)

    strategy.__name__ = ready.__name__
    return strategy


def last_pass_alone(unit):
    """unit.shard.grad = mean: what an earlier backward pass has left is lost."""
    before, unit.shard.grad = unit.shard.grad, None
    right.gradient_ready(unit)
    if unit.ready:
        unit.shard.grad = before


def not_reduced(unit):
    """Frees the unit and its gradients, which reach nobody."""
    right.gradient_ready(unit)
    unit.shard.grad = None


def last_unit_first(model, optimizer_class, **settings):
    """Units in another order than the lab's: its losses alone are compared."""
    units = [right.FlatUnit(module, parameters) for _, module, parameters in
             reversed(lab.layer_groups(model))]
    for unit in units:
        right.add_hooks(unit)
    return model, optimizer_class([unit.shard for unit in units], **settings)


class ShardIsAView(right.FlatUnit):
    """The piece of `full` is not cloned, so it is freed with it."""

    def __init__(self, module, parameters):
        super().__init__(module, parameters)
        right.unshard_unit(self)
        self.shard = torch.nn.Parameter(self.full.view(N(), -1)[dist.get_rank()])
        right.free_unit(self)


class ShardIsAViewUntilLater(ShardIsAView):
    """The same, with parameters that are there until the first forward has ended."""

    def __init__(self, module, parameters):
        right.FlatUnit.__init__(self, module, parameters)
        right.unshard_unit(self)
        self.shard = torch.nn.Parameter(self.full.view(N(), -1)[dist.get_rank()])


@pytest.mark.parametrize("answer, words", [
    (plain, "gradient_of_one_rank|wrong_loss"),
    (counted_by(last_pass_alone), "not_accumulated"),
    (counted_by(not_reduced), "not_updated unit.shard.grad"),
    (units_of(ShardIsAView), "shard_without_memory"),
    (units_of(ShardIsAViewUntilLater), "shard_without_memory"),
    (right.zero3, "ready_made"),
    (sharded_module_used, "ready_made"),
    (never_freed, "raised_RuntimeError"),
    (without_backward, "raised_RuntimeError|wrong_loss|rank_died|not_updated"),
    (torchs_fsdp2, "ready_made fully_shard")],
    ids=["plain", "last_pass_alone", "not_reduced", "shard_is_a_view",
         "shard_is_a_view_until_later", "zero3", "sharded_module_used", "never_freed",
         "without_backward", "fsdp2"])
def test_wrong_from_scratch(answer, words):
    rejected(lab.check_from_scratch(answer), words)


@pytest.mark.parametrize("answer", [right.my_zero3, last_unit_first])
def test_right_from_scratch(answer):
    accepted(lab.check_from_scratch(answer))
