"""How a numeric answer is judged: what counts as a number, and which cause explains a wrong one."""

import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from labs.checks.numbers import (
    Cause,
    as_number,
    judge_number,
    pairs,
    require_number,
    require_numbers,
    require_signature,
)
from labs.checks.verdicts import Wrong

NUMBERS = [(3, 3), (2.5, 2.5), (Fraction(1, 2), 0.5), (Decimal("2.5"), 2.5),
           (np.int64(3), 3), (np.float32(2.5), 2.5), (np.float64(2.5), 2.5), (np.array(3), 3),
           (torch.tensor(3), 3),
           (torch.tensor([2.5]), 2.5), (torch.tensor(2.5, requires_grad=True), 2.5)]
OTHERS = [None, True, np.bool_(True), torch.tensor(True), "3", 3j, [3], {"a": 3}, np.float64,
          np.array([1, 2]), torch.tensor([1, 2]), torch.empty(0), torch.tensor(1j),
          torch.tensor(1.0, device="meta")]
CAUSES = [Cause("doubled", 20.0, "doubled", "Once is enough."), Cause("halved", 5, "halved"),
          Cause("nothing", 0, "nothing")]


@pytest.mark.parametrize("value, number", NUMBERS, ids=lambda value: repr(value)[:20])
def test_a_number_of_any_library_is_one_of_pythons(value, number):
    found = as_number(value)
    assert found == number and isinstance(found, type(number))
    judge_number(value, number, [], "x")


@pytest.mark.parametrize("value", OTHERS, ids=lambda value: repr(value)[:20])
def test_nothing_else_is_a_number(value):
    assert as_number(value) is None
    for wanted in (0, 1, 3):
        with pytest.raises(Wrong, match="x: it returned .*, not a number"):
            judge_number(value, wanted, [], "x")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(float("nan"))])
def test_a_number_must_be_finite(value):
    with pytest.raises(Wrong, match="x: it returned (nan|inf), not a number"):
        require_number(value, "x")


def test_the_hint_about_no_number_can_be_given():
    with pytest.raises(Wrong, match="nothing") as caught:
        require_number(None, "x", "Return a list of numbers.")
    assert caught.value.hint == "Return a list of numbers."


def test_several_numbers_are_named_in_their_order():
    assert require_numbers([1, np.float64(2.5)], ("a", "b"), "x") == (1, 2.5)
    for returned, words in [(3, "an int, not 2 numbers"), ((1, 2, 3), "a tuple of 3, not 2"),
                            ((1, None), r"x, b: it returned nothing \(None\)")]:
        with pytest.raises(Wrong, match=words):
            require_numbers(returned, ("a", "b"), "x")


@pytest.mark.parametrize("values", [
    (1, 2.5), [1, 2.5], np.array([1, 2.5]), torch.tensor([1, 2.5]), (n for n in (1, 2.5)),
    map(float, (1, 2.5)), [np.float32(1), Fraction(5, 2)], (torch.tensor(1), Decimal("2.5"))])
def test_several_numbers_come_in_anything_that_has_an_order(values):
    assert require_numbers(values, ("a", "b"), "x") == (1, 2.5)


@pytest.mark.parametrize("values, words", [
    ({1, 2}, "a set"), ({"a": 1, "b": 2}, "a dict"), ("12", "a str"), (None, "nothing"),
    (torch.ones(2, 1), r"a Tensor of shape \[2, 1\]"),
    (torch.ones(3), r"a Tensor of shape \[3\]"),
    (torch.tensor(1), r"a Tensor of shape \[\]"), (np.ones(1), r"an ndarray of shape \[1\]")])
def test_what_has_no_order_is_not_several_numbers(values, words):
    with pytest.raises(Wrong, match=f"x: it returned {words}.*, not 2 numbers"):
        require_numbers(values, ("a", "b"), "x")


def test_a_number_of_float32_keeps_its_rounding_through_a_change_of_units():
    gigabytes = require_number(torch.tensor(1e9 / 3), "x") / 1e9
    judge_number(gigabytes, 1 / 3, [], "x")
    judge_number(gigabytes * 3, 1, [], "x")
    with pytest.raises(Wrong):
        judge_number(1 / 3 + 1e-8, 1 / 3, [], "x")


