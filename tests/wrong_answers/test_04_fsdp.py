"""What the checks of notebook 04 must reject, with the words that must say why; and what they must
accept."""

import copy
import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _build.definitions import definitions
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import labs.fsdp as lab
from labs.training import strategies
from labs.training.presets import preset

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")

right = definitions("04_fsdp", PRESET=preset("laptop"))
shard, cost, choose = right.shard, right.cost, right.choose
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

    def settings_lost(model, optimizer_class, **settings):
        return shard(model, optimizer_class)

    def no_optimizer(model, optimizer_class, **settings):
        return shard(model, optimizer_class, **settings)[0]

    def a_copy_is_kept(model, optimizer_class, **settings):
        whole = copy.deepcopy(model)
        module, optimizer = shard(model, optimizer_class, **settings)
        optimizer.before = whole
        return module, optimizer


WRONG[lab.check_shard] = [
    (Shard.nothing, "belongs to no unit, so it is whole on every rank"),
    (Shard.root_only, "gradients leave in 1 unit; 3 blocks and the root make 4"),
    (Shard.blocks_only, "belongs to no unit, so it is whole on every rank"),
    (strategies.ddp, "all_reduce carries"),
    (strategies.fsdp1, "has shape"),
    (Shard.optimizer_first, "not changed by the step"),
    (Shard.never_resharded, "gathered 3 times per step, not 6"),
    (Shard.each_linear, "gradients leave in 16 units"),
    (Shard.every_other_block, "gradients leave in 3 units"),
    (Shard.root_first, "should not be"),
    (Shard.settings_lost, "updated to something else than the reference's"),
    (Shard.no_optimizer, "not (module, optimizer)"),
    (Shard.a_copy_is_kept, "bytes of activations, buffers and the rest after building")]


class ShardRight:
    def by_name(model, optimizer_class, **settings):
        for module in list(model.modules()):
            if type(module).__name__.endswith("Block"):
                fully_shard(module)
        fully_shard(model)
        return model, optimizer_class(list(model.parameters()), **settings)

    def root_gathered_twice(model, optimizer_class, **settings):
        return strategies.fsdp2(model, optimizer_class, **settings)


# 4.2 cost


class Cost:
    def one_gather_each(units):
        return 2 * len(units), cost(units)[1]

    def root_gathered_twice(units):
        return 3 * len(units), cost(units)[1]

    def parameters_not_bytes(units):
        return cost(units)[0], cost(units)[1] // 4

    def everything_at_once(units):
        return cost(units)[0], 4 * sum(units)

    def the_largest(units):
        return cost(units)[0], 4 * max(units)

    def no_neighbour(units):
        return cost(units)[0], 4 * (units[0] + max(units[1:] or [0]))

    def no_root(units):
        return cost(units)[0], cost(units)[1] - 4 * units[0]

    def not_neighbours(units):
        return cost(units)[0], 4 * (units[0] + sum(sorted(units[1:])[-2:]))

    def one_number(units):
        return cost(units)[0]


WRONG[lab.check_cost] = [
    (Cost.one_gather_each, "gathered again for backward"),
    (Cost.root_gathered_twice, "the root stays gathered"),
    (Cost.parameters_not_bytes, "that counts parameters"),
    (Cost.everything_at_once, "never gathered at once"),
    (Cost.the_largest, "that is one unit"),
    (Cost.no_neighbour, "the next one is already being gathered"),
    (Cost.no_root, "the root stays gathered the whole time"),
    (Cost.not_neighbours, "may not be neighbours"),
    (Cost.one_number, "it returned an int, not 2 numbers")]


class CostRight:
    def in_a_loop(units):
        calls, most = 2, units[0]
        for number, size in enumerate(units[1:], 1):
            calls += 3
            most = max(most, units[0] + size + (units[number - 1] if number > 1 else 0))
        return calls, 4 * most

    def of_numpy(units):
        return tuple(np.array(cost(units)))


