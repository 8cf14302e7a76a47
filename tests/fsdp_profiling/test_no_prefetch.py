"""What the check of exercise 5.6 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
from _build.definitions import definitions
from answers import assert_rejected

import labs.fsdp_profiling as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
# slow: each answer is tried on recordings of real ranks
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
right = definitions("05_fsdp_profiling")
KINDS = ("all_gather", "reduce_scatter")
def own(stack):
    return [frame for frame in stack if not any(word in frame for word in lab.LIBRARIES)]




def order_of(trace):
    return lab.gradients_done(trace)


def asked(trace, moment="issued", phase="backward"):
    return {unit: getattr(one, moment) for one in trace.of("all_gather")
            for unit, when in [right.attribute(trace, one)] if when == phase}


# 5.6 no_prefetch, 5.7 forward_prefetch


class Off:
    def nothing(blocks):
        pass

    def an_empty_list(blocks):
        for block in blocks:
            block.set_modules_to_backward_prefetch([])

    def forwards(blocks):
        for block in blocks:
            block.set_modules_to_forward_prefetch([block])

    def only_the_last(blocks):
        blocks[-1].set_modules_to_backward_prefetch([blocks[-1]])

    def the_one_before(blocks):
        for block, before in zip(blocks[1:], blocks, strict=False):
            block.set_modules_to_backward_prefetch([before])

    def all_of_them(blocks):
        for block in blocks:
            block.set_modules_to_backward_prefetch(blocks)


class Counted:
    """Right for one number of blocks only."""

    def three(blocks):
        for block in blocks[:3]:
            block.set_modules_to_backward_prefetch([block])

    def but_the_last_two(blocks):
        for block in blocks[:-2]:
            block.set_modules_to_backward_prefetch([block])


class Again:
    """Late, but what backward is done with is gathered once more, for nothing."""

    def the_last(blocks):
        for block in blocks:
            block.set_modules_to_backward_prefetch([blocks[-1]])

    def the_following(blocks):
        for block, following in zip(blocks, [*blocks[1:], blocks[-1]], strict=True):
            block.set_modules_to_backward_prefetch([following])


def and_forward(blocks):
    right.no_prefetch(blocks)
    for block, following in zip(blocks, blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])


def not_a_list(blocks):
    for block in blocks:
        block.set_modules_to_backward_prefetch(block)


def names_of_units(blocks):
    for number, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch([f"transformer.h.{number}"])


WRONG = [
    *((answer, sentence) for answers, sentence in (
        (Off, "still_prefetched"), (Counted, "still_prefetched"),
        (Again, "gathered_again"))
      for name, answer in vars(answers).items() if not name.startswith("_")),
    (and_forward, "forward_changed"),
    (not_a_list, "raised_TypeError"), (names_of_units, "raised_ValueError")]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_no_prefetch(answer), expected)


class Right:
    """The same, written otherwise."""

    def off_but_for_the_first(blocks):
        for block in blocks[1:]:  # nobody is left whom the first could fetch
            block.set_modules_to_backward_prefetch([block, block])


@pytest.mark.parametrize("answer", [
    right.no_prefetch,
    Right.off_but_for_the_first])
def test_right(answer):
    verdict = lab.check_no_prefetch(answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("answer, hint", [
    (not_a_list, "takes a list"),
    (names_of_units, "the units themselves")])
def test_the_hint_leads_on(answer, hint):
    verdict = lab.check_no_prefetch(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict
