"""What the check of exercise 4.2 must reject, and what it must accept."""

import functools
import sys
from fractions import Fraction

import cloudpickle
import numpy as np
import pytest
import torch
from answers import assert_waits
from fsdp_answers import accepted, cases, rejected, right

import labs.fsdp as lab
from labs.fsdp import cost as costs

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right_cost = right.cost
# 4.2 cost


def cost(units):
    """Collectives and bytes: they depend on no machine."""
    return right_cost(units, float, float)[:2]


def waits(units, gather, compute):
    """The exposed seconds."""
    return right_cost(units, gather, compute)[2]


def with_seconds(of_units):
    """Completes an answer (units) -> (collectives, bytes) by the right seconds."""
    @functools.wraps(of_units)
    def answer(units, gather, compute):
        return *of_units(units), waits(units, gather, compute)
    return answer


def with_waits(seconds):
    """Completes an answer (units, gather, compute) -> seconds by the right numbers."""
    @functools.wraps(seconds)
    def answer(units, gather, compute):
        return *cost(units), seconds(units, gather, compute)
    return answer


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


class Seconds:
    def no_overlap(units, gather, compute):
        return sum(map(gather, units))

    def without_the_root(units, gather, compute):
        return waits(units, gather, compute) - gather(units[0])

    def first_unit_hidden(units, gather, compute):
        return waits(units, gather, compute) - sum(map(gather, units[1:2]))

    def only_later_units(units, gather, compute):
        return waits(units, gather, compute) - sum(map(gather, units[:2]))

    def without_the_pairs(units, gather, compute):
        return sum(map(gather, units[:2]))

    def root_hides(units, gather, compute):
        return waits(units, gather, compute) - sum(
            min(gather(b), compute(units[0])) for b in units[1:2])

    def own_computing(units, gather, compute):
        return sum(map(gather, units[:2])) + sum(
            max(0, gather(b) - compute(b)) for a, b in neighbours(units))

    def behind_the_next(units, gather, compute):
        return sum(map(gather, units[:2])) + sum(
            max(0, gather(a) - compute(b)) for a, b in neighbours(units))

    def time_saved(units, gather, compute):
        return sum(map(gather, units[:2])) + sum(
            gather(b) - compute(a) for a, b in neighbours(units))

    def bytes_gathered(units, gather, compute):
        return waits(units, lambda n: gather(4 * n), compute)

    def bytes_computed(units, gather, compute):
        return waits(units, gather, lambda n: compute(4 * n))

    def in_all(units, gather, compute):
        return gather(units[0]) + max(0, sum(map(gather, units[1:])) - sum(map(compute, units[1:])))

    def nothing(units, gather, compute):
        return None


def one_number(units, gather, compute):
    return cost(units)[0]


def no_seconds(units, gather, compute):
    return cost(units)


OF_UNITS = [
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
    (Cost.a_string, "not_a_number")]
OF_SECONDS = [
    (Seconds.no_overlap, "all_gathers_in_full"),
    (Seconds.without_the_root, "root_all_gather_missing"),
    (Seconds.first_unit_hidden, "first_all_gather_missing"),
    (Seconds.only_later_units, "first_two_missing"),
    (Seconds.without_the_pairs, "later_units_missing"),
    (Seconds.root_hides, "hidden_by_root"),
    (Seconds.own_computing, "hidden_by_own_forward"),
    (Seconds.behind_the_next, "hidden_by_next_forward"),
    (Seconds.time_saved, "below_zero"),
    (Seconds.bytes_gathered, "gathers_bytes"),
    (Seconds.bytes_computed, "computes_bytes"),
    (Seconds.in_all, "first_all_gather_missing"),
    (Seconds.nothing, "not_a_number")]
WRONG = [*((with_seconds(answer), code) for answer, code in OF_UNITS),
         *((with_waits(answer), code) for answer, code in OF_SECONDS),
         (one_number, "wrong_count"), (no_seconds, "wrong_count")]


class CostRight:
    def in_sums(units, gather, compute):
        root, *others = units
        arrivals = [before + 2 * unit for before, unit in zip(units, others, strict=False)]
        pairs = zip(others, others[1:], strict=False)
        seconds = gather(root) + sum(map(gather, others[:1])) + sum(
            max(0, gather(b) - compute(a)) for a, b in pairs)
        return 3 * len(units) - 1, 4 * (root + max(arrivals, default=root)), seconds

    def of_fractions(units, gather, compute):
        return [Fraction(number) for number in right_cost(units, gather, compute)]

    def of_torch(units, gather, compute):
        return torch.tensor(right_cost(units, gather, compute), dtype=torch.float64)

    def of_numpy(units, gather, compute):
        return tuple(np.array(right_cost(units, gather, compute)))


def neighbours(units):
    return list(zip(units[1:], units[2:], strict=False))


RIGHT = [right_cost, CostRight.in_sums, CostRight.of_numpy, CostRight.of_fractions,
         CostRight.of_torch]


def test_the_cases_tell_all_known_mistakes_apart():
    for mistakes in (costs._COLLECTIVES, costs._GATHERED, costs._EXPOSED):
        answers = [tuple(map(mistake.number, costs.CASES)) for mistake in mistakes]
        assert len(set(answers)) == len(answers)


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
