"""The reference on real ranks: right trainings agree, and each wrong one is called by its name."""

import pytest
import torch
import torch.distributed as dist

from labs.checks.mistakes import (
    GRADIENT_OF_ONE_RANK,
    GRADIENTS_NOT_CLEARED,
    MEAN_TWICE,
    NEW_OPTIMIZER_STATE,
    NOT_ACCUMULATED,
    NOT_UPDATED,
    SUM_NOT_MEAN,
    WEIGHT_DECAY_MISSING,
)
from labs.checks.on_ranks import BATCH
from labs.checks.reference import Reference, Step
from labs.checks.tolerances import SUMS
from labs.checks.training import UNEXPLAINED, Hints, train_and_compare
from labs.checks.verdicts import Wrong
from labs.training import data
from labs.training.models import EdgeCaseModel
from labs.workers.failures import RankFailed
from labs.workers.launcher import launch

MISTAKES = (
    NOT_UPDATED, GRADIENT_OF_ONE_RANK, SUM_NOT_MEAN, WEIGHT_DECAY_MISSING, NEW_OPTIMIZER_STATE,
    GRADIENTS_NOT_CLEARED, NOT_ACCUMULATED.with_hint("add"), MEAN_TWICE.with_hint("divide once"))
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
    return train_and_compare(model, optimizer, [reference], steps, mistakes=MISTAKES,
                             hints=Hints(loss="forward", unexplained="why?"),
                             parameters_of=lambda module: dict(module.state_dict()))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_right_training_agrees(parts):
    assert max(launch(run, "", parts, ranks=3, device="cpu", quiet=True)) < SUMS


@pytest.mark.parametrize(("fault", "code", "place"), [
    ("still", "not_updated", "after step 0"), ("own", "gradient_of_one_rank", "after step 0"),
    ("sum", "sum_not_mean", "after step"), ("decay", "weight_decay_missing", "after step 0"),
    ("new", "new_optimizer_state", "after step 1"),
    ("all", "gradients_not_cleared", "after step 1"), ("parts", "not_accumulated", "of 2 backward"),
    ("nan", "not_finite", "parameter 'first.bias' after step 0"),
    ("loss", "wrong_loss", "rank 0, before the first step"),
    ("buffer", UNEXPLAINED, "buffer 'shift' after step 0")])
def test_a_wrong_one_is_called_by_its_name(fault, code, place):
    with pytest.raises(RankFailed) as caught:
        launch(run, fault, ranks=3, device="cpu", quiet=True)
    wrong = caught.value.cause
    assert isinstance(wrong, Wrong) and wrong.code == code and place in wrong.sentence, wrong


@pytest.mark.parametrize("ranks, sentence, hint", [
    (2, "it was updated with the gradient of one of 2 backward passes, or updated with the mean "
     "divided by the world size once more (the same on 2 ranks)", "add Or: divide once"),
    (3, "it was updated with the mean divided by the world size once more", "divide once")])
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
