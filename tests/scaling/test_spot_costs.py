"""What the check of exercise 6.14 must reject, and what it must accept."""

import numpy as np
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.scaling as lab
from labs.predictions.cost.spot import break_even_rate, expected_hours

spot_costs = definitions("06_scaling").spot_costs


def spot_with(lost, even=None):
    """Another number of hours lost by an interruption."""
    def answer(hours, on_demand, spot, rate, interval, restart):
        hours_lost = lost(interval, restart)
        return (spot * hours * (1 + rate * hours_lost),
                (on_demand / spot - 1) / (even or lost)(interval, restart))
    return answer


def right_lost(interval, restart):
    return interval / 2 + restart


class Spot:
    def nothing(hours, on_demand, spot, rate, interval, restart):
        return None

    def never_interrupted(hours, on_demand, spot, rate, interval, restart):
        return spot * hours, 1.0

    def on_demand_price(hours, on_demand, spot, rate, interval, restart):
        return on_demand * hours, 1.0

    def at_the_wrong_price(hours, on_demand, spot, rate, interval, restart):
        return on_demand * hours * (1 + rate * right_lost(interval, restart)), 1.0

    def hours_alone(hours, on_demand, spot, rate, interval, restart):
        return hours * (1 + rate * right_lost(interval, restart)), 1.0

    def one_hours_interruptions(hours, on_demand, spot, rate, interval, restart):
        return spot * (hours + rate * right_lost(interval, restart)), 1.0

    def cheaper(hours, on_demand, spot, rate, interval, restart):
        return spot * hours * (1 - rate * right_lost(interval, restart)), 1.0

    def even_as_ratio(*case):
        return spot_costs(*case)[0], case[1] / case[2]

    def even_as_share(*case):
        return spot_costs(*case)[0], case[1] / case[2] - 1

    def even_upside_down(*case):
        return spot_costs(*case)[0], right_lost(*case[4:]) / (case[1] / case[2] - 1)

    def even_of_everything_lost(*case):
        return spot_costs(*case)[0], 1 / right_lost(*case[4:])

    def even_to_first_order(*case):
        return spot_costs(*case)[0], (case[1] / case[2] - 1) / right_lost(*case[4:])

    def both_to_first_order(hours, on_demand, spot, rate, interval, restart):
        lost = interval / 2 + restart
        return spot * hours / (1 - rate * lost), (1 - spot / on_demand) / lost

    def even_by_logarithm_of_a_whole_interval(*case):
        return spot_costs(*case)[0], np.log(case[1] / case[2]) / (case[4] + case[5])

    def even_without_restart(hours, on_demand, spot, rate, interval, restart):
        return (spot_costs(hours, on_demand, spot, rate, interval, restart)[0],
                break_even_rate(on_demand / spot, interval, 0))

    def even_as_mtbf(*case):
        return spot_costs(*case)[0], 1 / spot_costs(*case)[1]

    def searched_too_coarsely(hours, on_demand, spot, rate, interval, restart):
        """The first rate of a coarse grid at which spot costs more."""
        found = next(step for step in range(1, 99) if expected_hours(
            hours, step / 8 / (interval + restart), interval, restart) * spot > on_demand * hours)
        return (spot_costs(hours, on_demand, spot, rate, interval, restart)[0],
                found / 8 / (interval + restart))

    def a_whole_interval_is_billed(hours, on_demand, spot, rate, interval, restart):
        return spot * hours / (1 - rate * (interval + restart)), 1.0

    def restarts_are_free(hours, on_demand, spot, rate, interval, restart):
        return spot * hours / (1 - rate * interval / 2), 1.0

    def even_with_a_whole_interval(*case):
        return spot_costs(*case)[0], (1 - case[2] / case[1]) / (case[4] + case[5])

    def even_of_the_job(*case):
        return spot_costs(*case)[0], spot_costs(*case)[1] * case[0]

    def even_at_zero(*case):
        return spot_costs(*case)[0], 0

    def even_in_minutes(*case):
        return spot_costs(*case)[0], spot_costs(*case)[1] / 60


class RightSpot:
    def exact(hours, on_demand, spot, rate, interval, restart):
        return (spot * expected_hours(hours, rate, interval, restart),
                break_even_rate(on_demand / spot, interval, restart))

    def dollars_to_first_order(hours, on_demand, spot, rate, interval, restart):
        """Where a tenth is lost they are near the simulation; only the rate must be exact."""
        return (spot * hours * (1 + rate * (interval / 2 + restart)),
                break_even_rate(on_demand / spot, interval, restart))

    def by_logarithm(hours, on_demand, spot, rate, interval, restart):
        """Each lost hour is billed again with what it loses itself: hours · e^(rate·lost)."""
        lost = interval / 2 + restart
        return np.array([spot * hours * np.exp(rate * lost), np.log(on_demand / spot) / lost])

    def by_secants(hours, on_demand, spot, rate, interval, restart):
        def over(rate):
            return lab.expected_wall(1, interval, 0, restart, 1 / rate) * spot - on_demand

        before, now = 0.01 / interval, 0.1 / interval
        for _ in range(30):
            if over(now) != over(before):
                before, now = now, now - over(now) * (now - before) / (over(now) - over(before))
        return (spot * lab.expected_wall(hours, interval, 0, restart, 1 / rate), now)


WRONG = [
    (Spot.nothing, "wrong_count"),
    (Spot.never_interrupted, "interruptions_cost_nothing"),
    (Spot.on_demand_price, "on_demand"),
    (Spot.at_the_wrong_price, "on_demand_price"),
    (Spot.hours_alone, "in_hours|wrong_number"),
    (Spot.one_hours_interruptions, "one_hour_interruptions"),
    (Spot.cheaper, "interruptions_make_cheaper"),
    (spot_with(lambda interval, restart: interval + restart), "full_interval_lost"),
    (spot_with(lambda interval, restart: interval / 2), "restart_missing"),
    (spot_with(lambda interval, restart: restart), "repeated_work_missing"),
    (spot_with(right_lost, lambda interval, restart: interval + restart),
     "full_interval_lost"),
    (spot_with(right_lost, lambda interval, restart: interval / 2),
     "restart_missing break-even"),
    (Spot.even_as_ratio, "ratio_prices"),
    (Spot.even_as_share, "share_of_hours|wrong_number"),
    (Spot.even_upside_down, "hours_per_interruption"),
    (Spot.even_of_everything_lost, "rate_hour_lost_in_hour"),
    (Spot.even_to_first_order, "first_order"),
    (Spot.both_to_first_order, "first_order"),
    (Spot.even_by_logarithm_of_a_whole_interval, "full_interval_lost"),
    (Spot.even_without_restart, "restart_missing break-even"),
    (Spot.even_as_mtbf, "hours_per_interruption"),
    (Spot.searched_too_coarsely, "wrong_number"),
    (Spot.a_whole_interval_is_billed, "full_interval_lost simulation"),
    (Spot.restarts_are_free, "restart_missing"),
    (Spot.even_with_a_whole_interval, "full_interval_lost"),
    (Spot.even_of_the_job, "for_job"),
    (Spot.even_at_zero, "not_positive"),
    (Spot.even_in_minutes, "wrong_number")]
RIGHT = [spot_costs, RightSpot.exact, RightSpot.dollars_to_first_order,
                       RightSpot.by_logarithm, RightSpot.by_secants]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_spot_costs(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_spot_costs(answer)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_spot_costs, "6.14")
