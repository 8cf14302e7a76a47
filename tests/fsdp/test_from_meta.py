"""What the check of exercise 4.6 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from answers import assert_rejected, assert_waits
from fsdp_answers import accepted, cases, rejected, right
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

import labs.fsdp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
shard = right.shard
# 4.6 from_meta


def on_meta(make_model):
    with torch.device("meta"):
        return make_model()


def empty_shards(make_model, optimizer_class):
    model = on_meta(make_model)
    shard(model, optimizer_class)
    return model.to_empty(device="cpu")


def drawing(draw):
    """Returns the answer that is right but for how draw(model) sets the numbers of the shards."""
    def answer(make_model, optimizer_class, **settings):
        model = empty_shards(make_model, optimizer_class)
        draw(model)
        return model, optimizer_class(model.parameters(), **settings)
    return answer


def place():
    return lab.mesh().get_local_rank("shard")


def draw(model, seed):
    torch.manual_seed(seed)
    model.apply(model._init_weights)


def reset(model):
    torch.manual_seed(place())
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def init_weights(model):
    torch.manual_seed(place())
    model.init_weights()


def parents_first(model):
    torch.manual_seed(place())
    for module in model.modules():
        model._init_weights(module)


def seed_in_the_loop(model):
    def seeded(module):
        torch.manual_seed(place())
        model._init_weights(module)
    model.apply(seeded)


def standard_normal(model):
    torch.manual_seed(place())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)


class FromMeta:
    def whole_first(make_model, optimizer_class, **settings):
        return shard(make_model(), optimizer_class, **settings)

    def memory_before_shards(make_model, optimizer_class, **settings):
        model = on_meta(make_model).to_empty(device="cpu")
        model.tie_weights()
        draw(model, 0)
        return shard(model, optimizer_class, **settings)

    def no_memory(make_model, optimizer_class, **settings):
        return shard(on_meta(make_model), optimizer_class, **settings)

    def optimizer_first(make_model, optimizer_class, **settings):
        model = on_meta(make_model)
        optimizer = optimizer_class(model.parameters(), **settings)
        shard(model, optimizer_class)
        draw(model.to_empty(device="cpu"), place())
        return model, optimizer

    def one_unit(make_model, optimizer_class, **settings):
        model = on_meta(make_model)
        fully_shard(model)
        draw(model.to_empty(device="cpu"), place())
        return model, optimizer_class(model.parameters(), **settings)

    def root_first(make_model, optimizer_class, **settings):
        model = on_meta(make_model)
        for module in (model, *lab.blocks(model)):
            fully_shard(module, mesh=lab.mesh())
        draw(model.to_empty(device="cpu"), place())
        return model, optimizer_class(model.parameters(), **settings)

    def settings_lost(make_model, optimizer_class, **settings):
        return right.from_meta(make_model, optimizer_class)

    def filled_from_a_whole_model(make_model, optimizer_class, **settings):
        model = empty_shards(make_model, optimizer_class)
        set_model_state_dict(model, make_model().state_dict(),
                             options=StateDictOptions(full_state_dict=True))
        return model, optimizer_class(model.parameters(), **settings)


WRONG = [
    (FromMeta.whole_first, "peak_too_high"),
    (FromMeta.memory_before_shards, "peak_too_high"),
    (FromMeta.filled_from_a_whole_model, "peak_too_high"),
    (FromMeta.no_memory, "raised_RuntimeError shards"),
    (FromMeta.optimizer_first, "optimizer_of_old_parameters"),
    (FromMeta.one_unit, "wrong_units"),
    (FromMeta.root_first, "units_overlap"),
    (FromMeta.settings_lost, "settings_ignored"),
    (drawing(lambda model: None), "not_initialized"),
    (drawing(reset), "initialized_twice draws"),
    (drawing(standard_normal), "initialized_twice draws"),
    (drawing(init_weights), "initialized_twice"),
    (drawing(parents_first), "initialized_twice"),
    (drawing(lambda model: draw(model, dist.get_rank())), "replicas_differ"),
    (drawing(seed_in_the_loop), "parameters_equal")]


class FromMetaRight:
    def optimizer_before_memory(make_model, optimizer_class, **settings):
        model, optimizer = shard(on_meta(make_model), optimizer_class, **settings)
        model.to_empty(device="cpu")  # of shards it keeps the parameters, and swaps what they hold
        draw(model, place())
        return model, optimizer


def by_hand(model):
    """Tied again, which changes nothing, and children before their parents by hand."""
    model.tie_weights()
    torch.manual_seed(100 + lab.mesh()["shard"].get_local_rank())
    for module in reversed(list(model.modules())):
        model._init_weights(module)


RIGHT = [right.from_meta, drawing(by_hand),
         FromMetaRight.optimizer_before_memory]


@pytest.mark.parametrize("check, answer, words", cases(lab.check_from_meta, WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, request, capsys):
    rejected(check, answer, words, request)


def test_torchs_warning_of_drawing_on_a_cpu_stays_away(capsys):
    verdict = lab.check_from_meta(drawing(lambda model: draw(model, 7)))
    assert not verdict.printed, verdict
    assert_rejected(verdict, "shards_equal")


@pytest.mark.parametrize("check, answer", cases(lab.check_from_meta, RIGHT))
def test_another_right_answer_is_accepted(check, answer, request, capsys):
    accepted(check, answer, request)


def test_an_unfilled_exercise_waits(capsys):
    assert_waits(lab.check_from_meta, "4.6")
