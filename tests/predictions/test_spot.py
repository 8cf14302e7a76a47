"""Interruptions simulated event by event, against the closed form."""

import pytest

from labs.predictions.cost.spot import (
    billed_hours,
    break_even_rate,
    expected_hours,
    first_order_rates,
)


@pytest.mark.parametrize("rate, interval, restart", [
    (0.02, 0.5, 0.1), (0.2, 1.0, 0.0), (0.3, 2.0, 0.5), (1.0, 0.5, 0.25), (0.5, 0.25, 1.0)])
def test_the_simulations_mean_is_the_closed_form(rate, interval, restart):
    hours = 4000 / rate
    expected = expected_hours(hours, rate, interval, restart)
    assert billed_hours(hours, rate, interval, restart, seed=6) == pytest.approx(expected, rel=0.03)


def test_without_interruptions_only_training_is_billed():
    assert billed_hours(7.3, 0, 0.5, 1) == pytest.approx(7.3) == expected_hours(7.3, 0, 0.5, 1)


def test_few_interruptions_lose_half_an_interval_and_a_restart():
    rate, interval, restart = 1e-4, 0.5, 0.2
    lost = (expected_hours(1, rate, interval, restart) - 1) / rate
    assert lost == pytest.approx(interval / 2 + restart, rel=1e-3)


@pytest.mark.parametrize("ratio", [1.01, 1.3, 1.67, 3.0])
@pytest.mark.parametrize("interval, restart", [(0.5, 0.1), (3.0, 0.5), (0.1, 2.0)])
def test_at_break_even_hours_are_the_ratio(ratio, interval, restart):
    rate = break_even_rate(ratio, interval, restart)
    assert expected_hours(1, rate, interval, restart) == pytest.approx(ratio)


def test_spot_that_saves_nothing_never_pays():
    assert break_even_rate(1.0, 0.5, 0.1) == break_even_rate(0.9, 0.5, 0.1) == 0


@pytest.mark.parametrize("interval, restart", [(0.5, 0.1), (3.0, 0.5)])
def test_first_order_rates_are_right_where_little_is_lost_and_on_both_sides_elsewhere(
        interval, restart):
    for rate in first_order_rates(1.001, interval, restart).values():
        assert rate == pytest.approx(break_even_rate(1.001, interval, restart), rel=2e-3)
    above, below = first_order_rates(2.3, interval, restart).values()
    assert below < break_even_rate(2.3, interval, restart) < above
