"""What the check of 7.9 must reject, with the words that must say why, and what it must accept."""

import sys

import cloudpickle
import pytest
import sequence_answers
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from answers import judge_all
from sequence_answers import (
    early_optimizer,
    nothing,
    planned,
    right,
    scale_rank_1,
    torchs,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sequence_answers)
pytestmark = pytest.mark.usefixtures("warm_launcher")
NORMS = ("input_layernorm", "post_attention_layernorm")
WHOLE = tp.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())


def by_hand(model, optimizer_class, **settings):
    return right.sequence_parallel(model, optimizer_class, **settings)


def local_gradients(model, optimizer):
    """What an optimizer does that reads a gradient by to_local()."""
    def take_parts(*_):
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.placements[0].is_partial():
                parameter.grad = DTensor.from_local(parameter.grad.to_local(),
                                                    parameter.device_mesh, [Replicate()])

    optimizer.register_step_pre_hook(take_parts)


def averaged(model, optimizer):
    """Divides each gradient by the number of ranks, as data parallelism does."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / dist.get_world_size())


def larger_on_rank_1(model, optimizer):
    """Scales the gradients of replicated parameters on rank 1."""
    def scale(*_):
        for parameter in model.parameters():
            if dist.get_rank() == 1 and parameter.placements[0].is_replicate():
                parameter.grad.mul_(1.5)

    optimizer.register_step_pre_hook(scale)


class NormOnAll(tp.SequenceParallel):
    """A norm that gathers its input: all ranks compute it for all tokens."""

    @staticmethod
    def _prepare_input_fn(sequence_sharding, module, inputs, mesh):
        piece = tp.SequenceParallel._prepare_input_fn(sequence_sharding, module, inputs, mesh)
        return piece.redistribute(mesh, [Replicate()])


STOCK = {"self_attn.o_proj": tp.RowwiseParallel(), "mlp.down_proj": tp.RowwiseParallel()}
WRONG = [
    (nothing, "not_sharded"),
    (by_hand, "not_sharded"),
    (planned(without=right.layer_plan()), "missing_entry 'model.layers.0.self_attn.q_proj.weight'"),
    (planned(without=NORMS), "missing_entry 'model.layers.0.input_layernorm.weight'"),
    (planned(without=["mlp.up_proj"]), "missing_entry 'model.layers.0.mlp.up_proj.weight'"),
    (planned(without=["self_attn"]), "wrong_traffic"),
    (planned(without=["mlp"]), "wrong_traffic"),
    (planned(plan=STOCK), "raised_RuntimeError"),
    (planned(plan={"self_attn.qkv_proj": tp.ColwiseParallel()}),
     "entry_fits_nothing"),
    (planned(plan={"self_attn": WHOLE}), "raised_ValueError"),
    (planned(plan={"self_attn.[q]_proj": tp.ColwiseParallel()}), "raised_RuntimeError entries"),
    (planned(plan={"self_attn": tp.PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, use_local_output=True,
        desired_input_kwarg_layouts={"hidden_states": Replicate()})}),
     "wrong_traffic"),
    (planned(plan={f"self_attn.{name}_proj": tp.RowwiseParallel() for name in "qkv"}),
     "raised_RuntimeError columns"),
    (planned(plan={"self_attn.o_proj": tp.ColwiseParallel()}),
     "raised_RuntimeError columns"),
    (planned(plan={"mlp.down_proj": tp.RowwiseParallel(output_layouts=Replicate())}),
     "raised_RuntimeError"),
    (planned(without=["mlp"], plan={
        "mlp.gate_proj": tp.ColwiseParallel(input_layouts=Shard(1)),
        "mlp.up_proj": tp.ColwiseParallel(input_layouts=Shard(1))}),
     "wrong_traffic"),
    (planned(plan={name: NormOnAll() for name in NORMS}), "wrong_traffic"),
    (planned(plan={"mlp.down_proj": tp.RowwiseParallel(output_layouts=Shard(1),
                                                       use_local_output=False)}),
     "raised_RuntimeError use_local_output"),
    (planned(change=larger_on_rank_1),
     "differs_from_reference"),
    (planned(ranks=1), "wrong_mesh"),
    (planned(change=local_gradients), "ranks_differ"),
    (planned(change=averaged), "averaged"),
    (planned(change=scale_rank_1), "wrong_output"),
    (early_optimizer(torchs), "not_updated")]


def spelled_out(model, optimizer_class, **settings):
    """A plan for each layer, every matrix by its name, other styles for the same layouts."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    column = tp.ColwiseParallel()
    plan = {f"self_attn.{name}_proj": column for name in "qkv"} | {
        "mlp.gate_proj": column, "mlp.up_proj": column, **{n: tp.SequenceParallel() for n in NORMS},
        "self_attn.o_proj": tp.RowwiseParallel(output_layouts=Shard(1)),
        "mlp.down_proj": tp.RowwiseParallel(output_layouts=Partial(), use_local_output=False),
        "self_attn": tp.PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()}),
        "mlp": tp.PrepareModuleInputOutput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),),
            output_layouts=Partial(), desired_output_layouts=Shard(1))}
    for layer in model.model.layers:
        tp.parallelize_module(layer, mesh, plan)
    tp.parallelize_module(model, mesh, right.OUTSIDE)
    return model, optimizer_class(model.parameters(), **settings)


def full_gradients(model, optimizer):
    """Reduces what is Partial before the step."""
    def reduce(*_):
        for parameter in model.parameters():
            if parameter.grad.placements[0].is_partial():
                parameter.grad = parameter.grad.redistribute(placements=[Replicate()])

    optimizer.register_step_pre_hook(reduce)


RIGHT = [right.torchs_parallel, spelled_out,
         planned(change=full_gradients, plan={name: tp.SequenceParallel(use_local_output=True)
                                              for name in NORMS}),
         planned(plan={"mlp": tp.PrepareModuleInput(
             input_kwarg_layouts={}, input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),
                                                                                       ))})]


@pytest.mark.slow
def test_plans_on_2_ranks():
    judge_all(lab.check_torchs_parallel, [((a,), words) for a, words in WRONG], RIGHT, ranks=2)


@pytest.mark.slow
def test_plans_on_4_ranks():
    few = [((a,), words) for a, words in WRONG if a in (by_hand,)]
    judge_all(lab.check_torchs_parallel, few + [((planned(change=local_gradients),),
        "ranks_differ")],
              RIGHT[1:2], ranks=4)


def test_an_answer_that_is_not_filled_in_is_waited_for():
    def unfilled(model, optimizer_class, **settings):
        raise NotImplementedError("Exercise 7.9")

    verdict = lab.check_torchs_parallel(unfilled)
    assert verdict.passed is None and "7.9" in str(verdict)
