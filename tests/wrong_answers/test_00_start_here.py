"""What the checks and pictures of notebook 00 must reject, with the words that must say why and,
as a third entry, words of the hint; and what they must accept."""

import sys
from fractions import Fraction

import cloudpickle
import numpy as np
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


def _means(losses):
    return [_sum(torch.tensor(loss)).item() / dist.get_world_size() for loss in losses]


def _fewest(losses):
    steps = torch.tensor(len(losses))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    return steps.item()


# 0.1: the mean over ranks


def own_value(mine):
    return mine


def sum_not_mean(mine):
    return _sum(mine)


def divided_by_two(mine):
    return _sum(mine) / 2


def only_rank_0(mine):
    mean = _sum(mine) / dist.get_world_size()
    return mean if dist.get_rank() == 0 else mine


def reduced_to_rank_0(mine):
    total = mine.clone()
    dist.reduce(total, dst=0)
    return total / dist.get_world_size() if dist.get_rank() == 0 else total * 0


def overwrites_its_argument(mine):
    dist.all_reduce(mine)
    return mine / dist.get_world_size()


def one_number_for_all(mine):
    return (_sum(mine) / dist.get_world_size()).mean()


def other_dtype(mine):
    return (_sum(mine) / dist.get_world_size()).double()


def returns_nothing(mine):
    _sum(mine)


def returns_a_word(mine):
    return "mean"


def returns_what_the_collective_returns(mine):
    return dist.all_reduce(mine.clone())


def divides_what_the_collective_returns(mine):
    return dist.all_reduce(mine.clone()) / dist.get_world_size()


def maximum(mine):
    highest = mine.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return highest


def rank_0_alone_reduces(mine):
    return _sum(mine) / dist.get_world_size() if dist.get_rank() == 0 else mine


def other_shapes(mine):
    return _sum(mine[: dist.get_rank() + 1]) / dist.get_world_size()


def never_waits(mine):
    everyone = mine.clone()
    dist.all_reduce(everyone, async_op=True)
    return everyone / dist.get_world_size()


def waits_after_the_division(mine):
    everyone = mine.clone()
    work = dist.all_reduce(everyone, async_op=True)
    mean = everyone / dist.get_world_size()
    work.wait()
    return mean


def asks_once_whether_it_is_done(mine):
    everyone = mine.clone()
    if dist.all_reduce(everyone, async_op=True).is_completed():
        return everyone / dist.get_world_size()
    return everyone / dist.get_world_size()


def average_of_integers(mine):
    everyone = mine.clone()
    dist.all_reduce(everyone)
    return everyone // dist.get_world_size()


def in_float32(mine):
    return _sum(mine.float()) / dist.get_world_size()


def sum_without_itself(mine):
    return (_sum(mine) - mine) / dist.get_world_size()


def divides_twice(mine):
    ranks = dist.get_world_size()
    return _sum(mine / ranks) / ranks


def broadcast_of_rank_0(mine):
    mean = mine.clone()
    dist.broadcast(mean, src=0)
    return mean


def mean_of_first_two(mine):
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return (everyone[0] + everyone[1]) / 2


def divides_own_then_sums_in_place(mine):
    mine /= dist.get_world_size()
    dist.all_reduce(mine)
    return mine


def sum_of_ranks(mine):
    everyone = mine + dist.get_rank()
    dist.all_reduce(everyone)
    return everyone / dist.get_world_size()


def misspelt(mine):
    return _sum(mine) / dist.get_worldsize()


MEAN = [
    (own_value, "not_summed"),
    (sum_not_mean, "sum_not_mean"),
    (divided_by_two, "wrong_divisor"),
    (only_rank_0, "result_on_one_rank returned"),
    (reduced_to_rank_0, "result_on_one_rank though"),
    (overwrites_its_argument, "changes_input"),
    (one_number_for_all, "wrong_shape"),
    (other_dtype, "wrong_dtype"),
    (returns_nothing, "nothing_returned", "Does it end with `return`?"),
    (returns_a_word, "wrong_type", "Return the tensor"),
    (returns_what_the_collective_returns, "nothing_returned", "A collective itself returns"),
    (divides_what_the_collective_returns, "raised_TypeError",
     "writes into its tensor and returns None"),
    (maximum, "wrong_output"),
    (rank_0_alone_reduces, "deadlock all_reduce"),
    (other_shapes, "collectives_differ"),
    (misspelt, "raised_AttributeError"),
    (never_waits, "never_waited", "call the handle's wait()"),
    (waits_after_the_division, "waits_too_late",
     "before you use the tensor"),
    (asks_once_whether_it_is_done, "never_waited"),
    (average_of_integers, "wrong_output"),
    (in_float32, "wrong_dtype"),
    (sum_without_itself, "wrong_output"),
    (divides_twice, "wrong_divisor"),
    (broadcast_of_rank_0, "not_summed"),
    (mean_of_first_two, "wrong_output"),
    (divides_own_then_sums_in_place, "changes_input"),
    (sum_of_ranks, "wrong_output"),
]


