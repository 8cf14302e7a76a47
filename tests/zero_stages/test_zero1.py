"""What the check of exercise 3.2 must reject, and what it must accept."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
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


# 3.2 ZeRO-1


def flats_of(model):
    return [lab.FlatParameter(trainable(model))]


def by(optimizer):
    """The strategy of an optimizer class with the arguments of right.ZeRO1."""
    def strategy(model, optimizer_class, **settings):
        return model, optimizer(flats_of(model), optimizer_class, **settings)

    return strategy


def only_the_optimizer(model, optimizer_class, **settings):
    return plain(model, optimizer_class, **settings)[1]


def torchs_fsdp2(model, optimizer_class, **settings):
    fully_shard(model)
    return model, optimizer_class(model.parameters(), **settings)


class AllReduces(right.ZeRO1):
    """Every rank gets the whole sum and uses its own piece."""

    def reduce(self):
        for flat in self.flats:
            gradients = flat.flatten_gradients()
            dist.all_reduce(gradients)
            flat.shard.grad = gradients.view(N(), -1)[dist.get_rank()] / N()


class Sums(right.ZeRO1):
    def reduce(self):
        super().reduce()
        for flat in self.flats:
            flat.shard.grad *= N()


class DividesTwice(right.ZeRO1):
    def reduce(self):
        super().reduce()
        for flat in self.flats:
            flat.shard.grad /= N()


class OwnGradients(right.ZeRO1):
    def reduce(self):
        for flat in self.flats:
            flat.shard.grad = flat.flatten_gradients().view(N(), -1)[dist.get_rank()].clone()


class Stale(right.ZeRO1):
    """Updates its shard and keeps it to itself."""

    def gather(self):
        pass


class GathersFirst(right.ZeRO1):
    """The others' pieces are always one step old."""

    def step(self):
        self.reduce()
        self.gather()
        self.inner.step()


