"""What the check of exercise 4.10 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
from answers import assert_waits
from fsdp_answers import accepted, cases, rejected, right

import labs.fsdp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
# 4.10 gradient_bytes


def counting(choose, size=lambda call: call.bytes):
    return lambda calls: sum(size(call) for call in calls if choose(call.kind))


WRONG = [
    (counting(lambda kind: kind == "all_reduce"), "reduce_scatter_missing"),
    (counting(lambda kind: kind == "reduce_scatter"), "all_reduce_missing"),
    (counting(lambda kind: "reduce" in kind, lambda call: 4 * call.elements),
     "one_size_for_all"),
    (counting(lambda kind: "reduce" in kind, lambda call: 2 * call.elements),
     "one_size_for_all"),
    (counting(lambda kind: kind != "all_reduce"), "all_gather_counted"),
    (counting(lambda kind: True), "all_gather_counted"),
    (counting(lambda kind: kind == "all_gather"), "all_gather_counted"),
    (counting(lambda kind: "reduce" in kind, lambda call: call.elements), "in_elements"),
    (counting(lambda kind: "reduce" in kind, lambda call: 1), "wrong_number"),
    (lambda calls: None, "not_a_number")]
RIGHT = [
             right.gradient_bytes,
             lambda calls: torch.tensor(counting(lambda kind: "reduce" in kind)(calls))]


def test_the_loops_found_are_rejected(capsys):
    """Said in the notebook: each piece runs without an error, and is wrong."""
    rejected(lab.check_gradient_bytes, right.found_meter, "reduce_scatter_missing")


@pytest.mark.parametrize("check, answer, words", cases(lab.check_gradient_bytes, WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, request, capsys):
    rejected(check, answer, words, request)


@pytest.mark.parametrize("check, answer", cases(lab.check_gradient_bytes, RIGHT))
def test_another_right_answer_is_accepted(check, answer, request, capsys):
    accepted(check, answer, request)


def test_an_unfilled_exercise_waits(capsys):
    assert_waits(lab.check_gradient_bytes, "4.10")
