"""What the check of 7.3 must reject, and what it must accept."""

import copy
import functools
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _build.definitions import definitions
from answers import judge_all
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("07a_tensor_parallel")
f, g, Row = right.CopyToRegion, right.ReduceFromRegion, right.RowParallelLinear


def parallel(model, optimizer_class, group=None, *, column=None, row=None, enter=None,
             each_enters=False, refuse=True, **settings):
    """The solution, with other parts."""
    group = group or dist.group.WORLD
    column, row = column or right.column_shard, row or Row
    enter = enter or (lambda x: f.apply(x, group))
    if refuse:
        right.share(model.config.num_attention_heads, group, "self_attn")
        right.share(model.config.num_key_value_heads, group, "self_attn")
        right.share(model.config.intermediate_size, group, "mlp")
    for layer in model.model.layers:
        for module, names, exit_name in ((layer.self_attn, "qkv", "o_proj"),
                                         (layer.mlp, ("gate", "up"), "down_proj")):
            for name in names:
                shard = column(getattr(module, f"{name}_proj"), group)
                setattr(module, f"{name}_proj", shard)
                if each_enters:
                    lab.map_input(shard, enter)
            setattr(module, exit_name, row(getattr(module, exit_name), group))
            if not each_enters:
                lab.map_input(module, enter)
    return model, optimizer_class(model.parameters(), **settings)


def by(**parts):
    return functools.partial(parallel, **parts)


def nothing(model, optimizer_class, group=None, **settings):
    return model, optimizer_class(model.parameters(), **settings)


def torchs_ddp(model, optimizer_class, group=None, **settings):
    return DistributedDataParallel(model), optimizer_class(model.parameters(), **settings)


def ddp_by_hand(model, optimizer_class, group=None, **settings):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: dist.all_reduce(p.grad.div_(dist.get_world_size(group)), group=group))
    return model, optimizer_class(model.parameters(), **settings)


def own_rows(rows_of):
    """A column shard of the rows rows_of(weight, size, rank, ranks)."""
    def column(linear, group):
        shard = right.column_shard(linear, group)
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        chosen = rows_of(torch.arange(linear.out_features), len(shard.weight), rank, ranks)
        shard.weight.data = linear.weight.data[chosen].clone()
        if linear.bias is not None:
            shard.bias.data = linear.bias.data[chosen].clone()
        return shard

    return column


in_turn = own_rows(lambda rows, size, rank, ranks: rows[rank::ranks])
first_part = own_rows(lambda rows, size, rank, ranks: rows[:size])
# heads of 6 elements, as the model of the check has them
heads_in_turn = own_rows(lambda rows, size, rank, ranks: rows.view(-1, 2)[rank::ranks].flatten())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, group, dimension):
        ctx.rank, ctx.ranks, ctx.dimension = (dist.get_rank(group), dist.get_world_size(group),
                                              dimension)
        every = [torch.empty_like(shard) for _ in range(ctx.ranks)]
        dist.all_gather(every, shard.contiguous(), group=group)
        return torch.cat(every, dimension)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.ranks, ctx.dimension)[ctx.rank].contiguous(), None, None


class Gathered(nn.Module):
    """Holds a shard, and gathers the weight in forward, as FSDP does."""

    dimension = 0

    def __init__(self, linear, group):
        super().__init__()
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        right.share(linear.weight.shape[self.dimension], group, "mlp")
        self.weight = nn.Parameter(
            linear.weight.detach().chunk(ranks, self.dimension)[rank].clone())
        bias = linear.bias
        if bias is not None and not self.dimension:
            bias = nn.Parameter(bias.detach().chunk(ranks)[rank].clone())
        self.bias, self.group = bias, group

    def forward(self, x):
        bias = self.bias
        if bias is not None and not self.dimension:
            bias = _Gather.apply(bias, self.group, 0)
        return F.linear(x, _Gather.apply(self.weight, self.group, self.dimension), bias)


class GatheredColumns(Gathered):
    dimension = 1


def row(**changes):
    """A subclass of the solution's RowParallelLinear, with other methods."""
    return type("RowParallelLinear", (Row,), changes)


def no_sum(self, x):
    return F.linear(x, self.weight, self.bias)


def bias_on_all(self, x):
    return g.apply(F.linear(x, self.weight, self.bias), self.group)


