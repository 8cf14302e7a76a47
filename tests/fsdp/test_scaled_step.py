"""What the check of exercise 4.9 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from answers import assert_waits
from fsdp_answers import accepted, cases, rejected, right
from torch.nn.utils import get_total_norm

import labs.fsdp as lab
from labs.fsdp.loop import MAX_NORM

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
def scale(module, norm, limit=MAX_NORM):
    for parameter in module.parameters():
        parameter.grad.mul_(min(1.0, limit / float(norm)))


# 4.9 scaled_step


def stepping(scale=2.0**16, divide=True, skip=None, share=1.0, clear="always"):
    """Returns a step. skip(module, loss): whether it is left out; clear: when gradients are."""
    def step(module, optimizer, batch, weight):
        loss = module(**batch).loss * (weight * share * scale)
        loss.backward()
        for parameter in module.parameters():
            parameter.grad.div_(scale if divide else 1)
        skipped = skip is not None and skip(module, loss)
        if not skipped:
            optimizer.step()
        if clear == "always" or clear == "stepped" and not skipped:
            optimizer.zero_grad()
    return step


def total_norm(module):
    return get_total_norm([p.grad for p in module.parameters()]).full_tensor()


def infinite(module, loss):
    return not total_norm(module).isfinite()


def own_infinite(module, loss):
    return not all(p.grad.to_local().isfinite().all() for p in module.parameters())


def infinite_on_all(module, loss):
    found = torch.tensor(float(own_infinite(module, loss)))
    dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return bool(found)


def zeros_for_infinity(module, optimizer, batch, share):
    (module(**batch).loss * share * 65536).backward()
    for parameter in module.parameters():
        parameter.grad.div_(65536).to_local().nan_to_num_(0, 0, 0)
    optimizer.step()
    optimizer.zero_grad()


def share_after_backward(module, optimizer, batch, share, skip=None):
    (module(**batch).loss * 1024).backward()
    for parameter in module.parameters():
        parameter.grad.mul_(share / 1024)
    if skip is None or not skip(module, None):
        optimizer.step()
    optimizer.zero_grad()


def nothing(module, optimizer, batch, share):
    pass


WRONG = [
    (stepping(1.0, skip=infinite), "underflow"),
    (stepping(8.0, skip=infinite), "underflow"),
    (stepping(divide=False, skip=infinite), "not_unscaled"),
    (stepping(), "step_not_skipped"),
    (stepping(skip=lambda module, loss: not loss.isfinite()), "step_not_skipped"),
    (stepping(skip=own_infinite), "step_not_skipped infinite"),
    (stepping(skip=infinite_on_all), "step_not_skipped infinite"),
    (stepping(2.0**30, skip=infinite), "scale_too_large"),
    (stepping(2.0**30), "scale_too_large"),
    (share_after_backward, "step_not_skipped infinite"),
    (stepping(skip=infinite, share=0.5), "not_unscaled 0.5"),
    (stepping(skip=infinite, clear="stepped"), "gradients_left next"),
    (stepping(skip=infinite, clear="never"), "gradients_left behind"),
    (stepping(skip=lambda module, loss: True), "step_skipped"),
    (zeros_for_infinity, "step_not_skipped"),
    (nothing, "step_skipped")]


def test_a_table_of_a_step_says_who_made_it_and_why_the_norm_grew(capsys):
    table = str(lab.show_step(right.found_step))
    assert "who makes the step  ranks 0 and 1  no rank" in table and "norm can grow" in table, table


def by_grad_scaler(module, optimizer, batch, share):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(module(**batch).loss * share).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def share_after_backward_and_skipped(module, optimizer, batch, share):
    """The same gradients: what counts is that fp16 loses few of them."""
    share_after_backward(module, optimizer, batch, share, skip=infinite)


def with_a_smaller_scale_where_it_overflows(module, optimizer, batch, share):
    scale, left = 2.0**20, 8
    while left:
        (module(**batch).loss * (share * scale)).backward()
        for parameter in module.parameters():
            parameter.grad.div_(scale)
        if not infinite(module, None):
            optimizer.step()
            left = 1
        optimizer.zero_grad()
        scale, left = scale / 256, left - 1


RIGHT = [right.scaled_step, stepping(2.0**14, skip=infinite),
         by_grad_scaler, share_after_backward_and_skipped,
         with_a_smaller_scale_where_it_overflows]


def test_the_loops_found_are_rejected(capsys):
    """Said in the notebook: each piece runs without an error, and is wrong."""
    rejected(lab.check_scaled_step, right.found_step, "underflow")


@pytest.mark.parametrize("check, answer, words", cases(lab.check_scaled_step, WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, request, capsys):
    rejected(check, answer, words, request)


@pytest.mark.parametrize("check, answer", cases(lab.check_scaled_step, RIGHT))
def test_another_right_answer_is_accepted(check, answer, request, capsys):
    accepted(check, answer, request)


def test_an_unfilled_exercise_waits(capsys):
    assert_waits(lab.check_scaled_step, "4.9")
