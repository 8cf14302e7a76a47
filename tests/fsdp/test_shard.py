"""What the check of exercise 4.1 must reject, and what it must accept."""

import copy
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from answers import assert_waits
from fsdp_answers import accepted, cases, rejected, right
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import labs.fsdp as lab
from labs.fsdp import scaffold
from labs.training import strategies

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
shard = right.shard
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
        for linear in right.linears(model):
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

    def originals_are_kept(model, optimizer_class, **settings):
        """The tensors from before the sharding, in a list."""
        kept = [p.data for p in model.parameters()]
        module, optimizer = shard(model, optimizer_class, **settings)
        optimizer.before = kept
        return module, optimizer

    def a_matrix_is_copied(model, optimizer_class, **settings):
        """In each forward, of one block only."""
        def copied(mlp, *_):
            mlp.copied = mlp.c_fc.weight.detach().clone()

        pair = shard(model, optimizer_class, **settings)
        lab.blocks(model)[0].mlp.register_forward_hook(copied)
        return pair

    def half_of_a_unit_is_copied(model, optimizer_class, **settings):
        """And forgotten in backward, so that only forward's end shows it."""
        def copied(block, _, output):
            block.copied = [p.detach().clone() for p in block.mlp.parameters()]
            output.register_hook(lambda _: block.copied.clear())

        pair = shard(model, optimizer_class, **settings)
        lab.blocks(model)[0].register_forward_hook(copied, prepend=True)
        return pair

    def a_full_gradient_is_kept(model, optimizer_class, **settings):
        """Beside its shard; zeros of its size stand for it."""
        pair = shard(model, optimizer_class, **settings)
        def kept(mlp, _, output):
            output.register_hook(
                lambda _: setattr(mlp, "gradient", torch.zeros(mlp.c_fc.weight.shape)))

        lab.blocks(model)[0].mlp.register_forward_hook(kept)
        return pair

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


WRONG = [
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
    (Shard.originals_are_kept, "memory_too_high building"),
    (Shard.a_matrix_is_copied, "memory_too_high forward"),
    (Shard.half_of_a_unit_is_copied, "memory_too_high forward"),
    (Shard.a_full_gradient_is_kept, "memory_too_high"),
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


RIGHT = [shard, ShardRight.by_name, ShardRight.root_gathered_twice,
         ShardRight.groups_and_prefetch]


@pytest.mark.parametrize("check, answer, words", cases(lab.check_shard, WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, capsys):
    rejected(check, answer, words)


@pytest.mark.parametrize("check, answer", cases(lab.check_shard, RIGHT))
def test_another_right_answer_is_accepted(check, answer, capsys):
    accepted(check, answer)


def test_an_unfilled_exercise_waits(capsys):
    assert_waits(lab.check_shard, "4.1")