class SumsTwice(g):
    """An all-reduce whose backward is one, too."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return g.forward(ctx, x, group)

    @staticmethod
    def backward(ctx, gradient):
        return f.backward(ctx, gradient)


def gradient_summed(self, x):
    y = SumsTwice.apply(F.linear(x, self.weight), self.group)
    return y if self.bias is None else y + self.bias


def kept_aside(model, optimizer_class, group=None, **settings):
    before = copy.deepcopy(model.model.layers)
    module, optimizer = parallel(model, optimizer_class, group, **settings)
    module.model.before = list(before)  # not registered: no parameters of the module
    return module, optimizer


def early_optimizer(model, optimizer_class, group=None, **settings):
    optimizer = optimizer_class(model.parameters(), **settings)
    return parallel(model, optimizer_class, group, **settings)[0], optimizer


def other_settings(model, optimizer_class, group=None, **settings):
    return parallel(model, optimizer_class, group, lr=settings["lr"])


def norms_reduced(model, optimizer_class, group=None, **settings):
    """Sums gradients that are whole on every rank."""
    module, optimizer = parallel(model, optimizer_class, group, **settings)
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.register_post_accumulate_grad_hook(
                lambda p: dist.all_reduce(p.grad, group=group))
    return module, optimizer


def scale_on_one_rank(model, optimizer_class, group=None, **settings):
    module, optimizer = parallel(model, optimizer_class, group, **settings)
    if dist.get_rank(group) == 1:
        module.model.layers[0].mlp.register_forward_hook(lambda _, __, output: output * 1.01)
    return module, optimizer


def loss_divided(model, optimizer_class, group=None, **settings):
    module, optimizer = parallel(model, optimizer_class, group, **settings)
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient / dist.get_world_size(group))
    return module, optimizer


def names_every_module(model, optimizer_class, group=None, **settings):
    """One sentence for all that does not divide."""
    config, ranks = model.config, dist.get_world_size(group)
    for size in (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size):
        if size % ranks:
            raise ValueError(f"self_attn or mlp: {ranks} ranks do not divide {size}; use 2 or 4")
    return parallel(model, optimizer_class, group, **settings)


def half_done(model, optimizer_class, group=None, **settings):
    """Attention is divided, the MLP is left whole."""
    group = group or dist.group.WORLD
    for layer in model.model.layers:
        for name in "qkv":
            setattr(layer.self_attn, f"{name}_proj",
                    right.column_shard(getattr(layer.self_attn, f"{name}_proj"), group))
        layer.self_attn.o_proj = Row(layer.self_attn.o_proj, group)
        lab.map_input(layer.self_attn, lambda x: f.apply(x, group))
    return model, optimizer_class(model.parameters(), **settings)


def entered_by(*chosen):
    """f at the entry of some of query, key, value, gate and up alone."""
    def strategy(model, optimizer_class, group=None, **settings):
        made = parallel(model, optimizer_class, group, enter=lambda x: x, **settings)
        for name, module in made[0].named_modules():
            if name.endswith(tuple(f"{each}_proj" for each in chosen)):
                lab.map_input(module, lambda x: f.apply(x, group or dist.group.WORLD))
        return made
    return strategy


WRONG = [
    (entered_by("q", "v", "gate", "up"), "gradient_partly_summed"),
    (entered_by("q", "k", "v", "gate"), "gradient_partly_summed"),
    (nothing, "parameter_memory_too_high"),
    (torchs_ddp, "ready_made"),
    (ddp_by_hand, "wrong_traffic"),
    (half_done, "parameter_memory_too_high"),
    (by(column=Gathered, row=GatheredColumns, enter=lambda x: x),
     "wrong_traffic all-gathers"),
    (by(enter=lambda x: x), "gradient_not_summed"),
    (by(each_enters=True), "wrong_traffic"),
    (by(row=row(forward=no_sum)),
     "not_summed"),
    (by(row=row(forward=bias_on_all)), "bias_on_every_rank"),
    (by(row=row(forward=gradient_summed)), "summed_too_often"),
    (kept_aside, "memory_too_high"),
    (by(column=heads_in_turn), "wrong_part not"),
    (by(column=in_turn), "dealt_out"),
    (by(column=first_part), "same_part"),
    (early_optimizer, "not_updated"),
    (other_settings, "settings_ignored"),
    (norms_reduced, "summed_too_often 'model.norm.weight'"),
    (scale_on_one_rank, "wrong_output"),
    (loss_divided, "averaged"),
    (by(refuse=False), "no_error key/value"),
    (names_every_module, "wrong_module_named"),
    (lambda model, optimizer_class, group=None, **settings: parallel(
        model, optimizer_class, group, **settings)[0], "wrong_type")]


# right, and written in another way


def last_first(linear, group, dimension):
    ranks = dist.get_world_size(group)
    return nn.Parameter(linear.detach().chunk(ranks, dimension)[
        ranks - 1 - dist.get_rank(group)].clone())


def column_backwards(linear, group):
    """Rank 0 takes the last part, of rows and of columns alike."""
    shard = right.column_shard(linear, group)
    shard.weight = last_first(linear.weight, group, 0)
    if linear.bias is not None:
        shard.bias = last_first(linear.bias, group, 0)
    return shard


class RowBackwards(Row):
    def __init__(self, linear, group):
        super().__init__(linear, group)
        self.weight = last_first(linear.weight, group, 1)


class FusedAttention(nn.Module):
    """Has the layers' shards, applies f once in a forward of its own, and calls the old one."""

    def __init__(self, attention, group):
        super().__init__()
        self.attention, self.group = attention, group
        for name in "qkv":
            setattr(attention, f"{name}_proj",
                    right.column_shard(getattr(attention, f"{name}_proj"), group))
        attention.o_proj = Row(attention.o_proj, group)

    def forward(self, hidden_states, **named):
        return self.attention(f.apply(hidden_states, self.group), **named)


