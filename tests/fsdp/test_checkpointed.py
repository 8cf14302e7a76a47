"""What the check of exercise 4.4 must reject, and what it must accept."""

import sys
from functools import partial

import cloudpickle
import pytest
import torch
from answers import assert_waits
from fsdp_answers import accepted, cases, rejected, right
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import labs.fsdp as lab
from labs.training import strategies

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
shard = right.shard
# 4.4 checkpointed


class Checkpointed:
    def every_other_block(model, optimizer_class, **settings):
        blocks = lab.blocks(model)
        for number in range(0, len(blocks), 2):
            blocks[number] = checkpoint_wrapper(blocks[number])
        return shard(model, optimizer_class, **settings)

    def the_whole_model(model, optimizer_class, **settings):
        shard(model, optimizer_class)
        module = checkpoint_wrapper(model)
        return module, optimizer_class(module.parameters(), **settings)

    def not_put_back(model, optimizer_class, **settings):
        for block in lab.blocks(model):
            block = checkpoint_wrapper(block)
        return shard(model, optimizer_class, **settings)

    def sharded_and_not_put_back(model, optimizer_class, **settings):
        for block in lab.blocks(model):
            fully_shard(checkpoint_wrapper(block), mesh=lab.mesh())
        fully_shard(model, mesh=lab.mesh())
        return model, optimizer_class(model.parameters(), **settings)

    def not_put_back_without_a_root(model, optimizer_class, **settings):
        for block in lab.blocks(model):
            fully_shard(checkpoint_wrapper(block))
        return model, optimizer_class(model.parameters(), **settings)

    def root_first(model, optimizer_class, **settings):
        fully_shard(model, mesh=lab.mesh())
        blocks = lab.blocks(model)
        for number, block in enumerate(blocks):
            blocks[number] = fully_shard(checkpoint_wrapper(block), mesh=lab.mesh())
        return model, optimizer_class(model.parameters(), **settings)

    def only_the_mlp(model, optimizer_class, **settings):
        for block in lab.blocks(model):
            block.mlp = checkpoint_wrapper(block.mlp)
        return shard(model, optimizer_class, **settings)

    def not_sharded(model, optimizer_class, **settings):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return strategies.ddp(model, optimizer_class, **settings)

    def no_gradient(model, optimizer_class, **settings):
        for block in lab.blocks(model):
            block.forward = torch.no_grad()(block.forward)
        return shard(model, optimizer_class, **settings)

    def products_kept(model, optimizer_class, **settings):
        def policy(_, operator, *args, **kwargs):
            return (CheckpointPolicy.MUST_SAVE if "addmm" in str(operator)
                    else CheckpointPolicy.PREFER_RECOMPUTE)

        blocks = lab.blocks(model)
        for number, block in enumerate(blocks):
            blocks[number] = checkpoint_wrapper(block, context_fn=partial(
                create_selective_checkpoint_contexts, policy))
        return shard(model, optimizer_class, **settings)

    def wrapped_twice(model, optimizer_class, **settings):
        blocks = lab.blocks(model)
        for number, block in enumerate(blocks):
            blocks[number] = checkpoint_wrapper(checkpoint_wrapper(block))
        return shard(model, optimizer_class, **settings)

    def one_unit(model, optimizer_class, **settings):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        fully_shard(model)
        return model, optimizer_class(model.parameters(), **settings)

    def never_resharded(model, optimizer_class, **settings):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return strategies.fsdp2(model, optimizer_class, reshard=False, **settings)

    def optimizer_first(model, optimizer_class, **settings):
        optimizer = optimizer_class(model.parameters(), **settings)
        return right.checkpointed(model, optimizer_class)[0], optimizer

    def settings_lost(model, optimizer_class, **settings):
        return right.checkpointed(model, optimizer_class)


WRONG = [
    (Checkpointed.products_kept, "activations_kept"),
    (Checkpointed.wrapped_twice, "activations_kept"),
    (Checkpointed.one_unit, "wrong_units"),
    (Checkpointed.never_resharded, "gathered_kept times"),
    (Checkpointed.optimizer_first, "optimizer_of_old_parameters"),
    (Checkpointed.settings_lost, "settings_ignored"),
    (shard, "not_checkpointed"),
    (Checkpointed.every_other_block, "not_checkpointed"),
    (Checkpointed.the_whole_model, "gathered_at_once brings"),
    (Checkpointed.not_put_back, "not_checkpointed"),
    (Checkpointed.sharded_and_not_put_back, "unit_not_in_model"),
    (Checkpointed.not_put_back_without_a_root, "unit_not_in_model"),
    (Checkpointed.root_first, "units_overlap"),
    (Checkpointed.only_the_mlp, "not_checkpointed"),
    (Checkpointed.not_sharded, "wrong_collective"),
    (Checkpointed.no_gradient, "differs_from_reference")]


class CheckpointedRight:
    def after_sharding(model, optimizer_class, **settings):
        pair = shard(model, optimizer_class, **settings)
        blocks = lab.blocks(model)
        for number, block in enumerate(blocks):
            blocks[number] = checkpoint_wrapper(block)
        return pair

    def of_its_forward(model, optimizer_class, **settings):
        for block in lab.blocks(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return shard(model, optimizer_class, **settings)

    def by_hugging_face(model, optimizer_class, **settings):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return shard(model, optimizer_class, **settings)


RIGHT = [right.checkpointed, CheckpointedRight.after_sharding,
         CheckpointedRight.of_its_forward,
         CheckpointedRight.by_hugging_face]


@pytest.mark.parametrize("check, answer, words", cases(lab.check_checkpointed, WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, capsys):
    rejected(check, answer, words)


@pytest.mark.parametrize("check, answer", cases(lab.check_checkpointed, RIGHT))
def test_another_right_answer_is_accepted(check, answer, capsys):
    accepted(check, answer)


def test_an_unfilled_exercise_waits(capsys):
    assert_waits(lab.check_checkpointed, "4.4")