def mean_of_stack(mine):
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone).mean(dim=0)


def shares_added(mine):
    return _sum(mine / dist.get_world_size())


def there_and_back(mine):
    total = mine.clone()
    dist.reduce(total, dst=0)
    dist.broadcast(total, src=0)
    return total.div_(dist.get_world_size())


def functional_mean(mine):
    return functional.all_reduce(mine, "sum", dist.group.WORLD) / dist.get_world_size()


def functional_result_itself(mine):
    return functional.all_reduce(mine / dist.get_world_size(), "sum", dist.group.WORLD)


def by_future(mine):
    everyone = mine.clone()
    dist.all_reduce(everyone, async_op=True).get_future().wait()
    return everyone / dist.get_world_size()


def polls(mine):
    everyone = mine.clone()
    work = dist.all_reduce(everyone, async_op=True)
    while not work.is_completed():
        pass
    return everyone / dist.get_world_size()


def coalesced(mine):
    everyone = [mine.clone()]
    dist.all_reduce_coalesced(everyone)
    return everyone[0] / dist.get_world_size()


def through_objects(mine):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return sum(everyone) / len(everyone)


def from_rank_to_rank(mine):
    ranks = dist.get_world_size()
    total, moving = mine.clone(), mine.clone()
    for _ in range(ranks - 1):
        arriving = torch.empty_like(moving)
        lab.pass_on(moving, arriving)
        moving = arriving
        total += moving
    return total / ranks


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
    (gathers_input_first, "wrong_output_size all_gather_into_tensor", "longer one: 2x the input"),
    (gathers_what_the_other_returns, "raised_TypeError",
     "returns None: call it on a line of its own"),
    (returns_nothing, "ready_made"),
    (lambda mine: None, "reduce_scatter_missing nothing"),
    (shard_of_float32, "wrong_dtype reduce_scatter_tensor", "mine.new_empty"),
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


# 0.3: the bytes of a ring