class DividedMLP(nn.Module):
    """Gate and up as one product of its two shards; sums by hand."""

    def __init__(self, mlp, group):
        super().__init__()
        self.gate_proj = right.column_shard(mlp.gate_proj, group)
        self.up_proj = right.column_shard(mlp.up_proj, group)
        self.down_proj, self.act_fn, self.group = Row(mlp.down_proj, group), mlp.act_fn, group

    def forward(self, x):
        both = F.linear(f.apply(x, self.group), torch.cat([self.gate_proj.weight,
                                                           self.up_proj.weight]))
        gate, up = both.chunk(2, -1)
        if self.gate_proj.bias is not None:
            gate, up = gate + self.gate_proj.bias, up + self.up_proj.bias
        return self.down_proj(self.act_fn(gate) * up)


def refused(model, group):
    for name, where in (("num_attention_heads", "self_attn"), ("num_key_value_heads", "self_attn"),
                        ("intermediate_size", "mlp")):
        right.share(getattr(model.config, name), group, f"{where}: {name}")


def modules_replaced(model, optimizer_class, group=None, **settings):
    group = group or dist.group.WORLD
    refused(model, group)
    for layer in model.model.layers:
        layer.self_attn = FusedAttention(layer.self_attn, group)
        layer.mlp = DividedMLP(layer.mlp, group)
    return model, optimizer_class(model.parameters(), **settings)


def by_hooks(model, optimizer_class, group=None, **settings):
    """g as a forward hook of the exit, f on the norm's output; weights replaced in the layers."""
    group = group or dist.group.WORLD
    refused(model, group)
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda _, __, output: f.apply(output, group))
        for name, linear in layer.named_modules():
            if isinstance(linear, nn.Linear):
                is_exit = name.endswith(("o_proj", "down_proj"))
                linear.weight = nn.Parameter(
                    linear.weight.detach().chunk(ranks, int(is_exit))[rank].clone())
                if is_exit:
                    linear.register_forward_hook(functools.partial(sum_without_bias, group))
                elif linear.bias is not None:
                    linear.bias = nn.Parameter(linear.bias.detach().chunk(ranks)[rank].clone())
    return model, optimizer_class(model.parameters(), **settings)


def sum_without_bias(group, linear, _, output):
    if linear.bias is None:
        return g.apply(output, group)
    return g.apply(output - linear.bias, group) + linear.bias


class ParallelAttention(LlamaAttention):
    """A subclass whose forward enters with f."""

    def forward(self, hidden_states, **named):
        return super().forward(f.apply(hidden_states, self.group), **named)


class ParallelMLP(LlamaMLP):
    def forward(self, x):
        return super().forward(f.apply(x, self.group))


def subclassed(model, optimizer_class, group=None, **settings):
    model, _ = parallel(model, torch.optim.SGD, group, enter=lambda x: x, lr=1.0)
    for layer in model.model.layers:
        for module, kind in ((layer.self_attn, ParallelAttention), (layer.mlp, ParallelMLP)):
            module.__class__, module.group = kind, group or dist.group.WORLD
    return model, optimizer_class(model.parameters(), **settings)


RIGHT = [(right.tensor_parallel,), (by(column=column_backwards, row=RowBackwards),),
         (modules_replaced,), (by_hooks,), (subclassed,)]


@pytest.mark.slow
def test_tensor_parallel_on_2_ranks():
    judge_all(lab.check_tensor_parallel, WRONG, RIGHT, ranks=2)


def reduced_over_all(model, optimizer_class, group=None, **settings):
    """Forgets the group."""
    return parallel(model, optimizer_class, None, **settings)


WRONG_ON_4 = [(reduced_over_all, "wrong_shape"),
              (by(refuse=False), "no_error elements")]


@pytest.mark.slow
def test_tensor_parallel_on_4_ranks():
    judge_all(lab.check_tensor_parallel, WRONG_ON_4, RIGHT[:1], ranks=4)


def test_an_answer_that_is_not_filled_in_is_waited_for():
    def unfilled(model, optimizer_class, group=None, **settings):
        raise NotImplementedError("Exercise 7.3")

    verdict = lab.check_tensor_parallel(unfilled)
    assert verdict.passed is None and "7.3" in str(verdict)
