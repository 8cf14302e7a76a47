"""What the check of exercise 5.6 must reject, and what it must accept."""

import sys
from itertools import islice

import cloudpickle
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.fsdp_profiling as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
# slow: each answer is tried on recordings of real ranks
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
right = definitions("05_fsdp_profiling")


def off(answer):
    """Right, except that answer(blocks) turns the prefetch of backward off."""
    def set_prefetch(blocks, forward, backward):
        right.set_prefetch(blocks, forward, backward) if backward else answer(blocks)

    return set_prefetch


def ahead(answer):
    """Right, except that answer(blocks, ahead) sets forward's prefetch where backward's is the
    default."""
    def set_prefetch(blocks, forward, backward):
        if backward == 1:
            answer(blocks, forward)
        else:
            right.set_prefetch(blocks, forward, backward)

    return set_prefetch


def further(answer):
    """Right, except that answer(blocks, backward) sets backward's prefetch of several units."""
    def set_prefetch(blocks, forward, backward):
        right.set_prefetch(blocks, forward, backward)
        if backward > 1:
            answer(blocks, backward)

    return set_prefetch


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
    right.set_prefetch(blocks, 0, 0)
    for block, following in zip(blocks, blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])


def not_a_list(blocks):
    for block in blocks:
        block.set_modules_to_backward_prefetch(block)


def names_of_units(blocks):
    for number, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch([f"transformer.h.{number}"])


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
        right.set_prefetch(blocks, ahead, 0)

    def backward_further_too(blocks, ahead):
        right.set_prefetch(blocks, ahead, 1)
        for number, block in enumerate(blocks):
            before = blocks[max(0, number - 2):number][::-1]
            block.set_modules_to_backward_prefetch(before or [block])


class Further:
    """Backward's prefetch of several units."""

    def nothing(blocks, backward):
        for block in blocks:
            block.set_modules_to_backward_prefetch([])

    def one_only(blocks, backward):
        for before, block in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_backward_prefetch([before])

    def the_one_at_that_distance(blocks, backward):
        for number, block in enumerate(blocks[backward:]):
            block.set_modules_to_backward_prefetch([blocks[number]])

    def in_forward_order(blocks, backward):
        for number, block in enumerate(blocks):
            block.set_modules_to_backward_prefetch(blocks[max(0, number - backward):number])

    def one_too_many(blocks, backward):
        for number, block in enumerate(blocks):
            before = blocks[max(0, number - backward - 1):number][::-1]
            block.set_modules_to_backward_prefetch(before)

    def all_before(blocks, backward):
        for number, block in enumerate(blocks):
            block.set_modules_to_backward_prefetch(blocks[:number][::-1])

    def the_following(blocks, backward):
        for number, block in enumerate(blocks):
            block.set_modules_to_backward_prefetch(blocks[number + 1:number + 1 + backward])

    def in_forward_too(blocks, backward):
        right.set_prefetch(blocks, backward, backward)

    def round_the_begin(blocks, backward):
        for number, block in enumerate(blocks):
            block.set_modules_to_backward_prefetch(
                [blocks[number - k] for k in range(1, backward + 1)])


WRONG = [
    (lambda blocks: None, "wrong_signature blocks"),
    (lambda blocks, forward=0, backward=1: None, "still_prefetched"),
    *((off(answer), sentence) for answers, sentence in (
        (Off, "still_prefetched"), (Counted, "still_prefetched"),
        (Again, "gathered_again"))
      for name, answer in vars(answers).items() if not name.startswith("_")),
    (off(and_forward), "forward_changed"),
    (off(not_a_list), "raised_TypeError"), (off(names_of_units), "raised_ValueError"),
    (ahead(Ahead.nothing), "not_prefetched"), (ahead(Ahead.in_backward), "gathered_again"),
    (ahead(Ahead.the_one_before), "gathered_again"),
    (ahead(Ahead.itself), "not_prefetched"), (ahead(Ahead.only_the_first), "not_prefetched"),
    (ahead(Ahead.one_only), "not_prefetched"),
    (ahead(Ahead.the_one_at_that_distance), "not_prefetched"),
    (ahead(Ahead.all_that_follow), "too_far_ahead"),
    (ahead(Ahead.two_always), "too_far_ahead"),
    (ahead(Ahead.one_too_many), "too_far_ahead"),
    (ahead(Ahead.all_of_them), "gathered_again"),
    (ahead(Ahead.round_the_end), "gathered_again"),
    (ahead(Ahead.three_blocks), "not_prefetched"),
    (ahead(Ahead.backward_off_too), "backward_changed late"),
    (ahead(Ahead.backward_further_too), "backward_changed gathered"),
    (further(Further.nothing), "not_prefetched"), (further(Further.one_only), "not_prefetched"),
    (further(Further.the_one_at_that_distance), "not_prefetched|wrong_order"),
    (further(Further.in_forward_order), "wrong_order"),
    (further(Further.one_too_many), "too_far_ahead"),
    (further(Further.all_before), "too_far_ahead"),
    (further(Further.the_following), "gathered_again"),
    (further(Further.in_forward_too), "forward_changed"),
    (further(Further.round_the_begin), "gathered_again")]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_set_prefetch(answer), expected)


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

    def off_but_for_the_first(blocks):
        for block in blocks[1:]:  # nobody is left whom the first could fetch
            block.set_modules_to_backward_prefetch([block, block])

    def further_by_a_loop(blocks, backward):
        for number in range(len(blocks)):
            before = []
            for distance in range(1, backward + 1):
                if number - distance >= 0:
                    before.append(blocks[number - distance])
            blocks[number].set_modules_to_backward_prefetch(before)

    def further_with_itself(blocks, backward):  # to fetch what is there does nothing
        for number, block in enumerate(blocks):
            before = blocks[max(0, number - backward):number + 1]
            block.set_modules_to_backward_prefetch(tuple(before[::-1]))


@pytest.mark.parametrize("answer", [
    right.set_prefetch, ahead(Right.ahead_by_islice), ahead(Right.ahead_but_for_the_last),
    ahead(Right.ahead_with_itself), off(Right.off_but_for_the_first),
    further(Right.further_by_a_loop), further(Right.further_with_itself)])
def test_right(answer):
    verdict = lab.check_set_prefetch(answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("answer, hint", [
    (off(not_a_list), "takes a list"),
    (off(names_of_units), "the units themselves")])
def test_the_hint_leads_on(answer, hint):
    verdict = lab.check_set_prefetch(answer)
    assert verdict.passed is False and hint in verdict.hint, verdict


def test_waits():
    assert_waits(lab.check_set_prefetch, "5.6")