BYTES = [
    (lambda size, ranks: (ranks - 1) * size / ranks, "one_half_only"),
    (lambda size, ranks: 2 * size, "limit_for_many_ranks"),
    (lambda size, ranks: (ranks - 1) * size, "sent_to_every_rank"),
    (lambda size, ranks: 2 * (ranks - 1) * size, "whole_tensor_each_step"),
    (lambda size, ranks: 2 * (ranks - 1) // ranks * size, "one_round_only"),
    (lambda size, ranks: 2 * (ranks - 1), "steps_not_bytes"),
    (lambda size, ranks: 2 * (ranks - 1) * (size / 4) / ranks, "elements_not_bytes"),
    (lambda size, ranks: 2 * (ranks - 1) * size / ranks / 1e6, "megabytes_not_bytes"),
    (lambda size, ranks: 1.5 * size, "wrong_number 128"),
    (lambda size, ranks: 2 * (ranks + 1) * size / ranks, "wrong_number 240"),
    (lambda size, ranks: None, "not_a_number", "Return the number"),
    (lambda size, ranks: float("nan"), "not_a_number"),
    (lambda size, ranks: size / (ranks - ranks), "raised_ZeroDivisionError"),
    (lambda size: size, "wrong_signature"),
    (lambda size, ranks: ranks * size,
     "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
    (lambda size, ranks: size * (ranks - 1) / ranks * 4,
     "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
    (lambda size, ranks: 2 * (ranks - 1) * (size // ranks // 4), "elements_not_bytes"),
    (lambda size, ranks: 2 * size - size / (2 * ranks),
     "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
    (lambda size, ranks: size * 2 ** (ranks - 1) / ranks,
     "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
    (lambda size, ranks: f"{2 * (ranks - 1) * size / ranks}", "not_a_number"),
    (lambda size, ranks: (2 * (ranks - 1), size / ranks),
     "not_a_number tuple"),
    (lambda size, ranks: 2 * (ranks - 1) * size / ranks * 8,
     "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
    (lambda size, ranks: [2 * (ranks - 1) * size / ranks] * ranks, "not_a_number"),
    (lambda size, ranks: 2 * size / ranks, "limit_for_many_ranks|sent_to_every_rank|wrong_number"),
]


def as_fraction(size, ranks):
    return 2 * (1 - Fraction(1, ranks)) * size


def of_numpy(size, ranks):
    return np.array(2 * (ranks - 1)) * np.float32(size) / ranks


def counted_up(size, ranks):
    return sum(size / ranks for _ in range(2 * (ranks - 1)))


def as_tensor(size, ranks):
    return 2 * (ranks - 1) * torch.tensor(size) / ranks


def in_whole_numbers(size, ranks):
    return 2 * (ranks - 1) * size // ranks


# 0.4: stop together


def does_not_agree(losses):
    return _means(losses)


def always_two(losses):
    return _means(losses[:2])


def longest(losses):
    steps = torch.tensor(len(losses))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return _means(losses + [0.0] * (steps.item() - len(losses)))


def sums_together(losses):
    return [mean * dist.get_world_size() for mean in _means(losses[: _fewest(losses)])]


def own_losses(losses):
    return losses[: _fewest(losses)]


def last_batches(losses):
    return _means(losses[-_fewest(losses) :])


def rank_0_decides(losses):
    steps = torch.tensor(len(losses))
    dist.broadcast(steps, src=0)
    return _means(losses[: steps.item()])


def all_steps_of_all_ranks(losses):
    steps = torch.tensor(len(losses))
    dist.all_reduce(steps)
    return _means(losses[: steps.item()])


def runs_out_of_losses(losses):
    steps = torch.tensor(len(losses))
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    return _means([losses[step] for step in range(steps.item())])


def takes_what_the_collective_returns(losses):
    steps = dist.all_reduce(torch.tensor(len(losses)), op=dist.ReduceOp.MIN)
    return _means([losses[step] for step in range(steps)])


def no_numbers(losses):
    return [None] * _fewest(losses)


def not_a_number(losses):
    return [float("nan")] * _fewest(losses)


def rank_0_returns(losses):
    means = _means(losses[: _fewest(losses)])
    return means if dist.get_rank() == 0 else None


def first_batches_of_own(losses):
    return [loss / dist.get_world_size() for loss in losses[: _fewest(losses)]]


def never_waits_for_the_fewest(losses):
    steps = torch.tensor(len(losses))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN, async_op=True)
    return _means(losses[: _fewest(losses)])


def one_step_less(losses):
    return _means(losses[: _fewest(losses) - 1])


def of_all_that_each_has(losses):
    return _means(losses[: _fewest(losses)]) + losses[_fewest(losses):]


def sums_of_steps(losses):
    means = _means(losses[: _fewest(losses)])
    return [sum(means[: step + 1]) for step in range(len(means))]


def one_number(losses):
    means = _means(losses[: _fewest(losses)])
    return sum(means) / len(means)


def a_dictionary(losses):
    return dict(enumerate(_means(losses[: _fewest(losses)])))


def largest_loss(losses):
    return [_largest(loss) for loss in losses[: _fewest(losses)]]


def _largest(loss):
    highest = torch.tensor(loss)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return highest.item()


def averages_the_number_of_steps(losses):
    steps = _sum(torch.tensor(len(losses))) // dist.get_world_size()
    return _means(losses[:steps])


def in_words(losses):
    return [f"{mean}" for mean in _means(losses[: _fewest(losses)])]


def mean_over_steps(losses):
    means = _means(losses[: _fewest(losses)])
    return [sum(means) / len(means)] * len(means)


def running_mean(losses):
    return [sum(losses[: step + 1]) / (step + 1) for step in range(_fewest(losses))]


LOSSES = [
    (does_not_agree, "deadlock all_reduce", "Agree on the number of steps first"),
    (always_two, "wrong_count"),
    (longest, "wrong_count"),
    (sums_together, "sum_not_mean"),
    (own_losses, "not_summed rank's"),
    (last_batches,
     "wrong_number mean"),
    (rank_0_decides, "deadlock all_reduce", "Agree on the number of steps first"),
    (all_steps_of_all_ranks, "deadlock all_reduce",
     "a collective can take a minimum"),
    (runs_out_of_losses, "raised_IndexError",
     "a collective can take a minimum"),
    (takes_what_the_collective_returns, "raised_TypeError",
     "writes into its tensor and returns None"),
    (no_numbers, "not_a_number",
     "one mean for each step"),
    (not_a_number, "not_a_number"),
    (rank_0_returns, "wrong_type nothing"),
    (mean_over_steps, "wrong_number mean"),
    (running_mean, "not_summed rank's"),
    (first_batches_of_own, "wrong_number mean"),
    (never_waits_for_the_fewest, "never_waited", "wait()"),
    (one_step_less, "wrong_count"),
    (of_all_that_each_has, "wrong_count"),
    (sums_of_steps, "wrong_number mean"),
    (one_number, "wrong_type float"),
    (a_dictionary, "wrong_type dict"),
    (largest_loss, "wrong_number mean"),
    (averages_the_number_of_steps, "deadlock all_reduce", "Agree on the number of steps"),
    (in_words, "not_a_number"),
]


def as_a_tensor(losses):
    return torch.tensor(_means(losses[: _fewest(losses)]))


def as_an_array(losses):
    return np.array(_means(losses[: _fewest(losses)]))


def as_fractions(losses):
    return tuple(Fraction(mean) for mean in _means(losses[: _fewest(losses)]))


def one_by_one(losses):
    for loss in losses[: _fewest(losses)]:
        yield _sum(torch.tensor(loss, dtype=torch.float64)) / dist.get_world_size()


def one_all_reduce_for_all(losses):
    kept = torch.tensor(losses[: _fewest(losses)])
    dist.all_reduce(kept, async_op=True).wait()
    return list(kept / dist.get_world_size())


def agrees_first(losses):
    return _means(losses[: _fewest(losses)])


def gathers_all(losses):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, losses)
    return [sum(step) / len(step) for step in zip(*everyone, strict=False)]


def asks_before_each_step(losses):
    means = []
    while True:
        more = torch.tensor(int(len(means) < len(losses)))
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        if not more:
            return means
        means += _means([losses[len(means)]])


CHECKS = {"0.1": lab.check_mean_over_ranks, "0.2": lab.check_all_reduce,
          "0.3": lab.check_ring_bytes, "0.4": lab.check_mean_losses}
WRONG = {"0.1": MEAN, "0.2": HALVES, "0.3": BYTES, "0.4": LOSSES}
RIGHT = {"0.1": [mean_of_stack, shares_added, there_and_back, functional_mean,
                 functional_result_itself, by_future, polls, coalesced, through_objects,
                 from_rank_to_rank],
         "0.2": [with_lists, in_place, asynchronous, functional_halves, by_futures,
                 lists_of_pieces, into_a_part_of_the_whole],
         "0.3": [counted_up, in_whole_numbers, as_tensor, as_fraction, of_numpy],
         "0.4": [agrees_first, gathers_all, asks_before_each_step, as_a_tensor, as_an_array,
                 as_fractions, one_by_one, one_all_reduce_for_all]}


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
    (lab.before_and_after_mean, returns_nothing, 2, NOTHING, RETURN),
    (lab.before_and_after_mean, returns_a_word, 2, "wrong_type", "the tensor"),
    (lab.before_and_after_mean, returns_two_numbers, 2, "wrong_shape numbers", "number by number"),
    (lab.before_and_after_mean, returns_nothing, 40, RANKS, ""),
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


@pytest.mark.parametrize("answer, words", [
    (lambda size, ranks: None, "not_a_number"),
    (lambda size, ranks: "24", "not_a_number"),
    (lambda size, ranks: float("inf"), "not_a_number inf"),
    (lambda size: size, "wrong_signature")])
def test_a_formula_that_cannot_be_drawn(answer, words):
    verdict = lab.ring_traffic(answer)
    assert_rejected(verdict, words)
    assert verdict.hint


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
    ("0.1", divides_what_the_collective_returns), ("0.2", shard_as_in_the_picture)])
def test_prints_of_a_rank_that_fails_are_shown(exercise, answer):
    def chatty(mine):
        print("length", len(mine))
        return answer(mine)

    assert CHECKS[exercise](chatty).printed.startswith("rank 0 │ length")