# 4.3 choose


class Choose:
    def always_blocks(wrappings, free):
        return "each block"

    def least_memory(wrappings, free):
        return min(wrappings, key=lambda name: cost(wrappings[name])[1])

    def fewest_collectives(wrappings, free):
        return min(wrappings, key=lambda name: cost(wrappings[name])[0])

    def most_collectives_that_fit(wrappings, free):
        fits = [name for name, units in wrappings.items() if cost(units)[1] <= free]
        return max(fits, key=lambda name: cost(wrappings[name])[0], default=None)

    def strictly_less(wrappings, free):
        return choose(wrappings, free - 1)

    def first_that_fits(wrappings, free):
        return next((name for name, u in wrappings.items() if cost(u)[1] <= free), None)

    def most_memory_that_fits(wrappings, free):
        fits = [name for name, units in wrappings.items() if cost(units)[1] <= free]
        return max(fits, key=lambda name: cost(wrappings[name])[1], default=None)

    def all_at_once(wrappings, free):
        fits = [name for name, units in wrappings.items() if 4 * sum(units) <= free]
        return min(fits, key=lambda name: cost(wrappings[name])[0], default=None)

    def the_units(wrappings, free):
        name = choose(wrappings, free)
        return name and "units"


WRONG[lab.check_choose] = [
    (Choose.always_blocks, "but 'whole model' fits too"),
    (Choose.least_memory, "but 'whole model' fits too"),
    (Choose.fewest_collectives, "does not fit"),
    (Choose.most_collectives_that_fit, "but 'whole model' fits too"),
    (Choose.strictly_less, "fits"),
    (Choose.first_that_fits, "fits too"),
    (Choose.most_memory_that_fits, "but 'pairs of blocks' fits too"),
    (Choose.all_at_once, "since it gathers 1,200,000 at once, and choose returned None"),
    (Choose.the_units, "not the name of a wrapping")]


class ChooseRight:
    def sorted_first(wrappings, free):
        for name in sorted(wrappings, key=lambda name: len(wrappings[name])):
            if cost(wrappings[name])[1] <= free:
                return name


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


WRONG[lab.check_checkpointed] = [
    (shard, "block 0 runs forward once per step"),
    (Checkpointed.every_other_block, "block 1 runs forward once per step"),
    (Checkpointed.the_whole_model, "at the peak of backward"),
    (Checkpointed.not_put_back, "block 0 runs forward once per step"),
    (Checkpointed.only_the_mlp, "block 0 runs forward once per step"),
    (Checkpointed.not_sharded, "all_reduce carries"),
    (Checkpointed.no_gradient, "updated to something else than the reference's")]


class CheckpointedRight:
    def by_hugging_face(model, optimizer_class, **settings):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return shard(model, optimizer_class, **settings)


# 4.5 mixed


def with_policy(model, optimizer_class, policy, **settings):
    return strategies.fsdp2(model, optimizer_class, mp_policy=policy, **settings)


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


WRONG[lab.check_mixed] = [
    (shard, "block 0 computes with parameters in float32"),
    (Mixed.everything_in_bf16, "in bfloat16: small updates are rounded away"),
    (Mixed.reduced_in_bf16, "reduce_scatter carries 2 bytes for each element, not 4"),
    (Mixed.in_fp16, "computes with parameters in float16"),
    (Mixed.only_reduced, "computes with parameters in float32"),
    (Mixed.not_the_root, "the same dtype"),
    (Mixed.not_the_blocks, "the same dtype"),
    (Mixed.settings_lost, "the reference's in fp32")]


class MixedRight:
    def from_the_labs(model, optimizer_class, **settings):
        return with_policy(model, optimizer_class, MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32), **settings)


# 4.6 from_meta


def reset(model):
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def on_meta(make_model):
    with torch.device("meta"):
        return make_model()


