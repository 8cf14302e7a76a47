"""What the check of exercise 4.3 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
from answers import assert_waits
from fsdp_answers import accepted, cases, rejected, right

import labs.fsdp as lab
from labs.fsdp import choose as lost_time
from labs.fsdp import cost as costs
from labs.fsdp.choose import MISTAKES, Machine

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["fsdp_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")
cost, choose = right.cost, right.choose
# 4.3 choose


def lost(units, gather, compute, price):
    root, *others = units
    waits = gather(root) + sum(map(gather, others[:1]))
    pairs = zip(others, others[1:], strict=False)
    return waits + sum(max(0, gather(b) - compute(a)) for a, b in pairs) + price * len(units)


def least(seconds):
    """Returns the answer that takes what fits and has the least seconds(units, *machine)."""
    def answer(wrappings, free, *machine):
        fits = [name for name, units in wrappings.items() if cost(units)[1] <= free]
        return min(fits, key=lambda name: seconds(wrappings[name], *machine), default=None)
    return answer


def neighbours(units):
    return list(zip(units[1:], units[2:], strict=False))


class Choose:
    def always_blocks(wrappings, free, *machine):
        return "each block"

    def first_that_fits(wrappings, free, *machine):
        return next((name for name, u in wrappings.items() if cost(u)[1] <= free), None)

    def whatever_fits_or_not(wrappings, free, *machine):
        return min(wrappings, key=lambda name: lost(wrappings[name], *machine))

    def strictly_less(wrappings, free, *machine):
        return choose(wrappings, free - 1, *machine)

    def all_at_once(wrappings, free, *machine):
        fits = {name: units for name, units in wrappings.items() if 4 * sum(units) <= free}
        return choose(fits, free, *machine)

    def the_units(wrappings, free, *machine):
        name = choose(wrappings, free, *machine)
        return name and wrappings[name]

    def the_index(wrappings, free, *machine):
        name = choose(wrappings, free, *machine)
        return name and list(wrappings).index(name)

    def an_empty_text(wrappings, free, *machine):
        return choose(wrappings, free, *machine) or ""

    fewest_collectives = least(lambda units, *_: cost(units)[0])
    most_collectives = least(lambda units, *_: -cost(units)[0])
    least_memory = least(lambda units, *_: cost(units)[1])
    fewest_but_not_one = least(lambda units, *_: (len(units) == 1, len(units)))
    no_overlap = least(lambda units, gather, compute, price:
                       sum(map(gather, units)) + price * len(units))
    only_the_price = least(lambda units, gather, compute, price: price * len(units))
    without_the_price = least(lambda units, gather, compute, price:
                              lost(units, gather, compute, 0))
    without_the_root = least(lambda units, gather, compute, price: lost(
        units, gather, compute, price) - gather(units[0]))
    first_unit_hidden = least(lambda units, gather, compute, price: lost(
        units, gather, compute, price) - sum(map(gather, units[1:2])))
    own_computing = least(lambda units, gather, compute, price: gather(units[0]) + sum(
        map(gather, units[1:2])) + price * len(units) + sum(
        max(0, gather(b) - compute(b)) for a, b in neighbours(units)))
    time_saved = least(lambda units, gather, compute, price: gather(units[0]) + sum(
        map(gather, units[1:2])) + price * len(units) + sum(
        gather(b) - compute(a) for a, b in neighbours(units)))
    behind_the_next = least(lambda units, gather, compute, price: gather(units[0]) + sum(
        map(gather, units[1:2])) + price * len(units) + sum(
        max(0, gather(a) - compute(b)) for a, b in neighbours(units)))
    bytes_gathered = least(lambda units, gather, compute, price: lost(
        units, lambda n: gather(4 * n), compute, price))
    price_of_all_collectives = least(lambda units, gather, compute, price: lost(
        units, gather, compute, 0) + price * cost(units)[0])
    root_hides = least(lambda units, gather, compute, price: lost(
        units, gather, compute, price) - sum(
        min(gather(b), compute(units[0])) for b in units[1:2]))
    without_the_pairs = least(lambda units, gather, compute, price: sum(
        map(gather, units[:2])) + price * len(units))
    in_all = least(lambda units, gather, compute, price: gather(units[0]) + price * len(units)
                   + max(0, sum(map(gather, units[1:])) - sum(map(compute, units[1:]))))


WRONG = [
    (Choose.always_blocks, "slower_choice"),
    (Choose.least_memory, "slower_choice gathered"),
    (Choose.fewest_collectives, "slower_choice fewest"),
    (Choose.fewest_but_not_one, "slower_choice better"),
    (Choose.most_collectives, "slower_choice most"),
    (Choose.whatever_fits_or_not, "nothing_fits"),
    (Choose.strictly_less, "exact_fit_refused"),
    (Choose.first_that_fits, "slower_choice"),
    (Choose.all_at_once, "slower_choice"),
    (Choose.the_units, "wrong_type list"),
    (Choose.the_index, "wrong_type"),
    (Choose.an_empty_text, "wrong_type"),
    (Choose.no_overlap, "slower_choice full"),
    (Choose.only_the_price, "slower_choice prices"),
    (Choose.without_the_price, "slower_choice"),
    (Choose.price_of_all_collectives, "slower_choice has"),
    (Choose.without_the_root, "slower_choice"),
    (Choose.first_unit_hidden, "slower_choice"),
    (Choose.root_hides, "slower_choice"),
    (Choose.without_the_pairs, "slower_choice"),
    (Choose.own_computing, "slower_choice own"),
    (Choose.behind_the_next, "slower_choice next"),
    (Choose.bytes_gathered, "slower_choice give"),
    (Choose.in_all, "slower_choice"),
    (Choose.time_saved, "slower_choice never")]


class ChooseRight:
    by_lost = least(lost)

    def sorted_first(wrappings, free, gather, compute, price):
        for name in sorted(wrappings, key=lambda n: lost(wrappings[n], gather, compute, price)):
            if cost(wrappings[name])[1] <= free:
                return name


RIGHT = [choose, ChooseRight.by_lost, ChooseRight.sorted_first]


def nothing_fits(wrappings, free, *machine):
    fits = [name for name, units in wrappings.items() if cost(units)[1] <= free]
    return min(fits, key=lambda name: lost(wrappings[name], *machine))


@pytest.mark.parametrize("answer, hint", [
    (nothing_fits, "the answer is None")])
def test_an_error_of_pythons_gets_a_hint(answer, hint, capsys):
    verdict = lab.check_choose(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict


def test_every_wrapping_but_the_two_traps_is_the_answer_of_some_case():
    best = {choose(lost_time.WRAPPINGS, free, one.gather, one.compute, one.price)
            for one in lost_time.MACHINES for free in lost_time.FREE}
    assert best == {*lost_time.WRAPPINGS, None} - {"one large unit", "uneven", "tiny units"}


def test_the_cases_of_4_2_and_4_3_tell_all_known_mistakes_apart():
    """Each mistake's own answers lead to its own message, and to no other's."""
    for mistakes in (costs._COLLECTIVES, costs._GATHERED):
        answers = [tuple(map(mistake.number, costs.UNITS)) for mistake in mistakes]
        assert len(set(answers)) == len(answers)
    for words, seconds in MISTAKES.items():
        verdict = lab.check_choose(lambda wrappings, free, *machine, seconds=seconds: next(
            iter(lost_time.chosen(seconds, Machine("", *_parts(*machine)), free, wrappings))))
        assert verdict.hint == words, verdict


def _parts(gather, compute, price):
    """Latency, link and computing of a Machine, from its functions."""
    return gather(0), gather(1) - gather(0), compute(1), price


def test_a_choice_without_a_known_mistake_is_shown_with_the_terms_of_both_sums(capsys):
    verdict = str(lab.check_choose(Choose.in_all))
    assert verdict.count("gather(") > 3 and verdict.count(" ms\n") == 3, verdict


@pytest.mark.parametrize("check, answer, words", cases(lab.check_choose, WRONG))
def test_a_wrong_answer_is_rejected_and_told_why(check, answer, words, capsys):
    rejected(check, answer, words)


@pytest.mark.parametrize("check, answer", cases(lab.check_choose, RIGHT))
def test_another_right_answer_is_accepted(check, answer, capsys):
    accepted(check, answer)


def test_an_unfilled_exercise_waits(capsys):
    assert_waits(lab.check_choose, "4.3")
