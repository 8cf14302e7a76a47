"""What the check of exercise 5.4 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
from _build.definitions import definitions
from answers import assert_rejected

import labs.fsdp_profiling as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
# slow: each answer is tried on recordings of real ranks
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
right = definitions("05_fsdp_profiling")
KINDS = ("all_gather", "reduce_scatter")
# 5.4 call_site


def own(stack):
    return [frame for frame in stack if not any(word in frame for word in lab.LIBRARIES)]


WRONG = [
    (lambda one: None, "not_on_stack None"),
    (lambda one: one.stack[-1], "library_frame"),
    (lambda one: one.stack[0], "library_frame string"),
    (lambda one: own(one.stack)[0], "outer_caller step'"),
    (lambda one: own(one.stack)[-1].split("(")[0], "not_on_stack 'train.py'"),
    (lambda one: [f for f in one.stack if "built-in" not in f and "torch/distributed" not in f][-1],
     "library_frame call'"),
    (lambda one: [f for f in one.stack if f.startswith("train")][-1], "outer_caller"),
    (lambda one: own(one.stack)[-2:], "not_on_stack"),
    (lambda one: one.stack.index(own(one.stack)[-1]), "not_on_stack"),
    (lambda one: own(one.stack)[-1].split(": ")[-1], "not_on_stack"),
    (lambda one: [f for f in one.stack if "torch/" not in f][-1], "library_frame"),
    (lambda one: one.stack[2], "library_frame")]




def order_of(trace):
    return lab.gradients_done(trace)


def asked(trace, moment="issued", phase="backward"):
    return {unit: getattr(one, moment) for one in trace.of("all_gather")
            for unit, when in [right.attribute(trace, one)] if when == phase}


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_call_site(answer), expected)


class Right:
    """The same, written otherwise."""

    def site_by_a_list(collective):
        return own(collective.stack)[-1]


@pytest.mark.parametrize("answer", [
    right.call_site, Right.site_by_a_list])
def test_right(answer):
    verdict = lab.check_call_site(answer)
    assert verdict.passed is True, verdict
