"""What the check of exercise 6.12 must reject, and what it must accept."""

from dataclasses import replace

import numpy as np
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.scaling as lab

costs = definitions("06_scaling").costs


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


WRONG = [
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
    (second(2**30 / 1e9), "billion_taken_2_30")]
RIGHT = [costs, RightCosts.by_seconds, RightCosts.as_array,
                  RightCosts.whole_tokens, RightCosts.dollars_of_whole_tokens]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_costs(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_costs(answer)
    assert verdict.passed is True, str(verdict)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_costs, "6.12")
