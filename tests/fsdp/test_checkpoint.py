"""What the check of exercise 4.7 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from answers import assert_waits
from fsdp_answers import accepted, cases, rejected, right
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import labs.fsdp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
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

    def load_other_names(module, optimizer, folder):
        dcp.load({"a": get_model_state_dict(module)}, checkpoint_id=folder)

    def load_without_placing(module, optimizer, folder):
        parameters, moments = get_state_dict(module, optimizer)
        dcp.load({"model": parameters, "optimizer": moments}, checkpoint_id=folder)

    def save_a_pair(module, optimizer, folder):
        dcp.save(get_state_dict(module, optimizer), checkpoint_id=folder)

    def save_as_it_lies(module, optimizer, folder):
        torch.save((module.state_dict(), optimizer.state_dict()),
                   f"{folder}/{dist.get_rank()}.pt")

    def load_as_it_lies(module, optimizer, folder):
        parameters, _ = torch.load(f"{folder}/{dist.get_rank()}.pt", weights_only=False)
        module.load_state_dict(parameters)

    def one_file(module, optimizer, folder):
        torch.save(module.state_dict(), f"{folder}/model.pt")

    def full(module, optimizer, folder):
        state = get_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))
        dcp.save(dict(zip(("model", "optimizer"), state, strict=True)), checkpoint_id=folder)

    def not_awaited(module, optimizer, folder):
        state = get_state_dict(module, optimizer)
        dcp.async_save(dict(zip(("model", "optimizer"), state, strict=True)),
                       checkpoint_id=folder)

    def twice(module, optimizer, folder):
        for name in ("first", "second"):
            right.save(module, optimizer, f"{folder}/{name}")

    def state_changed(module, optimizer, folder):
        right.save(module, optimizer, folder)
        for state in optimizer.state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])

    def load_into_a_fresh_optimizer(module, optimizer, folder):
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def load_whole(module, optimizer, folder):
        whole = StateDictOptions(full_state_dict=True)
        state = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer, options=whole),
                         strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(module, optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"], options=whole)


WRONG = [
    ((Checkpoint.nothing, Checkpoint.nothing), "nothing_saved"),
    ((Checkpoint.rank_0_alone, Checkpoint.nothing), "full_tensor_gathered"),
    ((Checkpoint.everybody_everything, Checkpoint.nothing), "full_tensor_gathered"),
    ((Checkpoint.full, right.load), "full_tensor_gathered"),
    ((Checkpoint.not_awaited, right.load), "never_waited"),
    ((Checkpoint.twice, right.load), "saved_twice"),
    ((Checkpoint.state_changed, right.load), "optimizer_changed"),
    ((Checkpoint.model_only, Checkpoint.load_model_only), "saved_too_little"),
    ((right.save, Checkpoint.load_model_only), "optimizer_state_missing"),
    ((right.save, Checkpoint.load_into_a_fresh_optimizer), "optimizer_state_missing"),
    ((right.save, Checkpoint.load_whole), "full_tensor_gathered load"),
    ((right.save, Checkpoint.load_without_placing), "settings_not_restored"),
    ((right.save, Checkpoint.nothing), "state_not_restored"),
    ((Checkpoint.save_a_pair, Checkpoint.nothing), "raised_AttributeError them"),
    ((Checkpoint.one_file, right.load), "shards_missing"),
    ((right.save, Checkpoint.load_other_names), "raised_RuntimeError names")]


@pytest.mark.slow
def test_what_torch_raises_is_shortened_to_the_students_line(capsys):
    """It repeats itself for each parameter, or on each rank: the hint would stand below 4 kB."""
    save = Checkpoint.save_as_it_lies
    for load, hint in ((right.load, "what dcp.save wrote"),
                       (Checkpoint.load_as_it_lies, "reshard for")):
        verdict = lab.check_checkpoint(save, load)
        assert verdict.passed is False and hint in verdict.hint, verdict
        assert len(str(verdict)) < 700 and " line " in verdict.sentence, verdict
        assert "Traceback" not in str(verdict), verdict


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

    def awaited(module, optimizer, folder):
        state = get_state_dict(module, optimizer)
        dcp.async_save(dict(zip(("model", "optimizer"), state, strict=True)),
                       checkpoint_id=folder).result()


RIGHT = [(right.save, right.load), (CheckpointRight.awaited, right.load),
         (CheckpointRight.save, CheckpointRight.load)]


@pytest.mark.parametrize("check, answer, words", cases(lab.check_checkpoint, WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, request, capsys):
    rejected(check, answer, words, request)


@pytest.mark.parametrize("check, answer", cases(lab.check_checkpoint, RIGHT))
def test_another_right_answer_is_accepted(check, answer, request, capsys):
    accepted(check, answer, request)


def test_an_unfilled_exercise_waits(capsys):
    assert_waits(lab.check_checkpoint, "4.7", functions=2)
