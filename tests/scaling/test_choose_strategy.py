"""What the check of exercise 6.8 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
from _build.definitions import definitions
from answers import assert_rejected

import labs.scaling as lab
from labs.predictions.communication import strategy_choice
from labs.predictions.communication.host_links import Topology
from labs.predictions.communication.strategy_choice import STRATEGIES, Links

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("06_scaling")
# 6.8 choose_strategy


def kept(parameters, hosts, ranks, each=16):
    return {"DDP": each * parameters, "HSDP": each * parameters / ranks,
            "FSDP": each * parameters / (hosts * ranks)}


def modelled(parameters, hosts, ranks, inside, across):
    return {name: strategy_choice.step_seconds(name, parameters, Topology(hosts, ranks),
                                               Links(inside, across)) for name in STRATEGIES}


def rule(held=kept, seconds=modelled):
    """An answer: the fastest by `seconds` of those that `held` lets fit."""
    def answer(parameters, memory, hosts, ranks, inside, across):
        states = held(parameters, hosts, ranks)
        times = seconds(parameters, hosts, ranks, inside, across)
        fitting = [name for name in states if states[name] <= memory]
        return min(fitting, key=times.get) if fitting else None

    return answer


def without_a_link(parameters, memory, hosts, ranks, inside, across):
    """Right, and without an answer for a single GPU, which has no link."""
    slowest = min([across] * (hosts > 1) + [inside] * (ranks > 1))
    n, times = hosts * ranks, modelled(parameters, hosts, ranks, inside, across)
    times |= {"DDP": 4 * parameters * (n - 1) / n / slowest}
    return rule(seconds=lambda *_: times)(parameters, memory, hosts, ranks, inside, across)


def first_that_fits(parameters, memory, hosts, ranks, inside, across):
    return next((name for name, states in kept(parameters, hosts, ranks).items()
                 if states <= memory), None)


def fits_the_host(parameters, memory, hosts, ranks, inside, across):
    """The usual rule of thumb: DDP if it fits a GPU, HSDP between hosts if it fits a host."""
    if 16 * parameters <= memory:
        return "DDP"
    return "HSDP" if 16 * parameters <= ranks * memory and hosts > 1 else "FSDP"


def by_bytes_alone(parameters, hosts, ranks, inside, across):
    n = hosts * ranks
    return {"DDP": 2 * (n - 1) / n, "HSDP": 3 * (ranks - 1) / ranks + 2 * (hosts - 1) / hosts,
            "FSDP": 3 * (n - 1) / n}


def inside_is_free(parameters, hosts, ranks, inside, across):
    times = modelled(parameters, hosts, ranks, 1e30, across)
    return times if hosts > 1 else modelled(parameters, hosts, ranks, inside, across)


def always_across(parameters, hosts, ranks, inside, across):
    return modelled(parameters, hosts, ranks, across, across)


def ring_at_the_speed_across(parameters, hosts, ranks, inside, across):
    n, times = hosts * ranks, modelled(parameters, hosts, ranks, inside, across)
    return {**times, "DDP": 4 * parameters * (n - 1) / n / across,
            "FSDP": 6 * parameters * (n - 1) / n / across}


def one_card_for_each_gpu(parameters, hosts, ranks, inside, across):
    """Takes `across` as the rate of one of a host's cards."""
    return modelled(parameters, hosts, ranks, inside, ranks * across)


def a_share_of_the_card(parameters, hosts, ranks, inside, across):
    """Divides the host's link by its ranks in a ring, of which one edge passes it."""
    times = modelled(parameters, hosts, ranks, inside, across / ranks)
    return times | {"HSDP": modelled(parameters, hosts, ranks, inside, across)["HSDP"]}


def hsdp_if_it_fits(parameters, memory, hosts, ranks, inside, across):
    """DDP or HSDP by seconds, and FSDP only where neither fits: right on slow links."""
    times = modelled(parameters, hosts, ranks, inside, across)
    states = kept(parameters, hosts, ranks)
    fitting = [name for name in ("DDP", "HSDP") if states[name] <= memory]
    return min(fitting, key=times.get) if fitting else (
        "FSDP" if states["FSDP"] <= memory else None)


def slowest_of_both(parameters, hosts, ranks, inside, across):
    """A ring on one host, too, at the speed of the slower link, though it does not use it."""
    return ring_at_the_speed_across(parameters, hosts, ranks, inside, min(inside, across))


def two_passes(parameters, hosts, ranks, inside, across):
    times = modelled(parameters, hosts, ranks, inside, across)
    return {**times, "FSDP": 2 / 3 * times["FSDP"]}


WRONG = [
    (lambda *case: None, "nothing_returned DDP"),
    (lambda *case: "DDP", "does_not_fit|slower_choice"),
    (lambda *case: "HSDP", "slower_choice|does_not_fit"),
    (lambda *case: "FSDP", "slower_choice"),
    (lambda *case: "ZeRO-2", "unknown_name 'ZeRO-2'"),
    (lambda *case: 1, "unknown_name"), (lambda parameters: "DDP", "wrong_signature"),
    (first_that_fits, "slower_choice"),
    (fits_the_host, "slower_choice|does_not_fit"),
    (rule(held=lambda *case: kept(*case, each=2)), "does_not_fit"),
    (rule(held=lambda *case: kept(*case, each=12)), "does_not_fit"),
    (rule(held=lambda *case: kept(*case, each=18)), "nothing_returned|slower_choice"),
    (rule(held=lambda *case: dict.fromkeys(STRATEGIES, 0)), "does_not_fit"),
    (rule(held=lambda parameters, hosts, ranks: {
        **kept(parameters, hosts, ranks), "HSDP": 16 * parameters / hosts}),
            "does_not_fit|slower_choice"),
    (rule(seconds=by_bytes_alone), "slower_choice"),
    (rule(seconds=inside_is_free), "slower_choice"),
    (rule(seconds=always_across), "slower_choice"),
    (rule(seconds=slowest_of_both), "slower_choice nothing"),
    (rule(seconds=ring_at_the_speed_across), "slower_choice"),
    (rule(seconds=two_passes), "slower_choice"),
    (rule(seconds=one_card_for_each_gpu), "slower_choice"),
    (rule(seconds=a_share_of_the_card), "slower_choice"),
    (hsdp_if_it_fits, "slower_choice"),
    (lambda *case: {"HSDP": "DDP"}.get(right.choose_strategy(*case), right.choose_strategy(*case)),
     "slower_choice|does_not_fit"),
    (rule(seconds=lambda *case: {name: -one for name, one in modelled(*case).items()}),
     "slower_choice")]
RIGHT = [
    right.choose_strategy, rule(), without_a_link,
    lambda parameters, memory, hosts, ranks, inside, across:
        strategy_choice.fastest_that_fits(parameters, memory, Topology(hosts, ranks),
                                          Links(inside, across))]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_choose_strategy(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_choose_strategy(answer)
    assert verdict.passed, verdict
