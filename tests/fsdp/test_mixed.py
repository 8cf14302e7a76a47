"""What the check of exercise 4.5 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
from answers import assert_waits
from fsdp_answers import accepted, cases, rejected, right
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import labs.fsdp as lab
from labs.training import strategies

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
shard = right.shard
# 4.5 mixed


def with_policy(model, optimizer_class, policy, **settings):
    return strategies.fsdp2(model, optimizer_class, mp_policy=policy, **settings)


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Mixed:
    def everything_in_bf16(model, optimizer_class, **settings):
        return shard(model.bfloat16(), optimizer_class, **settings)

    def reduced_in_bf16(model, optimizer_class, **settings):
        return with_policy(model, optimizer_class,
                           MixedPrecisionPolicy(param_dtype=torch.bfloat16), **settings)

    def in_fp16(model, optimizer_class, **settings):
        return with_policy(model, optimizer_class, MixedPrecisionPolicy(
            param_dtype=torch.float16, reduce_dtype=torch.float32), **settings)

    def only_reduced(model, optimizer_class, **settings):
        return with_policy(model, optimizer_class,
                           MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), **settings)

    def not_the_root(model, optimizer_class, **settings):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in lab.blocks(model):
            fully_shard(block, mp_policy=policy)
        fully_shard(model)
        return model, optimizer_class(model.parameters(), **settings)

    def not_the_blocks(model, optimizer_class, **settings):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in lab.blocks(model):
            fully_shard(block)
        fully_shard(model, mp_policy=policy)
        return model, optimizer_class(model.parameters(), **settings)

    def settings_lost(model, optimizer_class, **settings):
        return right.mixed(model, optimizer_class)

    def one_unit(model, optimizer_class, **settings):
        fully_shard(model, mp_policy=POLICY)
        return model, optimizer_class(model.parameters(), **settings)

    def each_linear(model, optimizer_class, **settings):
        for linear in right.linears(model):
            fully_shard(linear, mp_policy=POLICY)
        return right.mixed(model, optimizer_class, **settings)

    def never_resharded(model, optimizer_class, **settings):
        return with_policy(model, optimizer_class, POLICY, reshard=False, **settings)

    def optimizer_first(model, optimizer_class, **settings):
        optimizer = optimizer_class(model.parameters(), **settings)
        return right.mixed(model, optimizer_class)[0], optimizer

    def root_first(model, optimizer_class, **settings):
        for module in (model, *lab.blocks(model)):
            fully_shard(module, mp_policy=POLICY)
        return model, optimizer_class(model.parameters(), **settings)

    def autocast(model, optimizer_class, **settings):
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        return shard(model, optimizer_class, **settings)

    def output_in_fp32(model, optimizer_class, **settings):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
        return with_policy(model, optimizer_class, policy, **settings)


WRONG = [
    (shard, "wrong_compute_dtype"),
    (Mixed.everything_in_bf16, "parameters_not_fp32"),
    (Mixed.reduced_in_bf16, "wrong_traffic_dtype"),
    (Mixed.in_fp16, "wrong_compute_dtype"),
    (Mixed.only_reduced, "wrong_compute_dtype"),
    (Mixed.not_the_root, "raised_RuntimeError"),
    (Mixed.not_the_blocks, "raised_RuntimeError"),
    (Mixed.settings_lost, "settings_ignored"),
    (Mixed.one_unit, "wrong_units"),
    (Mixed.each_linear, "wrong_units"),
    (Mixed.never_resharded, "gathered_kept times"),
    (Mixed.optimizer_first, "optimizer_of_old_parameters"),
    (Mixed.root_first, "units_overlap"),
    (Mixed.autocast, "wrong_compute_dtype"),
    (Mixed.output_in_fp32, "raised_RuntimeError output_dtype")]


class MixedRight:
    def from_the_labs(model, optimizer_class, **settings):
        return with_policy(model, optimizer_class, MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32), **settings)


RIGHT = [right.mixed, MixedRight.from_the_labs]


@pytest.mark.parametrize("check, answer, words", cases(lab.check_mixed, WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, capsys):
    rejected(check, answer, words)


@pytest.mark.parametrize("check, answer", cases(lab.check_mixed, RIGHT))
def test_another_right_answer_is_accepted(check, answer, capsys):
    accepted(check, answer)


def test_an_unfilled_exercise_waits(capsys):
    assert_waits(lab.check_mixed, "4.5")
