"""What the check of exercise 7.10 must reject, and what it must accept."""

import math
import sys

import cloudpickle
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("07a_tensor_parallel")
merge, pass_on = right.merge, right.pass_on


# 7.10


def weighted(weight):
    """A merge with the right lse and the weights that weight(lse_a, lse_b, lse) returns."""
    def answer(out_a, lse_a, out_b, lse_b):
        lse = torch.logaddexp(lse_a, lse_b)
        a, b = weight(lse_a, lse_b, lse)
        return a[..., None] * out_a + b[..., None] * out_b, lse
    return answer


def with_lse(function):
    """The right out, and another lse."""
    def answer(out_a, lse_a, out_b, lse_b):
        return merge(out_a, lse_a, out_b, lse_b)[0], function(lse_a, lse_b)
    return answer


def without_maximum(out_a, lse_a, out_b, lse_b):
    a, b = lse_a.exp(), lse_b.exp()
    return (a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None], (a + b).log()


def in_place(out_a, lse_a, out_b, lse_b):
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    return out_a.copy_(out), lse_a.copy_(lse)


def one_dimension_too_many(out_a, lse_a, out_b, lse_b):
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    return out, lse[..., None]


WRONG_MERGES = [
    ("a alone", lambda a, lse_a, b, lse_b: (a, lse_a), "one_part_alone"),
    ("the mean", weighted(lambda a, b, lse: (torch.full_like(a, 0.5),) * 2),
     "mean_of_parts"),
    ("the sum", weighted(lambda a, b, lse: (torch.ones_like(a),) * 2),
     "sum_of_parts"),
    ("the wrong weight", weighted(lambda a, b, lse: ((b - lse).exp(), (a - lse).exp())),
     "swapped"),
    ("weights by lse", weighted(lambda a, b, lse: (a / (a + b), b / (a + b))),
     "weighted_by_lse"),
    ("no maximum", without_maximum, "overflow"),
    ("NaN for nothing", weighted(lambda a, b, lse: ((a - lse).exp(), (b - lse).exp())),
     "not_finite part"),
    ("the larger lse", with_lse(torch.maximum), "larger_part_alone"),
    ("the sum of lse", with_lse(torch.add), "sum_of_parts"),
    ("no logarithm", with_lse(lambda a, b: a.exp() + b.exp()), "logarithm_missing"),
    ("in place", in_place, "changes_input out_a"),
    ("no lse", lambda *parts: merge(*parts)[0], "wrong_type"),
    ("a dict", lambda *parts: dict(enumerate(merge(*parts))), "wrong_type dict"),
    ("shape of lse", one_dimension_too_many, "wrong_type"),
    ("double", lambda *parts: tuple(each.double() for each in merge(*parts)), "wrong_dtype")]


@pytest.mark.parametrize("answer, words", [each[1:] for each in WRONG_MERGES],
                         ids=[each[0] for each in WRONG_MERGES])
def test_wrong_merge(answer, words):
    assert_rejected(lab.check_merge(answer), words)


def by_sigmoid(out_a, lse_a, out_b, lse_b):
    """As in ring-flash-attention: out_a - sigmoid(lse_b - lse_a) · (out_a - out_b)."""
    share = torch.sigmoid(lse_b - lse_a).nan_to_num(0.0)[..., None]
    return out_a - share * (out_a - out_b), torch.logaddexp(lse_a, lse_b)


def by_maximum(out_a, lse_a, out_b, lse_b):
    most = torch.maximum(lse_a, lse_b).clamp_min(-1e30)
    a, b = (lse_a - most).exp(), (lse_b - most).exp()
    total = (a + b).clamp_min(1e-30)
    lse = torch.where(a + b > 0, most + total.log(), -math.inf)
    return [(a / total)[..., None] * out_a + (b / total)[..., None] * out_b, lse]


@pytest.mark.parametrize("answer", [merge, by_sigmoid, by_maximum])
def test_right_merge(answer):
    verdict = lab.check_merge(answer)
    assert verdict.passed, verdict


def test_unfilled():
    assert_waits(lab.check_merge, "7.10")
