"""What the check of exercise 6.13 must reject, and what it must accept."""

from dataclasses import replace

import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.scaling as lab

right = definitions("06_scaling")
costs, judge_claim, spot_costs = right.costs, right.judge_claim, right.spot_costs


def claim_times(factor=lambda case: 1, days=lambda case: 1, dollars=lambda case: 1):
    """The right numbers times these, of a case (claim, machine, peak, mfu)."""
    def answer(*case):
        return tuple(number * change(case) for number, change in
                     zip(judge_claim(*case), (factor, days, dollars), strict=True))
    return answer


def scaled(power):
    """A scale's name that is read as 1000^power of what it is."""
    return claim_times(factor=lambda case: 1000**-power)


class Claim:
    def nothing(claim, machine, peak, mfu):
        return None

    def a_thousand(claim, machine, peak, mfu):
        return 1000, *judge_claim(claim, machine, peak, mfu)[1:]

    def flops_themselves(claim, machine, peak, mfu):
        return 6 * claim.parameters * claim.tokens, *judge_claim(claim, machine, peak, mfu)[1:]

    def upside_down(claim, machine, peak, mfu):
        factor, *rest = judge_claim(claim, machine, peak, mfu)
        return 1 / factor, *rest

    def long_scale(claim, machine, peak, mfu):
        printed = claim.number * 10 ** (6 * lab.SCALES.index(claim.scale))
        return 6 * claim.parameters * claim.tokens / printed, *judge_claim(
            claim, machine, peak, mfu)[1:]

    def no_scale(claim, machine, peak, mfu):
        return 6 * claim.parameters * claim.tokens / claim.number, *judge_claim(
            claim, machine, peak, mfu)[1:]

    def as_printed(claim, machine, peak, mfu):
        factor, days, dollars = judge_claim(claim, machine, peak, mfu)
        return factor, days / factor, dollars / factor

    def at_the_spot_price(claim, machine, peak, mfu):
        return judge_claim(claim, replace(machine, dollars=machine.spot or machine.dollars), peak,
                           mfu)

    def forward_alone(claim, machine, peak, mfu):
        return tuple(number / 3 for number in judge_claim(claim, machine, peak, mfu))


class RightClaim:
    def by_logarithms(claim, machine, peak, mfu):
        names = dict(zip(lab.SCALES, range(3, 27, 3), strict=True))
        flops = 6.0 * claim.parameters * claim.tokens
        seconds = flops / mfu / peak / machine.gpus
        return (flops / claim.number / 10.0 ** names[claim.scale], seconds / 86400,
                seconds / 3600 * machine.dollars * machine.gpus)

    def as_tensor(*case):
        return torch.tensor(judge_claim(*case), dtype=torch.float64)


WRONG = [
    (Claim.nothing, "wrong_count"),
    (Claim.a_thousand, "right_for_first_sentence"),
    (Claim.flops_themselves, "right_number_flops"),
    (Claim.upside_down, "printed_number_over_right_one"),
    (scaled(1), "scale_off_by_one high"),
    (scaled(-1), "scale_off_by_one low"),
    (Claim.long_scale, "names_read_in_long_scale"),
    (Claim.no_scale, "scale_name_left_out"),
    (Claim.at_the_spot_price, "spot_price"),
    (Claim.forward_alone, "forward_alone"),
    (claim_times(factor=lambda case: 1 / 6), "one_flop_each"),
    (Claim.as_printed, "for_printed_flops"),
    (claim_times(days=lambda case: 24), "in_hours"),
    (claim_times(days=lambda case: 86400), "in_seconds"),
    (claim_times(days=lambda case: case[1].gpus), "on_one_gpu"),
    (claim_times(days=lambda case: case[3]), "peak"),
    (claim_times(days=lambda case: 100), "mfu_taken_percentage"),
    (claim_times(days=lambda case: case[3]**2), "mfu_makes_faster"),
    (claim_times(dollars=lambda case: 1 / 24), "day_paid_hour"),
    (claim_times(dollars=lambda case: 1 / case[1].gpus), "one_gpu_paid"),
    (claim_times(dollars=lambda case: case[1].gpus), "gpus_paid_twice")]
RIGHT = [judge_claim, RightClaim.by_logarithms, RightClaim.as_tensor]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_claim(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_claim(answer)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_claim, "6.13")
