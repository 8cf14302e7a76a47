"""What the check of 7.7 must reject, with the words that must say why, and what it must accept."""

import copy
import sys

import cloudpickle
import pytest
import sequence_answers
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as functional
import torch.nn.functional as F
from answers import judge_all
from sequence_answers import (
    RowToPiece,
    by,
    ddp_by_hand,
    early_optimizer,
    nothing,
    parallel,
    right,
    scale_rank_1,
    sum_gradients,
    torchs,
)
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import labs.tensor_parallel as lab
from labs.tensor_parallel.sequence_collectives import join_sequence, split_sequence
from labs.workers.launcher import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sequence_answers)
pytestmark = pytest.mark.usefixtures("warm_launcher")
Gather, Scatter, Row = right.GatherToRegion, right.ReduceScatterFromRegion, RowToPiece


def function(forward, backward):
    """An autograd function of forward(x, group) and backward(gradient, group)."""
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx, gradient):
            return backward(gradient, ctx.group), None

    return Function


gather, scatter = right.all_gather_sequence, right.reduce_scatter_sequence


def own(x, group):
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].clone()


def repeated(x, group):
    return torch.cat([x] * dist.get_world_size(group), 1)


def padded(x, group):
    pieces = [torch.zeros_like(x) for _ in range(dist.get_world_size(group))]
    pieces[dist.get_rank(group)] = x
    return torch.cat(pieces, 1)


def mean(x, group):
    return scatter(x, group) / dist.get_world_size(group)


def reduced_whole(x, group):
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return own(total, group)


def scaled_on_rank_1(x, group):
    return scatter(x, group) * (1 + (dist.get_rank(group) == 1))


def along_batch(x, group):
    pieces = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces)


def written_to(x, group):
    x.data.mul_(2)
    return gather(x, group)


FUNCTIONS = [
    ((function(lambda x, group: x.clone(), lambda x, group: x), Scatter),
     "wrong_type"),
    ((function(repeated, own), Scatter), "not_gathered repeated"),
    ((function(along_batch, scatter), Scatter), "wrong_type"),
    ((function(written_to, scatter), Scatter), "changes_input"),
    # join_sequence in its place
    ((function(gather, own), Scatter), "not_summed"),
    ((function(gather, mean), Scatter), "averaged mean"),
    ((function(gather, reduced_whole), Scatter),
     "wrong_traffic GatherToRegion"),
    ((function(gather, scaled_on_rank_1), Scatter), "wrong_scale 2"),
    ((Gather, function(reduced_whole, gather)), "wrong_traffic forward"),
    ((Gather, function(own, gather)), "not_summed"),
    ((Gather, function(scatter, padded)), "not_gathered zeros"),
    ((Gather, function(lambda x, group: scatter(x.float(), group), gather)), "wrong_dtype"),
    ((Scatter, Gather), "wrong_type")]


def row(**changes):
    """A subclass of RowToPiece, with other methods."""
    return type("RowToPiece", (Row,), changes)


def bias_on_all(self, x):
    return Scatter.apply(F.linear(x, self.weight, self.bias), self.group)


def all_reduced(self, x):
    y = right.ReduceFromRegion.apply(F.linear(x, self.weight), self.group)
    piece = split_sequence(y, self.group)
    return piece if self.bias is None else piece + self.bias


def not_summed(model, group):
    pass


def chosen(names, how=lambda part, group: right.ReduceFromRegion.apply(part, group)):
    """Hooks that reduce the gradients of parameters with one of these in their names."""
    def gradients(model, group):
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                parameter.register_hook(lambda part: how(part, group))

    return gradients


REPLICATED = ("norm", "o_proj.bias", "down_proj.bias")


def averaged(part, group):
    return right.ReduceFromRegion.apply(part, group) / dist.get_world_size(group)


def larger_on_rank_1(part, group):
    return right.ReduceFromRegion.apply(part, group) * (1 + 0.1 * (dist.get_rank(group) == 1))


