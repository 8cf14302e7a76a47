"""Exercises 6.12 to 6.14: what their checks must reject, with the words that must say why; and what
they must accept."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits, by_check

import labs.scaling as lab
from labs.predictions.spot import break_even_rate, expected_hours

right = definitions("06_scaling")
costs, judge_claim, spot_costs = right.costs, right.judge_claim, right.spot_costs


def cheaper(factor):
    """Tokens per dollar that are so many times the right ones."""
    def answer(tokens_per_s, machine):
        per_dollar, per_billion = costs(tokens_per_s, machine)
        return per_dollar * factor(machine), per_billion / factor(machine)
    return answer


def second(factor):
    """Right tokens per dollar, and dollars so many times the right ones."""
    def answer(tokens_per_s, machine):
        per_dollar, per_billion = costs(tokens_per_s, machine)
        return per_dollar, per_billion * factor
    return answer


class Costs:
    def nothing(tokens_per_s, machine):
        return None

    def table(tokens_per_s, machine):
        return {"Lambda 8x A100-80": (161.3 * tokens_per_s, 1)}.get(machine.name, (1e8, 10))

    def one_number(tokens_per_s, machine):
        return costs(tokens_per_s, machine)[0]

    def exchanged(tokens_per_s, machine):
        return costs(tokens_per_s, machine)[::-1]

    def per_token(tokens_per_s, machine):
        return 1 / costs(tokens_per_s, machine)[0], costs(tokens_per_s, machine)[1]

    def both_tokens(tokens_per_s, machine):
        return costs(tokens_per_s, machine)[0], costs(tokens_per_s, machine)[0]

    def multiplied(tokens_per_s, machine):
        return costs(tokens_per_s, machine)[0], 1e9 * costs(tokens_per_s, machine)[0]

    def whole_dollars(tokens_per_s, machine):
        return costs(tokens_per_s, machine)[0], float(int(costs(tokens_per_s, machine)[1]))

    def spot(tokens_per_s, machine):
        return costs(tokens_per_s, replace(machine, dollars=machine.spot or machine.dollars))


class RightCosts:
    def by_seconds(tokens_per_s, machine):
        dollars_per_s = machine.gpus * machine.dollars / 60 / 60
        return [tokens_per_s / dollars_per_s, dollars_per_s / tokens_per_s * 10**9]

    def as_array(tokens_per_s, machine):
        return np.array(costs(tokens_per_s, machine))

    def whole_tokens(tokens_per_s, machine):
        return int(costs(tokens_per_s, machine)[0]), costs(tokens_per_s, machine)[1]

    def dollars_of_whole_tokens(tokens_per_s, machine):
        per_dollar = round(costs(tokens_per_s, machine)[0])
        return per_dollar, 1e9 / per_dollar


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
        """Each lost hour is billed anew with what it loses itself: hours · e^(rate·lost)."""
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


WRONG = {
    lab.check_costs: [
        (Costs.nothing, "wrong_count"),
        (Costs.table, "wrong_number 100"),
        (Costs.one_number, "wrong_count float"),
        (Costs.exchanged, "two_exchanged"),
        (Costs.per_token, "dollars_per_token"),
        (Costs.both_tokens, "two_exchanged billion"),
        (Costs.spot, "spot_price"),
        (cheaper(lambda machine: machine.gpus), "price_one_gpu_buys_tokens"),
        (cheaper(lambda machine: 1 / machine.gpus), "gpus_counted_twice"),
        (cheaper(lambda machine: 1 / 3600), "dollars_per_hour"),
        (cheaper(lambda machine: 1 / 60), "minutes_for_hours"),
        (cheaper(lambda machine: machine.gpus / 3600), "neither_gpus_nor_hour_seconds"),
        (cheaper(lambda machine: 24), "price_hour_for_day"),
        (second(1e-3), "for_million_tokens"),
        (Costs.multiplied, "multiplies_tokens_per_dollar"),
        (second(1e3), "for_thousand_billion_tokens"),
        (Costs.whole_dollars, "wrong_number billion"),
        (second(2**30 / 1e9), "billion_taken_2_30")],
    lab.check_claim: [
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
        (claim_times(dollars=lambda case: case[1].gpus), "gpus_paid_twice")],
    lab.check_spot_costs: [
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
        (Spot.even_in_minutes, "wrong_number")]}

RIGHT = {
    lab.check_costs: [costs, RightCosts.by_seconds, RightCosts.as_array,
                      RightCosts.whole_tokens, RightCosts.dollars_of_whole_tokens],
    lab.check_claim: [judge_claim, RightClaim.by_logarithms, RightClaim.as_tensor],
    lab.check_spot_costs: [spot_costs, RightSpot.exact, RightSpot.dollars_to_first_order,
                           RightSpot.by_logarithm, RightSpot.by_secants]}


@pytest.mark.parametrize("check, answer, words", by_check(WRONG))
def test_a_wrong_answer_is_rejected_in_words(check, answer, words):
    assert_rejected(check(answer), words)


@pytest.mark.parametrize("check, answer", by_check(RIGHT))
def test_a_right_answer_is_accepted(check, answer):
    verdict = check(answer)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("check", WRONG)
def test_an_unfilled_exercise_waits(check):
    assert_waits(check, "6.12")