class RemainderDropped(right.ZeRO1):
    """Ψ // N numbers for each rank; the remainder belongs to no rank."""

    def gather(self):
        for flat in self.flats:
            rest = flat.full[flat.elements // N() * N():].clone()
            super().gather()
            flat.full[flat.elements // N() * N():] = rest


class GathersStates(right.ZeRO1):
    """All-gathers the moments too, to have "a complete optimizer" everywhere."""

    def gather(self):
        super().gather()
        for flat in self.flats:
            state = self.inner.state[flat.shard]
            for name in ("exp_avg", "exp_avg_sq"):
                all_gather(torch.empty_like(flat.full), state[name])


class KeepsStates(right.ZeRO1):
    """States of all parameters on every rank; each uses 1/N of them."""

    def __init__(self, flats, optimizer_class, **settings):
        super().__init__(flats, optimizer_class, **settings)
        self.spare = [(torch.zeros_like(flat.full), torch.zeros_like(flat.full))
                      for flat in flats]


class WholeInside(right.ZeRO1):
    """The inner optimizer updates everything, and only the own shard is sent."""

    def __init__(self, flats, optimizer_class, **settings):
        self.everything = [torch.nn.Parameter(flat.full) for flat in flats]
        inner = optimizer_class(self.everything, **settings)
        lab.ShardedOptimizer.__init__(self, inner, flats)

    def reduce(self):
        super().reduce()
        for whole, flat in zip(self.everything, self.flats, strict=True):
            whole.grad = torch.zeros_like(whole)
            whole.grad.view(N(), -1)[dist.get_rank()] = flat.shard.grad


class WholeGiven(right.ZeRO1):
    """Gives the inner optimizer tensors whose gradient is never set."""

    def __init__(self, flats, optimizer_class, **settings):
        inner = optimizer_class([flat.full for flat in flats], **settings)
        lab.ShardedOptimizer.__init__(self, inner, flats)


class WaitsTwice(right.ZeRO1):
    def reduce(self):
        for flat in self.flats:
            arriving = lab.reduce_scatter(flat.flatten_gradients())
            arriving.wait()
            flat.shard.grad = arriving.wait() / N()


class OwnGroups(right.ZeRO1):
    """A schedule changes groups that the update does not read."""

    def __init__(self, flats, optimizer_class, **settings):
        super().__init__(flats, optimizer_class, **settings)
        self.param_groups = [dict(group) for group in self.inner.param_groups]


class SettingsForgotten(right.ZeRO1):
    def __init__(self, flats, optimizer_class, lr, eps, **settings):
        inner = optimizer_class([flat.shard for flat in flats], lr=lr, eps=eps, weight_decay=0.0)
        lab.ShardedOptimizer.__init__(self, inner, flats)


class NewEveryStep(right.ZeRO1):
    def gather(self):
        super().gather()
        self.inner.state.clear()


class NeverForgets(right.ZeRO1):
    """zero_grad knows only the shards, so the parameters' gradients pile up."""

    def reduce(self):
        for flat in self.flats:
            flat.shard.grad = lab.reduce_scatter(flat.flatten_gradients()).wait() / N()

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


class NothingReduced(right.ZeRO1):
    def reduce(self):
        for flat in self.flats:
            flat.shard.grad = torch.zeros_like(flat.shard)


class KeepsAFlatCopy(right.ZeRO1):
    def reduce(self):
        super().reduce()
        self.kept = [flat.flatten_gradients() for flat in self.flats]


class AlwaysAdamW(right.ZeRO1):
    """Whatever class it is given."""

    def __init__(self, flats, optimizer_class, lr, **settings):
        inner = torch.optim.AdamW([flat.shard for flat in flats], lr=lr, weight_decay=0.1, eps=1e-3)
        lab.ShardedOptimizer.__init__(self, inner, flats)


class MomentumForgotten(right.ZeRO1):
    def __init__(self, flats, optimizer_class, momentum=0.0, **settings):
        super().__init__(flats, optimizer_class, **settings)


class HalvesAlways(right.ZeRO1):
    """Right on 2 ranks."""

    def reduce(self):
        for flat in self.flats:
            flat.shard.grad = lab.reduce_scatter(flat.flatten_gradients()).wait() / 2


class LastForgotten(right.ZeRO1):
    def reduce(self):
        for flat in self.flats[:-1]:
            flat.shard.grad = lab.reduce_scatter(flat.flatten_gradients()).wait() / N()


class InHalfPrecision(right.ZeRO1):
    def reduce(self):
        for flat in self.flats:
            half = flat.flatten_gradients().bfloat16()
            flat.shard.grad = lab.reduce_scatter(half).wait().float() / N()


class GradientsGathered(right.ZeRO1):
    """Each rank gets all gradients of all, and adds up its own piece."""

    def reduce(self):
        for flat in self.flats:
            mine = flat.flatten_gradients()
            everybody = [torch.empty_like(mine) for _ in range(N())]
            dist.all_gather(everybody, mine)
            total = sum(everybody).view(N(), -1)[dist.get_rank()]
            flat.shard.grad = total / N()


class StatesInNumpy(right.ZeRO1):
    """Keeps states of all parameters where torch does not count them."""

    def __init__(self, flats, optimizer_class, **settings):
        super().__init__(flats, optimizer_class, **settings)
        self.spare = [np.ones(2 * len(flat.full), dtype=np.float32) for flat in flats]


class CopiedShard(right.ZeRO1):
    """The shard is a copy: 4Ψ/N bytes more."""

    def __init__(self, flats, optimizer_class, **settings):
        for flat in flats:
            flat.shard.data = flat.shard.detach().clone()
        super().__init__(flats, optimizer_class, **settings)


WRONG = [
    (by(CopiedShard), "parameter_memory_too_high"),
    (plain, "gradient_of_one_rank"),
    (only_the_optimizer, "wrong_type strategy"),
    (ddp_by_hand, "optimizer_memory_too_high"),
    (torchs_ddp, "ready_made DistributedDataParallel"),
    (torchs_zero, "ready_made ZeroRedundancyOptimizer"),
    (torchs_fsdp2, "ready_made fully_shard"),
    (by(AllReduces), "all_reduced_not_scattered"),
    (by(Sums), "sum_not_mean"),
    (by(DividesTwice), "mean_twice"),
    (by(OwnGradients), "gradient_of_one_rank"),
    (by(Stale), "not_updated 1280"),
    (by(GathersFirst), "not_updated 1280"),
    (by(RemainderDropped), "not_updated"),
    (by(GathersStates), "too_much_sent"),
    (by(KeepsStates), "memory_too_high building"),
    (by(WholeInside), "optimizer_memory_too_high"),
    (by(WholeGiven), "not_updated"),
    (by(WaitsTwice), "raised_RuntimeError"),
    (by(OwnGroups), "schedule_ignored"),
    (by(SettingsForgotten), "weight_decay_missing"),
    (by(NewEveryStep), "new_optimizer_state"),
    (by(NeverForgets), "gradients_not_cleared"),
    (by(NothingReduced), "zero_gradient"),
    (by(AlwaysAdamW), "optimizer_class_ignored"),
    (by(MomentumForgotten), "momentum_missing"),
    (by(HalvesAlways), "differs_from_reference"),
    (by(LastForgotten), "not_updated"),
    (by(InHalfPrecision), "differs_from_reference"),
    (by(GradientsGathered), "too_much_sent"),
    (by(StatesInNumpy), "memory_outside_torch"),
    (by(KeepsAFlatCopy), "memory_too_high forward")]


def name_of(answer):
    cells = [cell.cell_contents for cell in answer.__closure__ or ()]
    return next((cell.__name__ for cell in cells if isinstance(cell, type)), answer.__name__)


@pytest.mark.parametrize("answer, words", WRONG, ids=[name_of(answer) for answer, _ in WRONG])
def test_wrong(answer, words):
    rejected(lab.check_zero1(answer), words)


# right, and written in another way


class TorchsGather(right.ZeRO1):
    """torch's own collective, which writes a parameter's memory in step()."""

    def gather(self):
        for flat in self.flats:
            dist.all_gather_into_tensor(flat.full, flat.shard)


def layer_by_layer(model, optimizer_class, **settings):
    return model, TorchsGather(lab.flatten_layers(model), optimizer_class, **settings)


class ByHand(torch.optim.Optimizer):
    """None of the lab's pieces, and torch's own collectives."""

    def __init__(self, parameters, optimizer_class, **settings):
        self.parameters, self.sizes = parameters, [p.numel() for p in parameters]
        self.full = self.flat([p.detach() for p in parameters])
        for parameter, piece in zip(parameters, self.split(self.full), strict=True):
            parameter.data = piece.view_as(parameter)
        self.shard = torch.nn.Parameter(self.full.chunk(N())[dist.get_rank()])
        self.inner = optimizer_class([self.shard], **settings)
        super().__init__([self.shard], {})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def flat(self, tensors):
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        return torch.nn.functional.pad(joined, (0, -len(joined) % N()))

    def split(self, flat):
        return flat[:sum(self.sizes)].split(self.sizes)

    def step(self):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, self.flat(gradients) / N())
        self.inner.step()
        dist.all_gather(list(self.full.chunk(N())), self.shard.detach())

    def zero_grad(self, set_to_none=True):
        self.shard.grad = None
        for parameter in self.parameters:
            parameter.grad = None


def by_hand(model, optimizer_class, **settings):
    return model, ByHand(trainable(model), optimizer_class, **settings)


def views_and_hooks(model, optimizer_class, **settings):
    """An ordinary optimizer over the shard, with hooks around its step."""
    [flat] = flats_of(model)
    optimizer = optimizer_class([flat.shard], **settings)

    def before(*_):
        received = torch.empty_like(flat.full)
        dist.all_to_all_single(received, flat.flatten_gradients())
        flat.shard.grad = received.view(N(), -1).mean(0)

    def after(*_):
        dist.all_gather(list(flat.full.view(N(), -1)), flat.shard.detach())
        for parameter in flat.parameters:
            parameter.grad = None

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return model, optimizer


@pytest.mark.parametrize("answer", [right.zero1, layer_by_layer, views_and_hooks, by_hand])
def test_right(answer):
    accepted(lab.check_zero1(answer))