class FromMeta:
    def whole_first(make_model, optimizer_class, **settings):
        return shard(make_model(), optimizer_class, **settings)

    def memory_before_shards(make_model, optimizer_class, **settings):
        model = on_meta(make_model).to_empty(device="cpu")
        reset(model)
        return shard(model, optimizer_class, **settings)

    def never_drawn(make_model, optimizer_class, **settings):
        model = on_meta(make_model)
        shard(model, optimizer_class)
        model.to_empty(device="cpu")
        return model, optimizer_class(model.parameters(), **settings)

    def one_seed(make_model, optimizer_class, **settings):
        model, optimizer = FromMeta.never_drawn(make_model, optimizer_class, **settings)
        torch.manual_seed(7)
        reset(model)
        return model, optimizer

    def seed_in_the_loop(make_model, optimizer_class, **settings):
        model, optimizer = FromMeta.never_drawn(make_model, optimizer_class, **settings)
        for module in model.modules():
            torch.manual_seed(dist.get_rank())
            reset(module)
        return model, optimizer

    def no_memory(make_model, optimizer_class, **settings):
        return shard(on_meta(make_model), optimizer_class, **settings)

    def optimizer_first(make_model, optimizer_class, **settings):
        model = on_meta(make_model)
        optimizer = optimizer_class(model.parameters(), **settings)
        shard(model, optimizer_class)
        model.to_empty(device="cpu")
        torch.manual_seed(dist.get_rank())
        reset(model)
        return model, optimizer


WRONG[lab.check_from_meta] = [
    (FromMeta.whole_first, "bytes while the model was built; the whole model is"),
    (FromMeta.memory_before_shards, "bytes while the model was built; the whole model is"),
    (FromMeta.never_drawn, "are not what reset_parameters draws"),
    (FromMeta.one_seed, "ranks 0 and 1 have the same numbers"),
    (FromMeta.seed_in_the_loop, "have the same numbers"),
    (FromMeta.no_memory, "meta device"),
    (FromMeta.optimizer_first, "a step does not change it")]


class FromMetaRight:
    def optimizer_before_memory(make_model, optimizer_class, **settings):
        model, optimizer = shard(on_meta(make_model), optimizer_class, **settings)
        model.to_empty(device="cpu")  # of shards it keeps the parameters, and swaps what they hold
        torch.manual_seed(dist.get_rank())
        reset(model)
        return model, optimizer

    def drawn_by_hand(make_model, optimizer_class, **settings):
        model, optimizer = FromMeta.never_drawn(make_model, optimizer_class, **settings)
        torch.manual_seed(100 + dist.get_rank())
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                bound = module.in_features ** -0.5
                torch.nn.init.uniform_(module.weight, -bound, bound)
                torch.nn.init.uniform_(module.bias, -bound, bound)
        return model, optimizer


# 4.7 save and load


class Checkpoint:
    def nothing(module, optimizer, folder):
        pass

    def rank_0_alone(module, optimizer, folder):
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(module, options=full)
        if dist.get_rank() == 0:
            torch.save(state, f"{folder}/model.pt")

    def everybody_everything(module, optimizer, folder):
        state = get_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))
        torch.save(state, f"{folder}/{dist.get_rank()}.pt")

    def model_only(module, optimizer, folder):
        dcp.save({"model": get_model_state_dict(module)}, checkpoint_id=folder)

    def load_model_only(module, optimizer, folder):
        state = get_model_state_dict(module)
        dcp.load({"model": state}, checkpoint_id=folder)
        set_model_state_dict(module, state)

    def load_without_placing(module, optimizer, folder):
        parameters, moments = get_state_dict(module, optimizer)
        dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=folder)

    def save_a_pair(module, optimizer, folder):
        dcp.save(get_state_dict(module, optimizer), checkpoint_id=folder)

    def save_as_it_lies(module, optimizer, folder):
        torch.save(module.state_dict(), f"{folder}/{dist.get_rank()}.pt")

    def load_as_it_lies(module, optimizer, folder):
        module.load_state_dict(torch.load(f"{folder}/{dist.get_rank()}.pt", weights_only=False))


