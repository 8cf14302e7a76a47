"""Part 6 of notebook 06: what is drawn of costs; the numbers are said in the notebook."""

import math
from dataclasses import replace

import pytest

import labs.scaling as lab
from labs.checks import guesses
from labs.predictions.cost.prices import MACHINES
from labs.predictions.cost.spot import expected_hours, first_order_rates
from labs.scaling import scaffold
from labs.scaling import spot_costs as spot_check
from labs.scaling.costs import Case
from labs.scaling.spot_costs import Case as SpotCase

OWN = replace(lab.reported_run("mosaic-096"), name="GPT-2 on one core of this machine", gpus=1,
              sheet_tflops=0.054, tokens_per_s=1.0)


def costs(tokens_per_s, machine):
    case = Case(tokens_per_s, machine)
    return case.per_dollar, case.per_billion


def spot_costs(*case):
    found = SpotCase(*case)
    return found.dollars_at(found.rate), found.even


def test_the_cheapest_and_the_dearest_machine():
    picture = lab.show_costs(costs, OWN, 0.05)
    dollars = {one.name: one.dollars for one in picture.data}
    assert dollars["Lambda 8x A100-80"] == pytest.approx(35.05, abs=0.01)
    assert list(dollars)[0] == "RunPod Community H100" and len(dollars) == 11
    assert "left out: A10, H200" in repr(picture)


def test_sellers_differ_more_than_gpus():
    """Said in the notebook."""
    dollars = {one.name: one.dollars for one in lab.show_costs(costs, OWN, 0.05).data[:-1]}
    assert max(dollars.values()) / min(dollars.values()) == pytest.approx(2.8, abs=0.05)
    pairs = [("Lambda 8x A100-80", "Lambda 8x H100"), ("AWS p4de.24xlarge", "AWS p5.48xlarge"),
             ("RunPod Community A100-80", "RunPod Community H100"),
             ("RunPod Secure A100-80", "RunPod Secure H100")]
    assert all(1 / 1.6 < dollars[a100] / dollars[h100] < 1.6 for a100, h100 in pairs)
    h100 = [machine.dollars for machine in MACHINES.values() if machine.gpu == "H100"]
    assert (min(h100), max(h100)) == (2.69, 6.88)


def test_own_prices_and_a_guess_are_drawn():
    guesses.guess("6.12", "dollars per billion tokens", 50)
    mine = lab.price_table({"my cluster": {"gpu": "H100", "gpus": 4, "dollars": 0.5}})
    picture = lab.show_costs(costs, OWN, 0.05, mine)
    assert picture.data[0].name == "my cluster"
    assert "your guess" not in [one.name for one in picture.data] and picture.png()


def test_a_spot_price_is_drawn_beside_its_machine():
    mine = lab.price_table({"Lambda 8x H100": {"dollars": 4, "spot": 1}})
    picture = lab.show_costs(costs, OWN, 0.05, mine)
    [one] = [one for one in picture.data if one.name == "Lambda 8x H100"]
    assert one.spot / one.dollars == pytest.approx(0.25)


def test_every_price_is_shown_with_its_page_its_day_and_who_copied_it():
    table = lab.show_prices()
    assert len(table.rows) == len(MACHINES)
    assert all("/" in row[2] and row[3].startswith("2026-") and row[4].startswith("github.com/")
               for row in table.rows)
    [spot] = [row for row in table.rows if row[6] != "–"]
    assert (spot[0], *spot[5:]) == ("AWS p5en.48xlarge", "7.91", "3.40")


def test_an_evening_and_an_hour():
    evening, hour, larger = lab.show_budget(costs).rows
    assert evening[4:8] == ("1,256", "10.1", "10.32", "8.22")
    assert hour[4:8] == ("4,082", "32.8", "22.32", "5.47")
    assert larger[4:8] == ("637", "0.5", "22.32", "35.05")
    for row in (evening, hour, larger):
        needed, there = map(float, row[-1].split(" / "))
        assert needed < there


def test_spot_is_drawn_with_its_break_even():
    """Said in the notebook, also how far off the two short formulas are."""
    guesses.guess("6.14", "interruptions an hour", 3)
    picture = lab.show_spot(spot_costs)
    assert picture.data == [
        "a checkpoint every 30 minutes, restart 6 minutes: your break-even 2.26 an hour, exact "
        "2.26; by 1 + rate·lost 3.79 (+68%), by 1/(1 − rate·lost) 1.63 (−28%)",
        "every 3 hours, restart 30 minutes: your break-even 0.39 an hour, exact 0.39; by 1 + "
        "rate·lost 0.66 (+69%), by 1/(1 − rate·lost) 0.29 (−28%)"]
    verdict = lab.show_spot(spot_costs, MACHINES["Lambda 1x A10"])
    assert verdict.passed is False and "has no spot price" in str(verdict)


def test_the_first_order_rates_are_outside_the_tolerance_of_the_check():
    """And ln(on_demand / spot) / lost, the other right answer, is inside."""
    for case in spot_check._cases():
        ratio = case.on_demand / case.spot
        for rate in first_order_rates(ratio, case.interval, case.restart).values():
            assert abs(rate / case.even - 1) > 2 * spot_check.EVEN_TOLERANCE
        assert math.log(ratio) / case.lost / case.even - 1 < 0.8 * spot_check.EVEN_TOLERANCE


def test_one_interruption_a_day_costs_little():
    """Said in the notebook: with checkpoints every half hour, 1.5 %."""
    assert expected_hours(1, 1 / 24, 0.5, 0.1) == pytest.approx(1.0147, abs=2e-4)
    assert scaffold.SMALL["layers"] == 4
