"""What the checks of notebook 04 must reject, with the words that must say why; and what they must
accept."""

import copy
import sys

import cloudpickle
import pytest
from _build.definitions import definitions
from torch.distributed.fsdp import fully_shard

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
    (Shard.optimizer_first, "was not changed by the step"),
    (Shard.never_resharded, "gathered 3 times per step, not 6"),
    (Shard.each_linear, "gradients leave in 16 units"),
    (Shard.every_other_block, "gradients leave in 3 units"),
    (Shard.root_first, "should not be"),
    (Shard.settings_lost, "differs from the twin's by"),
    (Shard.no_optimizer, "not (module, optimizer)"),
    (Shard.a_copy_is_kept, "beside its shard after building")]


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
    (Cost.no_root, "the root is gathered all the while"),
    (Cost.not_neighbours, "may not be neighbours"),
    (Cost.one_number, "not two numbers")]


class CostRight:
    def in_a_loop(units):
        calls, most = 2, units[0]
        for number, size in enumerate(units[1:], 1):
            calls += 3
            most = max(most, units[0] + size + (units[number - 1] if number > 1 else 0))
        return calls, 4 * most


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
    (Choose.all_at_once, "and choose returned None"),
    (Choose.the_units, "not the name of a wrapping")]


class ChooseRight:
    def sorted_first(wrappings, free):
        for name in sorted(wrappings, key=lambda name: len(wrappings[name])):
            if cost(wrappings[name])[1] <= free:
                return name


RIGHT = {lab.check_shard: [shard, ShardRight.by_name, ShardRight.root_gathered_twice],
         lab.check_cost: [cost, CostRight.in_a_loop],
         lab.check_choose: [choose, ChooseRight.sorted_first]}


def cases(table):
    return [pytest.param(check, answer, *rest,
                         id=f"{check.__name__}-{getattr(answer, '__name__', answer)}")
            for check, answers in table.items() for answer, *rest in answers]


@pytest.mark.parametrize("check, answer, words", cases(WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, capsys):
    verdict = check(*answer) if isinstance(answer, tuple) else check(answer)
    assert verdict.passed is False, verdict
    assert words in verdict.sentence, verdict


@pytest.mark.parametrize("check, answer", cases({c: [(a,) for a in answers]
                                                 for c, answers in RIGHT.items()}))
def test_another_right_answer_is_accepted(check, answer, capsys):
    verdict = check(*answer) if isinstance(answer, tuple) else check(answer)
    assert verdict.passed, verdict


def test_what_is_not_filled_in_is_waited_for(capsys):
    def unfilled(*_, **__):
        raise NotImplementedError("Exercise 4.1")

    for check in RIGHT:
        verdict = check(unfilled)
        assert verdict.passed is None, verdict
