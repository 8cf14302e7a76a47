"""Part 6 of notebook 06: what is drawn of costs; the numbers are said in the notebook."""

from dataclasses import replace

import pytest

import labs.scaling as lab
from labs.exercises import guesses
from labs.predictions.prices import MACHINES, hourly
from labs.predictions.spot import expected_hours
from labs.scaling import scaffold
from labs.scaling.checks.costs import Case
from labs.scaling.checks.spot_costs import Case as SpotCase

OWN = replace(lab.reported_run("mosaic-096"), name="GPT-2 on one core of this machine", gpus=1,
              sheet_tflops=0.054, tokens_per_s=1.0)


def costs(tokens_per_s, machine):
    case = Case(tokens_per_s, machine)
    return case.per_dollar, case.per_billion


def judge_claim(claim, machine, peak, mfu):
    flops = 6 * claim.parameters * claim.tokens
    hours = flops / (machine.gpus * peak * mfu) / 3600
    printed = claim.number * 1000 ** (1 + lab.SCALES.index(claim.scale))
    return flops / printed, hours / 24, hours * hourly(machine)


def spot_costs(*case):
    found = SpotCase(*case)
    return found.dollars_at(found.rate), found.even


def test_the_cheapest_and_the_dearest_machine():
    picture = lab.show_costs(costs, OWN, 0.05)
    dollars = {one.name: one.dollars for one in picture.data}
    assert dollars["Lambda 8x A100-80"] == pytest.approx(35.05, abs=0.01)
    assert list(dollars)[0] == "RunPod Community H100" and len(dollars) == 12
    gcp = picture.data[-2]
    assert gcp.spot / gcp.dollars == pytest.approx(6.57 / 10.98)
    assert "left out: A10, H200" in repr(picture)


def test_sellers_differ_more_than_gpus():
    """Said in the notebook."""
    dollars = {one.name: one.dollars for one in lab.show_costs(costs, OWN, 0.05).data[:-1]}
    assert round(max(dollars.values()) / min(dollars.values())) == 4
    pairs = [("Lambda 8x A100-80", "Lambda 8x H100"), ("AWS p4de.24xlarge", "AWS p5.48xlarge"),
             ("RunPod Community A100-80", "RunPod Community H100"),
             ("RunPod Secure A100-80", "RunPod Secure H100")]
    assert all(1 / 1.6 < dollars[a100] / dollars[h100] < 1.6 for a100, h100 in pairs)
    h100 = [machine.dollars for machine in MACHINES.values() if machine.gpu == "H100"]
    assert (min(h100), max(h100)) == (2.69, 10.98)


def test_own_prices_and_a_guess_are_drawn():
    guesses.guess("6.12", "dollars per billion tokens", 50)
    mine = lab.price_table({"my cluster": {"gpu": "H100", "gpus": 4, "dollars": 0.5}})
    picture = lab.show_costs(costs, OWN, 0.05, mine)
    assert picture.data[0].name == "my cluster"
    assert picture.png()


def test_an_evening_and_an_hour():
    evening, hour, larger = lab.show_budget(costs).rows
    assert evening[4:8] == ("1,256", "10.1", "10.32", "8.22")
    assert hour[4:8] == ("4,082", "32.8", "22.32", "5.47")
    assert larger[4:8] == ("637", "0.5", "22.32", "35.05")
    for row in (evening, hour, larger):
        needed, there = map(float, row[-1].split(" / "))
        assert needed < there


def test_the_slip_makes_a_job_of_years_one_of_a_day():
    printed, right = lab.show_claim(judge_claim).rows
    assert printed[1:] == ("8.4e+19", "0.97", "522")
    assert right[1:] == ("8.4e+22", "974", "521,635")


def test_spot_is_drawn_with_its_break_even():
    picture = lab.show_spot(spot_costs)
    assert picture.data == [
        "a checkpoint every 30 minutes, restart 6 minutes: your break-even 1.41 an hour, "
        "simulated 1.41",
        "every 3 hours, restart 30 minutes: your break-even 0.25 an hour, simulated 0.25"]
    verdict = lab.show_spot(spot_costs, MACHINES["Lambda 1x A10"])
    assert verdict.passed is False and "has no spot price" in str(verdict)


def test_one_interruption_a_day_costs_little():
    """Said in the notebook: with checkpoints every half hour, 1.5 %."""
    assert expected_hours(1, 1 / 24, 0.5, 0.1) == pytest.approx(1.0147, abs=2e-4)
    assert scaffold.SMALL["layers"] == 4