WRONG[lab.check_checkpoint] = [
    ((Checkpoint.nothing, Checkpoint.nothing), "save wrote nothing into the folder"),
    ((Checkpoint.rank_0_alone, Checkpoint.nothing), "one rank wrote for all"),
    ((Checkpoint.everybody_everything, Checkpoint.nothing), "wrote more than its share"),
    ((Checkpoint.model_only, Checkpoint.load_model_only), "two steps after load"),
    ((right.save, Checkpoint.load_without_placing), "learning rate is 0.05; 0.025 was saved"),
    ((right.save, Checkpoint.nothing), "after load: it differs")]


class CheckpointRight:
    def save(module, optimizer, folder):
        dcp.save({"a": get_model_state_dict(module),
                  "b": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=folder)

    def load(module, optimizer, folder):
        state = {"a": get_model_state_dict(module),
                 "b": get_optimizer_state_dict(module, optimizer)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(module, state["a"])
        set_optimizer_state_dict(module, optimizer, state["b"])


RIGHT = {lab.check_from_meta: [right.from_meta, FromMetaRight.drawn_by_hand,
                               FromMetaRight.optimizer_before_memory],
         lab.check_checkpoint: [(right.save, right.load),
                                (CheckpointRight.save, CheckpointRight.load)],
         lab.check_mixed: [right.mixed, MixedRight.from_the_labs],
         lab.check_checkpointed: [right.checkpointed, CheckpointedRight.by_hugging_face],
         lab.check_shard: [shard, ShardRight.by_name, ShardRight.root_gathered_twice],
         lab.check_cost: [cost, CostRight.in_a_loop, CostRight.of_numpy],
         lab.check_choose: [choose, ChooseRight.sorted_first]}


def name_of(answer) -> str:
    parts = answer if isinstance(answer, tuple) else (answer,)
    return "-".join(getattr(part, "__name__", str(part)) for part in parts)


def cases(table):
    return [pytest.param(check, answer, *rest,
                         id=f"{check.__name__}-{name_of(answer)}")
            for check, answers in table.items() for answer, *rest in answers]


@pytest.mark.parametrize("check, answer, words", cases(WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, capsys):
    verdict = check(*answer) if isinstance(answer, tuple) else check(answer)
    assert verdict.passed is False, verdict
    assert words in verdict.sentence, verdict


def empty(*_):
    return max([])


def nothing_fits(wrappings, free):
    fits = [name for name, units in wrappings.items() if cost(units)[1] <= free]
    return min(fits, key=lambda name: cost(wrappings[name]))


@pytest.mark.parametrize("check, answer, hint", [
    (lab.check_cost, empty, "the root alone"),
    (lab.check_choose, nothing_fits, "the answer is None"),
    (lab.check_checkpoint, (Checkpoint.save_a_pair, Checkpoint.nothing), "put them into one"),
    (lab.check_checkpoint, (Checkpoint.save_as_it_lies, Checkpoint.load_as_it_lies), "cut shards")])
def test_an_error_of_pythons_or_torchs_gets_a_hint(check, answer, hint, capsys):
    verdict = check(*answer) if isinstance(answer, tuple) else check(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict


@pytest.mark.parametrize("check, answer", cases({c: [(a,) for a in answers]
                                                 for c, answers in RIGHT.items()}))
def test_another_right_answer_is_accepted(check, answer, capsys):
    verdict = check(*answer) if isinstance(answer, tuple) else check(answer)
    assert verdict.passed, verdict


def test_what_is_not_filled_in_is_waited_for(capsys):
    def unfilled(*_, **__):
        raise NotImplementedError("Exercise 4.1")

    for check in RIGHT:
        verdict = check(unfilled, unfilled) if check is lab.check_checkpoint else check(unfilled)
        assert verdict.passed is None, verdict