@pytest.mark.parametrize("got, want, sentence", [
    (7_087_873, 7_087_872, "you say 7,087,873, it is 7,087,872, 1 too much"),
    (1 - 1e-8, 1, "you say 0.99999999, it is 1, 1e-08 too little"),
    (3 + 1e-8, 3, "you say 3.00000001, it is 3, 1e-08 too much"),
    (10**400, 3, "it returned a number of 1329 bits"), (float("inf"), 3, "it returned inf, not")])
def test_figures_never_round_to_equality(got, want, sentence):
    with pytest.raises(Wrong, match=f"x: {re.escape(sentence)}"):
        judge_number(got, want, [], "x")


@pytest.mark.parametrize("got, sentence, hint", [
    (20, "x: you say 20 bytes, it is 10: doubled", "Once is enough."),
    (torch.tensor(20.0), "x: you say 20 bytes, it is 10: doubled", "Once is enough."),
    (5, "x: you say 5 bytes, it is 10: halved", "general"),  # which has no hint of its own
    (0, "x: you say 0 bytes, it is 10: nothing", "general"),
    (40_000, "x: you say 40,000 bytes, it is 10, 4000x", "general"),
    (-2.5, "x: you say -2.5 bytes, it is 10, -0.25x", "general")])
def test_the_cause_whose_number_it_is_explains_it(got, sentence, hint):
    with pytest.raises(Wrong) as caught:
        judge_number(got, 10, CAUSES, "x", "bytes", "general")
    assert (caught.value.sentence, caught.value.hint) == (sentence, hint)


def test_a_cause_that_gives_the_right_number_rejects_nothing():
    judge_number(10, 10, [Cause("other", 10, "does not apply")], "x")


def test_causes_that_the_number_does_not_separate_are_both_named():
    with pytest.raises(Wrong, match="x: you say 3, torch counts 4: a, or b$") as caught:
        judge_number(3, 4, [Cause("a", 3, "a", "A."), Cause("b", 3, "b", "B."), Cause("c", 2, "c")],
                     "x", source="torch counts")
    assert caught.value.hint == "A. Or: B."


def test_one_mistake_is_likelier_than_two_together():
    causes = [Cause("a", 3, "a"), Cause("b", 2, "b"), Cause("c", 4.5, "c")]
    together = pairs([Cause("c", 4.5, "c"), Cause("d", 2.5, "d")], 4)
    with pytest.raises(Wrong, match="x: you say 3, it is 4: a$"):  # and 4.5 + 2.5 - 4 is 3 too
        judge_number(3, 4, [*together, *causes], "x")


@pytest.mark.parametrize("got, want, close", [
    (1e9, 1e9 + 0.5, True), (1e9, 1e9 + 2, False), (0.0, 1e-13, True), (0.0, 1e-11, False),
    (0, 0, True), (1e-9, 0, False), (0.1 + 0.2, 0.3, True), (7_087_872, 7_087_873, False),
    # float32 has seven digits: such a number passes, and one that is off by more does not
    (torch.tensor(1 / 3), 1 / 3, True), (np.float32(1 / 3), 1 / 3, True),
    (torch.tensor(1 / 3 + 1e-5), 1 / 3, False), (1 / 3 + 1e-8, 1 / 3, False),
    (torch.tensor(1 / 3 + 1e-8, dtype=torch.float64), 1 / 3, False)])
def test_close_is_equal_up_to_rounding(got, want, close):
    if close:
        judge_number(got, want, [], "x")
        return
    with pytest.raises(Wrong, match=re.escape("x: you say ")):
        judge_number(got, want, [], "x")


def test_tolerances_are_those_of_isclose():
    judge_number(1.05, 1, [], "x", rel_tol=0, abs_tol=0.1)
    with pytest.raises(Wrong):
        judge_number(1e-300, 0, [], "x", abs_tol=0)


def test_two_mistakes_made_together_are_one_cause():
    mistakes = [Cause("a", 8, "a"), Cause("b", 9, "b", "hint of b"),
                Cause("c", 7, "c", "hint of c")]
    assert pairs(mistakes, 10) == [Cause("a", 7, "a and b", "hint of b", is_pair=True),
                                   Cause("a", 5, "a and c", "hint of c", is_pair=True),
                                   Cause("b", 6, "b and c", "hint of b", is_pair=True)]


def test_a_function_must_take_its_arguments():
    require_signature(lambda size, ranks=2: size, ("size", "ranks"))

    def bytes_sent(size):
        return size

    with pytest.raises(Wrong, match=r"bytes_sent\(size, ranks\) cannot be called: too many"):
        require_signature(bytes_sent, ("size", "ranks"))
