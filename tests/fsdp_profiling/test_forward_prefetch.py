"""What the check of exercise 5.7 must reject, and what it must accept."""

import sys
from itertools import islice

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


class Ahead:
    def nothing(blocks, ahead):
        pass

    def in_backward(blocks, ahead):
        for block, following in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_backward_prefetch([following])

    def the_one_before(blocks, ahead):
        for block, before in zip(blocks[1:], blocks, strict=False):
            block.set_modules_to_forward_prefetch([before])

    def itself(blocks, ahead):
        for block in blocks:
            block.set_modules_to_forward_prefetch([block])

    def only_the_first(blocks, ahead):
        blocks[0].set_modules_to_forward_prefetch(blocks[1:1 + ahead])

    def one_only(blocks, ahead):
        for block, following in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([following])

    def the_one_at_that_distance(blocks, ahead):
        for block, following in zip(blocks, blocks[ahead:], strict=False):
            block.set_modules_to_forward_prefetch([following])

    def all_that_follow(blocks, ahead):
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1:])

    def two_always(blocks, ahead):
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1:number + 3])

    def one_too_many(blocks, ahead):
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number + 1:number + 2 + ahead])

    def all_of_them(blocks, ahead):
        for block in blocks:
            block.set_modules_to_forward_prefetch(blocks)

    def round_the_end(blocks, ahead):
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(
                [blocks[(number + k) % len(blocks)] for k in range(1, ahead + 1)])

    def three_blocks(blocks, ahead):
        for number, block in enumerate(blocks[:3]):
            block.set_modules_to_forward_prefetch(blocks[number + 1:number + 1 + ahead])

    def backward_off_too(blocks, ahead):
        right.forward_prefetch(blocks, ahead)
        right.no_prefetch(blocks)

    def backward_further_too(blocks, ahead):
        right.forward_prefetch(blocks, ahead)
        for number, block in enumerate(blocks):
            before = blocks[max(0, number - 2):number][::-1]
            block.set_modules_to_backward_prefetch(before or [block])


WRONG = [
    (lambda blocks: None, "wrong_signature blocks"),
    (Ahead.nothing, "not_prefetched"), (Ahead.in_backward, "gathered_again"),
    (Ahead.the_one_before, "gathered_again"),
    (Ahead.itself, "not_prefetched"), (Ahead.only_the_first, "not_prefetched"),
    (Ahead.one_only, "not_prefetched"),
    (Ahead.the_one_at_that_distance, "not_prefetched"),
    (Ahead.all_that_follow, "too_far_ahead"),
    (Ahead.two_always, "too_far_ahead"),
    (Ahead.one_too_many, "too_far_ahead"),
    (Ahead.all_of_them, "gathered_again"),
    (Ahead.round_the_end, "gathered_again"),
    (Ahead.three_blocks, "not_prefetched"),
    (Ahead.backward_off_too, "backward_changed late"),
    (Ahead.backward_further_too, "backward_changed gathered")]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_forward_prefetch(answer), expected)


class Right:
    """The same, written otherwise."""

    def ahead_by_islice(blocks, ahead):
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(list(islice(blocks, number + 1,
                                                              number + 1 + ahead)))

    def ahead_but_for_the_last(blocks, ahead):
        for number in range(len(blocks) - 1):
            blocks[number].set_modules_to_forward_prefetch(
                tuple(blocks[number + 1:number + 1 + ahead]))

    def ahead_with_itself(blocks, ahead):  # to fetch what is there does nothing
        for number, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[number:number + 1 + ahead])


@pytest.mark.parametrize("answer", [
    right.forward_prefetch,
    Right.ahead_by_islice,
    Right.ahead_but_for_the_last,
    Right.ahead_with_itself])
def test_right(answer):
    verdict = lab.check_forward_prefetch(answer)
    assert verdict.passed is True, verdict
