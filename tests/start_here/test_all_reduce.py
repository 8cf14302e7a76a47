"""What the check of exercise 0.2 must reject, and what it must accept."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from answers import assert_rejected

import labs.start_here as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")


def _sum(mine):
    everyone = mine.clone()
    dist.all_reduce(everyone)
    return everyone


def _halves(mine):
    shard = mine.new_empty(len(mine) // dist.get_world_size())
    dist.reduce_scatter_single(shard, mine)
    whole = torch.empty_like(mine)
    dist.all_gather_single(whole, shard)
    return whole




def own_value(mine):
    return mine


def returns_nothing(mine):
    _sum(mine)


def returns_a_word(mine):
    return "mean"


# 0.2: all-reduce from two halves


def all_reduce_itself(mine):
    return _sum(mine)


def all_reduce_under_another_name(mine):
    return functional.all_reduce(mine, "sum", dist.group.WORLD) + 0


def gathers_and_sums(mine):
    everything = mine.new_empty(len(mine) * dist.get_world_size())
    dist.all_gather_single(everything, mine)
    return everything.view(dist.get_world_size(), -1).sum(dim=0)


def stops_half_way(mine):
    shard = mine.new_empty(len(mine) // dist.get_world_size())
    dist.reduce_scatter_single(shard, mine)
    return shard


def gathers_in_vain(mine):
    shard = mine.new_empty(len(mine) // dist.get_world_size())
    dist.reduce_scatter_single(shard, mine)
    dist.all_gather_single(torch.empty_like(mine), shard)
    return shard


def rotated(mine):
    return _halves(mine).roll(len(mine) // dist.get_world_size())


def mean_of_halves(mine):
    return _halves(mine) / dist.get_world_size()


def own_pieces_gathered(mine):
    ranks = dist.get_world_size()
    dist.reduce_scatter_single(mine.new_empty(len(mine) // ranks), mine)
    whole = torch.empty_like(mine)
    dist.all_gather_single(whole, mine.chunk(ranks)[dist.get_rank()].contiguous())
    return whole


def gathers_whole_tensors(mine):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    padded = torch.zeros_like(mine)
    dist.reduce_scatter_single(padded.chunk(ranks)[rank], mine)
    everything = mine.new_empty(len(mine) * ranks)
    dist.all_gather_single(everything, padded)
    return everything.view(ranks, -1).sum(dim=0)


def twice(mine):
    _halves(mine)
    return _halves(mine)


def only_rank_0_gathers(mine):
    shard = mine.new_empty(len(mine) // dist.get_world_size())
    dist.reduce_scatter_single(shard, mine)
    whole = torch.empty_like(mine)
    if dist.get_rank() == 0:
        dist.all_gather_single(whole, shard)
    return whole


def shard_as_in_the_picture(mine):
    shard = torch.empty_like(mine[:1])
    dist.reduce_scatter_single(shard, mine)
    whole = torch.empty_like(mine)
    dist.all_gather_single(whole, shard)
    return whole


def input_first(mine):
    shard = mine.new_empty(len(mine) // dist.get_world_size())
    dist.reduce_scatter_single(mine, shard)
    return shard


def gathers_input_first(mine):
    shard, whole = mine.new_empty(len(mine) // dist.get_world_size()), torch.empty_like(mine)
    dist.reduce_scatter_single(shard, mine)
    dist.all_gather_single(shard, whole)
    return whole


def the_pictures_functions(mine):
    shard, everything = torch.empty_like(mine[:1]), mine.new_empty(dist.get_world_size())
    dist.reduce_scatter_single(shard, mine)
    dist.all_gather_single(everything, shard)
    return everything


def gathers_what_the_other_returns(mine):
    shard, whole = mine.new_empty(len(mine) // dist.get_world_size()), torch.empty_like(mine)
    dist.all_gather_single(whole, dist.reduce_scatter_single(shard, mine))
    return whole


def shard_of_float32(mine):
    shard = torch.empty(len(mine) // dist.get_world_size())
    dist.reduce_scatter_single(shard, mine)
    whole = torch.empty(len(mine))
    dist.all_gather_single(whole, shard)
    return whole


def result_of_float32(mine):
    return _halves(mine.float()) if mine.dtype == torch.int64 else _halves(mine)


def gathers_without_waiting(mine):
    shard, whole = mine.new_empty(len(mine) // dist.get_world_size()), torch.empty_like(mine)
    dist.reduce_scatter_single(shard, mine)
    dist.all_gather_single(whole, shard, async_op=True)
    return whole


def scatters_without_waiting(mine):
    shard, whole = mine.new_empty(len(mine) // dist.get_world_size()), torch.empty_like(mine)
    dist.reduce_scatter_single(shard, mine, async_op=True)
    dist.all_gather_single(whole, shard)
    return whole


def waits_for_the_second_alone(mine):
    shard, whole = mine.new_zeros(len(mine) // dist.get_world_size()), torch.empty_like(mine)
    dist.reduce_scatter_single(shard, mine, async_op=True)
    dist.all_gather_single(whole, shard, async_op=True).wait()
    return whole


def keeps_only_the_shown_length(mine):
    return _halves(mine)[:5]


def twelve_numbers(mine):
    shard = mine.new_empty(12 // dist.get_world_size())
    dist.reduce_scatter_single(shard, mine)
    whole = mine.new_empty(12)
    dist.all_gather_single(whole, shard)
    return whole


def reversed_pieces(mine):
    return torch.cat(_halves(mine).chunk(dist.get_world_size())[::-1])


def maximum_in_two(mine):
    shard, whole = mine.new_empty(len(mine) // dist.get_world_size()), torch.empty_like(mine)
    dist.reduce_scatter_single(shard, mine, op=dist.ReduceOp.MAX)
    dist.all_gather_single(whole, shard)
    return whole


def a_barrier_between(mine):
    shard, whole = mine.new_empty(len(mine) // dist.get_world_size()), torch.empty_like(mine)
    dist.reduce_scatter_single(shard, mine)
    dist.barrier()
    dist.all_gather_single(whole, shard)
    return whole


def shards_summed_twice(mine):
    shard, whole = mine.new_empty(len(mine) // dist.get_world_size()), torch.empty_like(mine)
    dist.reduce_scatter_single(shard, mine)
    shard += mine.chunk(dist.get_world_size())[dist.get_rank()]
    dist.all_gather_single(whole, shard)
    return whole


HALVES = [
    (all_reduce_itself, "ready_made"),
    (all_reduce_under_another_name, "ready_made"),
    (gathers_and_sums, "reduce_scatter_missing"),
    (stops_half_way, "all_gather_missing"),
    (gathers_in_vain, "shard_returned"),
    (rotated, "wrong_output"),
    (mean_of_halves, "averaged"),
    (own_pieces_gathered, "wrong_output"),
    (gathers_whole_tensors, "full_tensor_gathered"),
    (twice, "extra_collective"),
    (only_rank_0_gathers, "deadlock all_gather"),
    (shard_as_in_the_picture, "wrong_output_size", "The output comes first"),
    (the_pictures_functions, "wrong_output_size", "1/2 of the input"),
    (input_first, "wrong_output_size 12.",
     "The output comes first"),
    (gathers_input_first, "wrong_output_size all_gather_single", "longer one: 2x the input"),
    (gathers_what_the_other_returns, "raised_TypeError",
     "returns None: call it on a line of its own"),
    (returns_nothing, "ready_made"),
    (lambda mine: None, "reduce_scatter_missing nothing"),
    (shard_of_float32, "wrong_dtype reduce_scatter_single", "mine.new_empty"),
    (result_of_float32, "wrong_dtype", "mine.new_empty"),
    (gathers_without_waiting, "never_waited all_gather", "wait()"),
    (scatters_without_waiting, "never_waited"),
    (waits_for_the_second_alone, "never_waited"),
    (keeps_only_the_shown_length, "wrong_shape"),
    (twelve_numbers, "wrong_output_size"),
    (reversed_pieces, "wrong_output"),
    (maximum_in_two, "wrong_output"),
    (a_barrier_between, "extra_collective barrier"),
    (shards_summed_twice, "wrong_output"),
    (lambda mine: [_halves(mine)], "wrong_type"),
]


def with_lists(mine):
    pieces = [piece.contiguous() for piece in mine.chunk(dist.get_world_size())]
    shard = torch.empty_like(pieces[0])
    dist.reduce_scatter(shard, pieces)
    dist.all_gather(pieces, shard)
    return torch.cat(pieces)


def in_place(mine):
    shard = mine.chunk(dist.get_world_size())[dist.get_rank()].clone()
    dist.reduce_scatter_single(shard, mine)
    dist.all_gather_single(mine, shard)
    return mine


def asynchronous(mine):
    shard, whole = mine.new_empty(len(mine) // dist.get_world_size()), torch.empty_like(mine)
    dist.reduce_scatter_single(shard, mine, async_op=True).wait()
    dist.all_gather_single(whole, shard, async_op=True).wait()
    return whole


def functional_halves(mine):
    group = dist.group.WORLD
    shard = functional.reduce_scatter_tensor(mine, "sum", 0, group)
    return functional.all_gather_tensor(shard, 0, group)


def by_futures(mine):
    shard, whole = mine.new_empty(len(mine) // dist.get_world_size()), torch.empty_like(mine)
    dist.reduce_scatter_single(shard, mine, async_op=True).wait()
    dist.all_gather_single(whole, shard, async_op=True).get_future().wait()
    return whole


def lists_of_pieces(mine):
    ranks = dist.get_world_size()
    shard = torch.zeros_like(mine[: len(mine) // ranks])
    dist.reduce_scatter(shard, list(mine.clone().view(ranks, -1)))
    whole = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(whole, shard)
    return torch.hstack(whole)


def into_a_part_of_the_whole(mine):
    whole = torch.empty_like(mine)
    shard = whole.chunk(dist.get_world_size())[dist.get_rank()]
    dist.reduce_scatter_single(shard, mine)
    dist.all_gather_single(whole, shard.clone())
    return whole


CHECKS = {"0.2": lab.check_all_reduce}
WRONG = {"0.2": HALVES}
RIGHT = {"0.2": [with_lists, in_place, asynchronous, functional_halves, by_futures,
                 lists_of_pieces, into_a_part_of_the_whole]}


@pytest.mark.parametrize("exercise, answer, words, hint", [
    pytest.param(exercise, answer, words, "".join(hint),
                 id=f"{exercise}-{answer.__name__}-{number}")
    for exercise, answers in WRONG.items()
    for number, (answer, words, *hint) in enumerate(answers)])
def test_rejected_with_the_reason(exercise, answer, words, hint):
    verdict = CHECKS[exercise](answer)
    assert_rejected(verdict, words)
    assert hint in verdict.hint
    print(verdict)


# pictures of answers that cannot be drawn


def returns_two_numbers(mine):
    return torch.cat([mine, mine])


def one_rank_returns_nothing(mine):
    return None if dist.get_rank() == 1 else mine


NOTHING_OF_4 = "nothing_returned"  # whichever rank is first
NOTHING = "nothing_returned"
RETURN = "Does it end with `return`?"
RANKS = "ranks_out_of_range"
NOT_DRAWN = [
    (lab.before_and_after, lambda: None, 2, NOTHING, "Return the rank's own number"),
    (lab.before_and_after, lambda: "mean", 2, "wrong_type", "the mean"),
    (lab.before_and_after, lambda: 2.5, 2, "wrong_type", "the mean"),
    (lab.before_and_after, lambda: torch.ones(1), 2, "wrong_type", "x.item()"),
    (lab.before_and_after, lambda: (torch.ones(2), torch.ones(2)), 2, "wrong_type", "item()"),
    (lab.before_and_after, lambda: (1, 2.5), 2, "wrong_number rank 1", "(r + 1)²"),
    (lab.before_and_after, lambda: (2 ** dist.get_rank(), 1), 2, "wrong_number rank 1",
     "(r + 1)²"),
    (lab.before_and_after, lambda mine: (mine, mine), 2, "raised_TypeError", ""),
    (lab.before_and_after, lambda: None, 40, RANKS, ""),
    (lab.two_steps, returns_nothing, 2, NOTHING, RETURN),
    (lab.two_steps, input_first, 2, "wrong_output_size",
     "The output comes first"),
    (lab.two_steps, returns_nothing, "2", RANKS, ""),
    (lab.who_holds_what, lambda mine: None, 4, NOTHING_OF_4, RETURN),
    (lab.who_holds_what, one_rank_returns_nothing, 4, "nothing_returned", RETURN),
    (lab.who_holds_what, lambda mine: mine.tolist(), 2, "wrong_type", ""),
    (lab.who_holds_what, input_first, 2, "wrong_output_size", "output"),
    (lab.who_holds_what, own_value, "4", RANKS, ""),
    (lab.who_holds_what, own_value, 40, RANKS, ""),
    (lab.who_holds_what, own_value, 1, RANKS, ""),
    (lab.who_holds_what, own_value, 4.0, RANKS, ""),
    (lab.ring_steps, returns_nothing, 2, NOTHING, RETURN),
    (lab.ring_steps, returns_two_numbers, 2, "wrong_shape", "return `mine`"),
    (lab.ring_steps, own_value, 9, RANKS, ""),
]


@pytest.mark.parametrize("show, answer, ranks, words, hint", NOT_DRAWN)
def test_not_drawn_with_the_reason(show, answer, ranks, words, hint):
    verdict = show(answer, ranks=ranks)
    assert_rejected(verdict, words)
    assert hint in verdict.hint
    named = {lab.who_holds_what: "✗ Who holds what  ", lab.ring_steps: "✗ Ring  "}.get(
        show, "✗ Exercise 0.")
    assert str(verdict).startswith(named)
    assert named.strip() in verdict._repr_html_()
    print(verdict)


@pytest.mark.parametrize("exercise, answer", [(exercise, answer) for exercise in RIGHT
                                              for answer in RIGHT[exercise]])
def test_right_in_another_way(exercise, answer):
    verdict = CHECKS[exercise](answer)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("exercise", CHECKS)
def test_unfilled_waits(exercise):
    def gap(*_):
        raise NotImplementedError(f"Exercise {exercise}")

    for answer in (gap, ...):
        verdict = CHECKS[exercise](answer)
        assert verdict.passed is None and "waiting" in verdict.sentence


@pytest.mark.parametrize("exercise, answer", [
    ("0.2", shard_as_in_the_picture)])
def test_prints_of_a_rank_that_fails_are_shown(exercise, answer):
    def chatty(mine):
        print("length", len(mine))
        return answer(mine)

    assert CHECKS[exercise](chatty).printed.startswith("rank 0 │ length")
