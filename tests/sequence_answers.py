"""Parts of answers to exercises 7.7 and 7.9: sequence parallelism, and torch's plan for it, with
one thing done otherwise than in the solution."""

import functools

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
import torch.nn.functional as F
from _build.definitions import definitions
from torch.distributed.device_mesh import init_device_mesh

import labs.tensor_parallel as lab
from labs.tensor_parallel.sequence_collectives import join_sequence, split_sequence

right = definitions("07a_tensor_parallel")


class RowToPiece(right.RowParallelLinear):
    """A row-parallel layer whose output is this rank's tokens; its bias has a partial gradient."""

    def forward(self, x):
        piece = right.ReduceScatterFromRegion.apply(F.linear(x, self.weight), self.group)
        return piece if self.bias is None else piece + self.bias


def sum_gradients(model, group):
    """Sums the partial gradients of norms and biases over the group."""
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
            right.sum_gradient(parameter, group)


def parallel(model, optimizer_class, group=None, *, row=None, enter=None, matrices_enter=False,
             split=None, join=None, gradients=None, change=lambda model: None, **settings):
    """The solution of 7.7, with other parts: enter, split, join (hidden states, group), row(linear,
    group), gradients(model, group); change(model) comes before the optimizer is made."""
    group = group or dist.group.WORLD
    row = row or RowToPiece
    enter = enter or right.GatherToRegion.apply
    for layer in model.model.layers:
        for module, names in ((layer.self_attn, "q k v o"), (layer.mlp, "gate up down")):
            *columns, last = [f"{name}_proj" for name in names.split()]
            for name in columns:
                setattr(module, name, right.column_shard(getattr(module, name), group))
            setattr(module, last, row(getattr(module, last), group))
            entered = ([module.gate_proj, module.up_proj] if matrices_enter and module is layer.mlp
                       else [module])
            for entry in entered:
                lab.map_input(entry, lambda piece: enter(piece, group))
    lab.map_input(model.model.layers[0], lambda x: (split or split_sequence)(x, group))
    model.model.norm.register_forward_hook(
        lambda _, __, piece: (join or join_sequence)(piece, group))
    (gradients or sum_gradients)(model, group)
    change(model)
    return model, optimizer_class(model.parameters(), **settings)


def by(**parts):
    """A strategy: the solution of 7.7 with these parts."""
    return functools.partial(parallel, **parts)


def torchs(model, optimizer_class, *, without=(), outside=None, group=None, ranks=None,
           change=lambda model, optimizer: None, plan=None, **settings):
    """The strategy of 7.9, with entries of the plan for a layer left out (without) or others in
    their place (plan); change(model, optimizer) comes at the end."""
    mesh = init_device_mesh("cpu", (ranks or dist.get_world_size(),))
    entries = {**right.ENTRIES, **right.layer_plan(), **(plan or {})}
    layers = {f"model.layers.*.{name}": style for name, style in entries.items()
              if name not in without}
    model = tp.parallelize_module(model, mesh, {**right.OUTSIDE, **(outside or {}), **layers})
    optimizer = optimizer_class(model.parameters(), **settings)
    change(model, optimizer)
    return model, optimizer


def planned(**parts):
    """A strategy: the solution of 7.9 with these parts."""
    return functools.partial(torchs, **parts)


def nothing(model, optimizer_class, group=None, **settings):
    """Divides nothing."""
    return model, optimizer_class(model.parameters(), **settings)


def ddp_by_hand(model, optimizer_class, group=None, **settings):
    """Each rank has the whole model, and gradients are averaged."""
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: dist.all_reduce(p.grad.div_(dist.get_world_size(group)), group=group))
    return model, optimizer_class(model.parameters(), **settings)


def early_optimizer(strategy):
    """The strategy, with an optimizer that was made of the whole model's parameters."""
    def early(model, optimizer_class, group=None, **settings):
        optimizer = optimizer_class(model.parameters(), **settings)
        return strategy(model, torch.optim.SGD, lr=1.0)[0], optimizer

    return early


def scale_rank_1(model, *_):
    """On rank 1 the first MLP's output is half as large again."""
    if dist.get_rank() == 1:
        model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: output * 1.5)