def after_accumulation(model, group):
    """Sums the .grad, of which the second backward pass's already has the first one's sum."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in REPLICATED):
            parameter.register_post_accumulate_grad_hook(
                lambda p: dist.all_reduce(p.grad, group=group))


def of_world(model, group):
    sum_gradients(model, dist.group.WORLD)


def slice_of(x, group):
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]


class ViewSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return slice_of(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gather(gradient, ctx.group), None


def norms_on_all(model, optimizer_class, group=None, **settings):
    """Gathers before each norm, not after it: all norms see all tokens."""
    def whole(model, group):
        sum_gradients(model, group)
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                lab.map_input(norm, lambda piece: Gather.apply(piece, group))

    return parallel(model, optimizer_class, group, enter=lambda x, _: x, gradients=whole,
                    **settings)


def tensor_parallel(model, optimizer_class, group=None, **settings):
    return right.tensor_parallel(model, optimizer_class, group, **settings)


def kept_aside(model, optimizer_class, group=None, **settings):
    before = copy.deepcopy(model.model.layers)
    module, optimizer = parallel(model, optimizer_class, group, **settings)
    module.model.before = list(before)
    return module, optimizer


STRATEGIES = [
    (nothing, "sequence_not_split"),
    (ddp_by_hand, "sequence_not_split"),
    (tensor_parallel, "sequence_not_split"),
    (torchs, "ready_made"),
    (by(gradients=not_summed), "gradient_not_summed model.norm.weight"),
    (by(gradients=chosen(("norm",))), "gradient_not_summed _proj.bias"),
    (by(gradients=chosen(("layernorm", ".bias"))),
     "gradient_not_summed model.norm.weight"),
    (by(gradients=chosen(REPLICATED, averaged)), "averaged"),
    (by(gradients=chosen(("",))), "summed_too_often"),
    (by(gradients=after_accumulation), "neither_full_nor_part"),
    (by(row=row(forward=bias_on_all)), "bias_on_every_rank"),
    (by(row=row(forward=all_reduced)),
     "wrong_traffic all-reduces"),
    (by(join=Gather.apply), "summed_too_often"),
    (by(split=slice_of), "gradient_not_summed embed_tokens.weight"),
    (by(split=ViewSplit.apply), "activations_kept"),
    (by(matrices_enter=True),
     "wrong_traffic lab.map_input"),
    (norms_on_all, "sequence_not_split"),
    (by(change=scale_rank_1), "wrong_output"),
    (by(gradients=chosen(REPLICATED, larger_on_rank_1)), "neither_full_nor_part"),
    (early_optimizer(parallel), "not_updated"),
    (kept_aside, "memory_too_high")]


# right, and written in another way


class ByLists(torch.autograd.Function):
    """all_gather and reduce_scatter of lists of pieces."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        pieces = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, 1)

    @staticmethod
    def backward(ctx, gradient):
        pieces = [piece.contiguous() for piece in gradient.chunk(dist.get_world_size(ctx.group), 1)]
        total = torch.empty_like(pieces[0])
        dist.reduce_scatter(total, pieces, group=ctx.group)
        return total, None


class Exchanged(torch.autograd.Function):
    """A reduce-scatter as an all-to-all and a sum."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ranks = group, dist.get_world_size(group)
        sent = torch.stack(x.chunk(ranks, 1))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received.sum(0)

    @staticmethod
    def backward(ctx, gradient):
        return gather(gradient, ctx.group), None


class TorchsGather:
    """torch's own differentiable collectives."""

    @staticmethod
    def apply(x, group):
        return torch.cat(functional.all_gather(x.contiguous(), group), 1)


class TorchsScatter:
    @staticmethod
    def apply(x, group):
        pieces = [piece.contiguous() for piece in x.chunk(dist.get_world_size(group), 1)]
        return functional.reduce_scatter(torch.empty_like(pieces[0]), pieces, group=group)


def gathered_by_funcol(x, group):
    return funcol.all_gather_tensor(x.contiguous(), 1, group)


def scattered_by_funcol(x, group):
    """Is waited for by whoever reads the result."""
    return funcol.reduce_scatter_tensor(x.contiguous(), "sum", 1, group)


class FuncolGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered_by_funcol(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return scattered_by_funcol(gradient, ctx.group), None


class FuncolScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scattered_by_funcol(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered_by_funcol(gradient, ctx.group), None


def in_the_optimizer(model, optimizer_class, group=None, **settings):
    """Sums all parts in one all-reduce, before the optimizer's step."""
    group = group or dist.group.WORLD
    module, optimizer = parallel(model, optimizer_class, group, gradients=not_summed, **settings)
    parts = [p for name, p in module.named_parameters() if any(r in name for r in REPLICATED)]

    def sum_parts(*_):
        flat = torch.cat([p.grad.flatten() for p in parts])
        dist.all_reduce(flat, group=group)
        for p, total in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
            p.grad.copy_(total.view_as(p))

    optimizer.register_step_pre_hook(sum_parts)
    return module, optimizer


class CopiedWeight(LlamaRMSNorm):
    """A norm whose weight passes f, whose backward is the sum."""

    def forward(self, hidden_states):
        weight = right.CopyToRegion.apply(self.weight, self.group)
        return F.rms_norm(hidden_states, weight.shape, weight, self.variance_epsilon)


class CopiedBias(Row):
    def forward(self, x):
        piece = ByLists.apply  # noqa: F841, the other direction is what is used
        y = Exchanged.apply(F.linear(x, self.weight), self.group)
        return y if self.bias is None else y + right.CopyToRegion.apply(self.bias, self.group)


def through_f(model, optimizer_class, group=None, **settings):
    """No hook on a gradient: replicated parameters enter the region of pieces through f."""
    def norms(model, group):
        for module in model.modules():
            if isinstance(module, LlamaRMSNorm):
                module.__class__, module.group = CopiedWeight, group

    return parallel(model, optimizer_class, group, row=CopiedBias, enter=ByLists.apply,
                    gradients=norms, **settings)


class JoinedHead(nn.Linear):
    def forward(self, piece):
        return super().forward(join_sequence(piece, self.group))


def joined_at_the_head(model, optimizer_class, group=None, **settings):
    def change(model):
        model.lm_head.__class__, model.lm_head.group = JoinedHead, group or dist.group.WORLD

    return parallel(model, optimizer_class, group, join=lambda x, _: x, change=change, **settings)


RIGHT = [(Gather, Scatter, right.sequence_parallel), (ByLists, Exchanged, through_f),
         (TorchsGather, TorchsScatter, in_the_optimizer),
         (FuncolGather, FuncolScatter, right.sequence_parallel),
         (Gather, Scatter, joined_at_the_head)]


def whole(strategies):
    return [((Gather, Scatter, strategy), words) for strategy, words in strategies]


@pytest.mark.slow
def test_sequence_parallel_on_2_ranks():
    functions = [((*pair, right.sequence_parallel), words) for pair, words in FUNCTIONS]
    judge_all(lab.check_sequence_parallel, functions + whole(STRATEGIES), RIGHT, ranks=2)


def group_forgotten(x, group):
    return gather(x, dist.group.WORLD)


ON_4 = [((function(group_forgotten, scatter), Scatter, right.sequence_parallel), "wrong_type"),
        *whole([(by(gradients=of_world), "summed_too_often"),
                (by(gradients=not_summed), "gradient_not_summed")])]


@pytest.mark.slow
def test_sequence_parallel_on_4_ranks():
    judge_all(lab.check_sequence_parallel, ON_4, RIGHT[1:2], ranks=4)


def test_a_sequence_that_the_ranks_do_not_divide_is_refused():
    with pytest.raises(Exception, match="2 ranks cannot divide a sequence of 11 .*pad it to 12"):
        launch(lambda: split_sequence(torch.ones(1, 11, 2), dist.group.WORLD), ranks=2,
               quiet=True)


def test_an_answer_that_is_not_filled_in_is_waited_for():
    class Unfilled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            raise NotImplementedError("Exercise 7.7")

    verdict = lab.check_sequence_parallel(Unfilled, Unfilled, nothing)
    assert verdict.passed is None and "7.7" in str(verdict)


def test_the_solution_leaves_frozen_norms_alone():
    """torch refuses a hook on what gets no gradient."""
    right.sum_gradient(torch.nn.Parameter(torch.ones(1), requires_grad=False), None)
