"""What the check of exercise 7.23 must reject, with the words that must say why; and what it must
accept."""

import gc
import sys
from contextlib import contextmanager
from unittest import mock

import cloudpickle
import gate
import pytest
import torch
import torch.distributed as dist
from answers import assert_rejected, assert_waits
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

import labs.pipeline_parallel as lab
from labs.checks.verdicts import Verdict
from labs.pipeline_parallel import three_dimensional_training
from labs.workers.launcher import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.usefixtures("warm_launcher"), pytest.mark.slow]
INTO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
OUT = ("self_attn.o_proj", "mlp.down_proj")
PLAN = {**{name: ColwiseParallel() for name in INTO}, **{name: RowwiseParallel() for name in OUT}}


def by(plan=PLAN, tensor="tensor", data="data", units=True, root=True):
    """An answer like ours, with other meshes, or with parts left out."""
    def parallelize(stage, mesh):
        for layer in stage.body.layers:
            if plan:
                parallelize_module(layer, mesh[tensor], plan)
            if units and data:
                fully_shard(layer, mesh=mesh[data])
        if root and data:
            fully_shard(stage, mesh=mesh[data])
        return stage

    return parallelize


def shards_first(stage, mesh):
    fully_shard(stage, mesh=mesh["data"])
    parallelize_module(stage.body, mesh["tensor"], {f"layers.*.{name}": how
                                                    for name, how in PLAN.items()})
    return stage


def over_all_ranks(stage, mesh):
    for layer in stage.body.layers:
        fully_shard(layer)
    fully_shard(stage)
    return stage


def replicated(stage, mesh):
    """DTensors that are cut nowhere."""
    for layer in stage.body.layers:
        for module in layer.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                whole = distribute_tensor(p.detach(), mesh["tensor"], [Replicate()])
                assert isinstance(whole, DTensor)
                setattr(module, name, torch.nn.Parameter(whole.to_local()))
    return by(plan=None)(stage, mesh)


def never_averaged(stage, mesh):
    """The sum over the replicas, where their mean belongs."""
    stage = by()(stage, mesh)
    for parameter in stage.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    return stage


def gathered_for_ever(stage, mesh):
    """Forward and backward use the initial parameters in every step."""
    gathered_once(stage, mesh).set_reshard_after_backward(False)
    return stage


def gathered_until_the_step(stage, mesh):
    """One gather a step: the copies are freed before each update."""
    gathered_for_ever(stage, mesh)
    units = [module for module in stage.modules() if isinstance(module, FSDPModule)]

    def reshard(*_):
        for unit in units:
            unit.reshard()

    register_optimizer_step_pre_hook(reshard)
    return stage


# All ranks leave each of them alike, so one launch judges them all.
WRONG = [
    (lambda stage, mesh: None, "wrong_type"),
    (lambda stage, mesh: torch.nn.Linear(2, 2), "other_module"),
    (lambda stage, mesh: stage, "not_sharded 127"),
    (by(plan=None), "not_sharded"),
    (by(data=None), "not_sharded"),
    (by({name: PLAN[name] for name in PLAN if "mlp" not in name}),
     "not_sharded"),
    (replicated, "not_sharded"),
    (by(tensor="data", data="tensor"), "meshes_swapped"),
    (over_all_ranks, "wrong_group which"),
    (never_averaged, "wrong_loss|differs_from_reference"),
    (gathered_for_ever, "wrong_loss stale"),
    (by(root=False), "not_sharded"),
    (by(data=("data", "tensor"), plan=None), "not_sharded"),
    (by(tensor="pipeline"), "wrong_group different"),
    (by({**PLAN, "self_attn.o_proj": ColwiseParallel()}), "part_of_input"),
    (by({**PLAN, "mlp.up_proj": RowwiseParallel()}), "output_not_summed"),
    (by(dict.fromkeys(PLAN, ColwiseParallel(output_layouts=Replicate()))),
     "part_of_input"),
    (shards_first, "raised_ValueError")]
def whole_stage_one_unit(stage, mesh):
    """One FSDP unit: fewer and larger gathers."""
    return by(units=False)(stage, mesh)


def gathered_once(stage, mesh):
    for layer in stage.body.layers:
        parallelize_module(layer, mesh["tensor"], PLAN)
        fully_shard(layer, mesh=mesh["data"], reshard_after_forward=False)
    return fully_shard(stage, mesh=mesh["data"], reshard_after_forward=False)


def one_all_reduce_into_each_block(stage, mesh):
    prepared = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()}),
        "mlp": PrepareModuleInput(input_layouts=(Replicate(),),
                                  desired_input_layouts=(Replicate(),))}
    return by({**prepared, **PLAN})(stage, mesh)


RIGHT = [by(), whole_stage_one_unit, gathered_once, one_all_reduce_into_each_block,
         gathered_until_the_step]


@contextmanager
def two_steps():
    """The second step shows what the first one's update did."""
    with mock.patch.object(three_dimensional_training.train_in_three_dimensions, "__defaults__",
                           (2,)), \
            mock.patch.object(three_dimensional_training.train_alone, "__defaults__", (2,)):
        yield


def judge_all(answers) -> list[Verdict]:
    """The verdict on each answer, of eight ranks that train one after the other."""
    return launch(_judge_all, answers, ranks=three_dimensional_training.RANKS, quiet=True,
                  device="cpu", timeout=300)[0]


def _judge_all(answers):
    def here(work, *args, **_):
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, work(*args))
        return found

    verdicts, random_numbers = [], torch.get_rng_state()
    with two_steps(), mock.patch.object(three_dimensional_training, "launch", here):
        for answer in answers:
            torch.set_rng_state(random_numbers)
            verdicts.append(lab.check_three_dimensions(answer))
            gc.collect()
    return verdicts


def test_wrong_and_right():
    wrong, right_ones = gate.some_of(WRONG), gate.some_of(RIGHT, 1)
    verdicts = judge_all([*(answer for answer, _ in wrong), *right_ones])
    for (_, words), verdict in zip(wrong, verdicts, strict=False):
        print(verdict)
        assert_rejected(verdict, words)
    refused = [verdict for verdict in verdicts[len(wrong):] if not verdict.passed]
    assert not refused, refused


def test_what_is_not_filled_in_waits():
    assert_waits(lab.check_three_dimensions, "7.23")
