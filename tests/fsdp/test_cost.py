"""What the check of exercise 4.2 must reject, and what it must accept."""

import sys
from fractions import Fraction

import cloudpickle
import numpy as np
import pytest
import torch
from answers import assert_waits
from fsdp_answers import accepted, cases, rejected, right

import labs.fsdp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
cost, choose = right.cost, right.choose
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

    def everything_twice(units):
        return cost(units)[0], 8 * sum(units)

    def the_root_alone(units):
        return cost(units)[0], 4 * units[0]

    def once_each(units):
        return cost(units)[0], 4 * (units[0] + max(units[1:] or [0]))

    def two_neighbours(units):  # what is whole at once, without a flat buffer
        return cost(units)[0], 4 * (units[0] + max(
            [a + b for a, b in neighbours(units)] or units[1:] or [0]))

    def all_twice(units):
        return cost(units)[0], 8 * (units[0] + max(units[1:] or [0]))

    def no_unit_before(units):
        return cost(units)[0], 4 * (units[0] + 2 * max(units[1:] or units))

    def no_root(units):
        return cost(units)[0], cost(units)[1] - 4 * units[0]

    def the_one_before_twice(units):
        return cost(units)[0], 4 * (units[0] + max(
            [2 * a + b for a, b in zip(units, units[1:], strict=False)] or units))

    def both_twice(units):
        return cost(units)[0], 4 * (units[0] + max(
            [2 * a + 2 * b for a, b in zip(units, units[1:], strict=False)] or units))

    def the_root_is_never_before(units):
        return cost(units)[0], 4 * (units[0] + max(
            [a + 2 * b for a, b in neighbours(units)] + [2 * u for u in units[1:2]] or units))

    def the_first_arrival(units):
        before, here = (units * 2)[:2] if len(units) > 1 else (0, units[0] / 2)
        return cost(units)[0], 4 * (units[0] + before + 2 * here)

    def the_last_arrival(units):
        before, here = units[-2:] if len(units) > 1 else (0, units[0] / 2)
        return cost(units)[0], 4 * (units[0] + before + 2 * here)

    def three_times_the_largest(units):
        return cost(units)[0], (4 * (units[0] + 3 * max(units[1:])) if units[1:]
                                else 8 * units[0])

    def the_root_is_not_copied_out(units):
        return cost(units)[0], cost(units)[1] if units[1:] else 4 * units[0]

    def three_neighbours(units):
        return cost(units)[0], 4 * (units[0] + max(
            sum(units[first:first + 3]) for first in range(max(1, len(units) - 2))))

    def no_reduce_scatter(units):
        return 2 * len(units) - 1, cost(units)[1]

    def a_string(units):
        return str(cost(units)[0]), cost(units)[1]

    def one_number(units):
        return cost(units)[0]


WRONG = [
    (Cost.one_gather_each, "count_one_all_gather"),
    (Cost.root_gathered_twice, "root_stays_gathered_after_forward"),
    (Cost.parameters_not_bytes, "counts_parameters"),
    (Cost.everything_at_once, "all_units_together_never_gathered"),
    (Cost.everything_twice, "all_units_together_never_gathered"),
    (Cost.the_root_alone, "root_parameters_alone"),
    (Cost.once_each, "counts_unit_computes_once"),
    (Cost.two_neighbours, "counts_two_neighbours_once"),
    (Cost.all_twice, "root_buffer_counted"),
    (Cost.no_unit_before, "leaves_out_flat_buffer_unit"),
    (Cost.no_root, "root_parameters_stay_gathered_time"),
    (Cost.no_reduce_scatter, "all_gathers"),
    (Cost.the_one_before_twice, "unit_arrives_twice"),
    (Cost.both_twice, "unit_before_only_flat_buffer"),
    (Cost.the_root_is_never_before, "root_before_first_unit"),
    (Cost.the_first_arrival, "moment_first_unit_arrives"),
    (Cost.the_last_arrival, "moment_last_unit_arrives"),
    (Cost.three_times_the_largest, "largest_unit_twice"),
    (Cost.the_root_is_not_copied_out, "root_alone_arrives_in_flat"),
    (Cost.three_neighbours, "wrong_number"),
    (Cost.a_string, "not_a_number"),
    (Cost.one_number, "wrong_count")]


class CostRight:
    def in_a_loop(units):
        calls, most, before = 2, 2 * units[0], units[0]
        for size in units[1:]:
            calls += 3
            most = max(most, units[0] + before + size + size)
            before = size
        return calls, 4 * most

    def of_fractions(units):
        return [Fraction(number) for number in cost(units)]

    def of_torch(units):
        return torch.tensor(cost(units))

    def of_numpy(units):
        return tuple(np.array(cost(units)))


def neighbours(units):
    return list(zip(units[1:], units[2:], strict=False))


RIGHT = [cost, CostRight.in_a_loop, CostRight.of_numpy, CostRight.of_fractions,
         CostRight.of_torch]


def empty(*_):
    return max([])


@pytest.mark.parametrize("answer, hint", [
    (empty, "the root alone")])
def test_an_error_of_pythons_gets_a_hint(answer, hint, capsys):
    verdict = lab.check_cost(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict


@pytest.mark.parametrize("check, answer, words", cases(lab.check_cost, WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, capsys):
    rejected(check, answer, words)


@pytest.mark.parametrize("check, answer", cases(lab.check_cost, RIGHT))
def test_another_right_answer_is_accepted(check, answer, capsys):
    accepted(check, answer)


def test_an_unfilled_exercise_waits(capsys):
    assert_waits(lab.check_cost, "4.2")
