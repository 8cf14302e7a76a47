"""The reference on real ranks: right trainings agree, and each wrong one is called by its name."""

import re

import pytest
import torch
import torch.distributed as dist

from labs.checks.on_ranks import BATCH, TOLERANCE
from labs.checks.reference import Hints, Mistake, Reference, Step, train_beside_reference
from labs.checks.verdicts import Wrong
from labs.training import data
from labs.training.models import EdgeCaseModel
from labs.workers.failures import RankFailed
from labs.workers.launcher import launch

MISTAKES = (
    Mistake("not_updated", "not changed", "step", lambda reference: [reference.unchanged()]),
    Mistake("gradient_of_one_rank", "updated with one rank's gradient", "reduce",
            lambda reference: [reference.otherwise(alone) for alone in reference.alone]),
    Mistake("sum_not_mean", "updated with the sum", "divide",
            lambda reference: [reference.otherwise(scale=dist.get_world_size())]),
    Mistake("weight_decay_missing", "updated without decay", "settings",
            lambda reference: [reference.otherwise(weight_decay=0.0)]),
    Mistake("new_optimizer_state", "updated by a new optimizer", "once",
            lambda reference: [reference.otherwise(new_optimizer=True)]),
    Mistake("gradients_not_cleared", "updated with the gradients of all steps", "zero_grad",
            lambda reference: [reference.otherwise(reference.accumulated())]),
    Mistake("not_accumulated", "updated with one of {parts} passes", "add",
            lambda reference: [reference.otherwise(scale=1 / reference.parts)]),
    Mistake("mean_twice", "updated with the mean divided once more", "divide once",
            lambda reference: [reference.otherwise(scale=1 / dist.get_world_size())]))
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **SETTINGS)


class Averaging(torch.optim.AdamW):
    """AdamW that averages the gradients first, or makes the mistake `fault`."""

    def __init__(self, model, fault=""):
        settings = {**SETTINGS, "weight_decay": 0.0} if fault == "decay" else SETTINGS
        super().__init__([p for p in model.parameters() if p.requires_grad], **settings)
        self.fault = fault

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            if self.fault != "own":
                dist.all_reduce(p.grad)
                p.grad /= {"sum": 1, "twice": dist.get_world_size()**2}.get(
                    self.fault, dist.get_world_size())
        if self.fault == "new":
            self.state.clear()
        if self.fault != "still":
            super().step()

    def zero_grad(self):
        if self.fault != "all":
            super().zero_grad()


def run(fault, parts=1):
    model = EdgeCaseModel()
    steps = [Step(batch, lambda rank: rank == 0, parts) for batch in data.xy_batches(3, BATCH)]
    reference = Reference(model, adamw)
    optimizer = Averaging(model, fault)
    if fault == "parts":
        steps = [Step(step.batch, step.use_all, 2) for step in steps]
        model.register_forward_pre_hook(lambda *_: model.zero_grad())
    if fault == "nan":
        optimizer.register_step_post_hook(lambda *_: model.first.bias.data.fill_(torch.nan))
    if fault == "loss":
        model.scale.data.mul_(2)
    if fault == "buffer":
        optimizer.register_step_post_hook(lambda *_: model.shift.add_(1))
    return train_beside_reference(model, optimizer, [reference], steps, mistakes=MISTAKES,
                                  hints=Hints(loss="forward", unexplained="why?"),
                                  parameters_of=lambda module: dict(module.state_dict()))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_right_training_agrees(parts):
    assert max(launch(run, "", parts, ranks=3, device="cpu", quiet=True)) < TOLERANCE


@pytest.mark.parametrize(("fault", "words"), [
    ("still", "after step 0: it was not changed"),
    ("own", "it was updated with one rank's gradient"),
    ("sum", "it was updated with the sum"), ("decay", "after step 0: .*updated without decay"),
    ("new", "after step 1: .*updated by a new optimizer"),
    ("all", "after step 1: .*updated with the gradients of all steps"),
    ("parts", "updated with one of 2 passes"),
    ("nan", "parameter 'first.bias' after step 0: it is not finite"),
    ("loss", "rank 0, before the first step: the loss is"),
    ("buffer", "buffer 'shift' after step 0")])
def test_a_wrong_one_is_called_by_its_name(fault, words):
    with pytest.raises(RankFailed) as caught:
        launch(run, fault, ranks=3, device="cpu", quiet=True)
    assert isinstance(caught.value.cause, Wrong)
    assert re.search(words, caught.value.cause.sentence), caught.value.cause.sentence


@pytest.mark.parametrize("ranks, sentence, hint", [
    (2, "it was updated with one of 2 passes, or updated with the mean divided once more (the same "
     "on 2 ranks)", "add Or: divide once"),
    (3, "it was updated with the mean divided once more", "divide once")])
def test_mistakes_that_leave_the_same_numbers_are_both_named(ranks, sentence, hint):
    with pytest.raises(RankFailed) as caught:
        launch(run, "twice", 2, ranks=ranks, device="cpu", quiet=True)
    assert caught.value.cause.sentence.endswith(sentence) and caught.value.cause.hint == hint


def unused(kind):
    model = EdgeCaseModel()
    reference = Reference(model, adamw, unused=kind)
    [batch] = data.xy_batches(1, BATCH)
    reference.train(Step(batch, lambda rank: False))
    before = reference.unchanged()["sometimes_unused.weight"]
    return reference.model.sometimes_unused.weight.equal(before)


def test_a_parameter_that_nobody_used_decays_or_is_left_alone():
    assert launch(unused, "skip", ranks=2, device="cpu", quiet=True) == [True, True]
    assert launch(unused, "zero", ranks=2, device="cpu", quiet=True) == [False, False]
