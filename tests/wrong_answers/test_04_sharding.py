"""What the checks of notebook 04 must reject, with the words that must say why, and what they must
accept: 4.1, 4.4 and 4.5."""

import copy
import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from fsdp_answers import accepted, cases, rejected, right
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import labs.fsdp as lab
from labs.fsdp import scaffold
from labs.training import strategies

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")

shard = right.shard
WRONG = {}


# 4.1 shard


class Shard:
    def nothing(model, optimizer_class, **settings):
        return model, optimizer_class(model.parameters(), **settings)

    def root_only(model, optimizer_class, **settings):
        fully_shard(model)
        return model, optimizer_class(model.parameters(), **settings)

    def blocks_only(model, optimizer_class, **settings):
        for block in lab.blocks(model):
            fully_shard(block)
        return model, optimizer_class(model.parameters(), **settings)

    def optimizer_first(model, optimizer_class, **settings):
        optimizer = optimizer_class(model.parameters(), **settings)
        return shard(model, optimizer_class)[0], optimizer

    def never_resharded(model, optimizer_class, **settings):
        return strategies.fsdp2(model, optimizer_class, reshard=False, **settings)

    def each_linear(model, optimizer_class, **settings):
        for linear in lab.linears(model):
            fully_shard(linear)
        return shard(model, optimizer_class, **settings)

    def every_other_block(model, optimizer_class, **settings):
        for block in lab.blocks(model)[::2]:
            fully_shard(block)
        fully_shard(model)
        return model, optimizer_class(model.parameters(), **settings)

    def root_first(model, optimizer_class, **settings):
        fully_shard(model)
        for block in lab.blocks(model):
            fully_shard(block)
        return model, optimizer_class(model.parameters(), **settings)

    def root_first_on_a_mesh(model, optimizer_class, **settings):
        for module in (model, *lab.blocks(model)):
            fully_shard(module, mesh=lab.mesh())
        return model, optimizer_class(model.parameters(), **settings)

    def inside_a_block_afterwards(model, optimizer_class, **settings):
        for block in lab.blocks(model):
            for module in (block, block.mlp):
                fully_shard(module, mesh=lab.mesh())
        return shard(model, optimizer_class, **settings)

    def twice(model, optimizer_class, **settings):
        shard(model, optimizer_class)
        return shard(model, optimizer_class, **settings)

    def the_list(model, optimizer_class, **settings):
        fully_shard(lab.blocks(model), mesh=lab.mesh())
        fully_shard(model, mesh=lab.mesh())
        return model, optimizer_class(model.parameters(), **settings)

    def settings_lost(model, optimizer_class, **settings):
        return shard(model, optimizer_class)

    def no_optimizer(model, optimizer_class, **settings):
        return shard(model, optimizer_class, **settings)[0]

    def a_copy_is_kept(model, optimizer_class, **settings):
        whole = copy.deepcopy(model)
        module, optimizer = shard(model, optimizer_class, **settings)
        optimizer.before = whole
        return module, optimizer

    def all_unsharded_first(model, optimizer_class, **settings):
        pair = shard(model, optimizer_class, **settings)
        model.register_forward_pre_hook(
            lambda *_: [block.unshard() for block in lab.blocks(model)] and None)
        return pair

    def all_fetched_in_backward(model, optimizer_class, **settings):
        pair = shard(model, optimizer_class, **settings)
        *others, last = lab.blocks(model)
        last.set_modules_to_backward_prefetch(others)
        return pair

    def whole_after_backward(model, optimizer_class, **settings):
        pair = shard(model, optimizer_class, **settings)
        model.set_reshard_after_backward(False)
        return pair

    def kept_on_half_of_the_ranks(model, optimizer_class, **settings):
        for block in lab.blocks(model):
            fully_shard(block, reshard_after_forward=max(2, dist.get_world_size() // 2))
        fully_shard(model)
        return model, optimizer_class(model.parameters(), **settings)

    def two_blocks_in_a_unit(model, optimizer_class, **settings):
        first, second, *rest = lab.blocks(model)
        for unit in ([first, second], *rest, model):
            fully_shard(unit)
        return model, optimizer_class(model.parameters(), **settings)

    def skipped_on_rank_0(model, optimizer_class, **settings):
        for number, block in enumerate(lab.blocks(model)):
            if number or dist.get_rank():
                fully_shard(block)
        fully_shard(model)
        return model, optimizer_class(model.parameters(), **settings)

    def torchs_optimizer(model, optimizer_class, **settings):
        module, _ = shard(model, optimizer_class, **settings)
        return module, torch.optim.AdamW(module.parameters(), **settings)

    def only_the_blocks_trained(model, optimizer_class, **settings):
        module, _ = shard(model, optimizer_class, **settings)
        return module, optimizer_class(lab.blocks(model).parameters(), **settings)

    def positions_frozen(model, optimizer_class, **settings):
        model.transformer.wpe.requires_grad_(False)
        return shard(model, optimizer_class, **settings)

    def without_the_head(model, optimizer_class, **settings):
        for block in lab.blocks(model):
            fully_shard(block)
        fully_shard(model.transformer)
        return model, optimizer_class(model.parameters(), **settings)

    def on_replicas(model, optimizer_class, **settings):
        return scaffold.on_replicas(shard, max(1, dist.get_world_size() // 2), model,
                                    optimizer_class, **settings)

    def the_loss_averaged(model, optimizer_class, **settings):
        model.register_forward_hook(
            lambda module, _, output: dist.all_reduce(output.loss.detach().clone()))
        return shard(model, optimizer_class, **settings)


WRONG[lab.check_shard] = [
    (Shard.all_unsharded_first, "gathered_at_once"),
    (Shard.all_fetched_in_backward, "gathered_at_once"),
    (Shard.whole_after_backward, "gathered_kept still"),
    (Shard.kept_on_half_of_the_ranks, "memory_too_high forward"),
    (Shard.two_blocks_in_a_unit, "wrong_units"),
    (Shard.skipped_on_rank_0, "other_units_by_rank"),
    (Shard.torchs_optimizer, "optimizer_class_ignored"),
    (Shard.only_the_blocks_trained, "optimizer_of_old_parameters"),
    (Shard.positions_frozen, "frozen_parameter"),
    (Shard.without_the_head, "tie_lost"),
    (Shard.on_replicas, "wrong_collective replicas"),
    (Shard.the_loss_averaged, "wrong_collective"),
    (Shard.nothing, "root_gradient_not_reduced"),
    (Shard.root_only, "wrong_units"),
    (Shard.blocks_only, "root_gradient_not_reduced"),
    (strategies.ddp, "wrong_collective"),
    (strategies.fsdp1, "wrong_shape"),
    (Shard.optimizer_first, "optimizer_of_old_parameters"),
    (Shard.never_resharded, "gathered_kept times"),
    (Shard.each_linear, "wrong_units"),
    (Shard.every_other_block, "wrong_units"),
    (Shard.root_first, "units_overlap"),
    (Shard.root_first_on_a_mesh, "units_overlap"),
    (Shard.inside_a_block_afterwards, "units_overlap"),
    (Shard.twice, "sharded_twice"),
    (Shard.the_list, "unit_without_forward"),
    (Shard.settings_lost, "settings_ignored"),
    (Shard.no_optimizer, "wrong_type"),
    (Shard.a_copy_is_kept, "memory_too_high activations")]


class ShardRight:
    def by_name(model, optimizer_class, **settings):
        for module in list(model.modules()):
            if type(module).__name__.endswith("Block"):
                fully_shard(module)
        fully_shard(model)
        return model, optimizer_class(list(model.parameters()), **settings)

    def root_gathered_twice(model, optimizer_class, **settings):
        return strategies.fsdp2(model, optimizer_class, **settings)

    def groups_and_prefetch(model, optimizer_class, **settings):
        """Two groups of parameters, the next block prefetched in forward, a mesh of its own."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        blocks = list(lab.blocks(model))
        for module in (*reversed(blocks), model):
            fully_shard(module, mesh=mesh)
        for block, following in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([following])
        groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == matrix]}
                  for matrix in (True, False)]
        return [model, optimizer_class(groups, **settings)]


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


WRONG[lab.check_checkpointed] = [
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
        for linear in lab.linears(model):
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


WRONG[lab.check_mixed] = [
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


RIGHT = {lab.check_shard: [shard, ShardRight.by_name, ShardRight.root_gathered_twice,
                           ShardRight.groups_and_prefetch],
         lab.check_checkpointed: [right.checkpointed, CheckpointedRight.after_sharding,
                                  CheckpointedRight.of_its_forward,
                                  CheckpointedRight.by_hugging_face],
         lab.check_mixed: [right.mixed, MixedRight.from_the_labs]}


@pytest.mark.parametrize("check, answer, words", cases(WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, capsys):
    rejected(check, answer, words)


@pytest.mark.parametrize("check, answer", cases(RIGHT))
def test_another_right_answer_is_accepted(check, answer, capsys):
    accepted(check, answer)
