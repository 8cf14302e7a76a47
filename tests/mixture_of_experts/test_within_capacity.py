"""Exercise 9.7, which copies an expert takes: what its check rejects and accepts."""

import math

import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits, named
from torch.nn import functional as F

import labs.mixture_of_experts as lab

right = definitions("09_mixture_of_experts").within_capacity


def before(flat, experts):
    one_hot = F.one_hot(flat, experts)
    return ((one_hot.cumsum(0) - one_hot) * one_hot).sum(1)


class Wrong:
    def nothing(chosen, experts, capacity):
        return None

    def its_argument(chosen, experts, capacity):
        return chosen

    def all_kept(chosen, experts, capacity):
        return torch.ones_like(chosen, dtype=torch.bool)

    def all_dropped(chosen, experts, capacity):
        return torch.zeros_like(chosen, dtype=torch.bool)

    def dropped_not_kept(chosen, experts, capacity):
        return ~right(chosen, experts, capacity)

    def flat(chosen, experts, capacity):
        return right(chosen, experts, capacity).flatten()

    def as_floats(chosen, experts, capacity):
        return right(chosen, experts, capacity).float()

    def one_more(chosen, experts, capacity):
        return (before(chosen.flatten(), experts) <= capacity).view(chosen.shape)

    def itself_counted(chosen, experts, capacity):
        one_hot = F.one_hot(chosen.flatten(), experts)
        return ((one_hot.cumsum(0) * one_hot).sum(1) < capacity).view(chosen.shape)

    def gshards_order(chosen, experts, capacity):
        k = chosen.shape[1]
        return (before(chosen.t().flatten(), experts) < capacity).view(k, -1).t()

    def a_capacity_for_each_choice(chosen, experts, capacity):
        one_hot = F.one_hot(chosen, experts)  # (tokens, k, experts)
        return ((one_hot.cumsum(0) - one_hot) * one_hot).sum(2) < capacity

    def both_copies_dropped(chosen, experts, capacity):
        return right(chosen, experts, capacity).all(1, keepdim=True).expand(chosen.shape)

    def both_copies_kept(chosen, experts, capacity):
        return right(chosen, experts, capacity).any(1, keepdim=True).expand(chosen.shape)

    def the_last(chosen, experts, capacity):
        return right(chosen.flip(0, 1), experts, capacity).flip(0, 1)

    def all_experts_together(chosen, experts, capacity):
        return (torch.arange(chosen.numel()) < capacity * experts).view(chosen.shape)

    def the_first_of_all(chosen, experts, capacity):
        return (torch.arange(chosen.numel()) < capacity).view(chosen.shape)

    def the_other_dimension(chosen, experts, capacity):
        one_hot = F.one_hot(chosen.flatten(), experts)
        return (((one_hot.cumsum(1) - one_hot) * one_hot).sum(1) < capacity).view(chosen.shape)

    def no_overfull_expert(chosen, experts, capacity):
        counts = chosen.flatten().bincount(minlength=experts)
        return (counts <= capacity)[chosen]

    def unstable_sort(chosen, experts, capacity):
        flat = chosen.flatten()
        mixed = torch.randperm(len(flat))  # a sort that does not keep the order of equal values
        order = mixed[flat[mixed].argsort(stable=True)]
        counts = flat.bincount(minlength=experts)
        starts = (counts.cumsum(0) - counts)[flat[order]]
        kept = torch.empty(len(flat), dtype=torch.bool)
        kept[order] = torch.arange(len(flat)) - starts < capacity
        return kept.view(chosen.shape)

    def topk_of_the_mask(chosen, experts, capacity):
        routed = F.one_hot(chosen, experts).sum(1)  # (tokens, experts)
        taken = routed.topk(min(capacity, len(chosen)), dim=0).indices
        kept = torch.zeros_like(routed).scatter(0, taken, 1) * routed
        return kept.gather(1, chosen).bool()

    def half_the_capacity(chosen, experts, capacity):
        return right(chosen, experts, capacity // 2)

    def twice_the_capacity(chosen, experts, capacity):
        return right(chosen, experts, 2 * capacity)

    def sorts_in_place(chosen, experts, capacity):
        chosen.copy_(chosen.sort(1).values)
        return right(chosen, experts, capacity)

    def viewed(chosen, experts, capacity):
        return right(chosen.view(-1, 1), experts, capacity).view(chosen.shape)


    def counts_in(dtype):
        """An answer that counts in numbers that round."""
        def answer(chosen, experts, capacity):
            one_hot = F.one_hot(chosen.flatten(), experts).to(dtype)
            places = ((one_hot.cumsum(0) - one_hot) * one_hot).sum(1)
            return (places < capacity).view(chosen.shape)
        return answer


WRONG = named(
    nothing=(Wrong.nothing, "wrong_shape"),
    its_argument=(Wrong.its_argument, "wrong_dtype"),
    all_kept=(Wrong.all_kept, "keeps_all"),
    all_dropped=(Wrong.all_dropped, "drops_all"),
    dropped_not_kept=(Wrong.dropped_not_kept, "inverted"),
    flat=(Wrong.flat, "wrong_shape"),
    as_floats=(Wrong.as_floats, "wrong_dtype"),
    one_more=(Wrong.one_more, "one_too_many"),
    itself_counted=(Wrong.itself_counted, "one_too_few"),
    gshards_order=(Wrong.gshards_order, "by_choice GShard"),
    a_capacity_for_each_choice=(Wrong.a_capacity_for_each_choice, "each_choice_alone"),
    both_copies_dropped=(Wrong.both_copies_dropped, "drops_the_token"),
    both_copies_kept=(Wrong.both_copies_kept, "keeps_the_token"),
    the_last=(Wrong.the_last, "keeps_the_last"),
    all_experts_together=(Wrong.all_experts_together, "experts_together"),
    the_first_of_all=(Wrong.the_first_of_all, "experts_together"),
    the_other_dimension=(Wrong.the_other_dimension, "along_experts"),
    no_overfull_expert=(Wrong.no_overfull_expert, "drops_the_expert"),
    unstable_sort=(Wrong.unstable_sort, "not_the_first"),
    topk_of_the_mask=(Wrong.topk_of_the_mask, "not_the_first"),
    half_the_capacity=(Wrong.half_the_capacity, "room_left"),
    twice_the_capacity=(Wrong.twice_the_capacity, "beyond_capacity"),
    sorts_in_place=(Wrong.sorts_in_place, "changes_input"),
    in_bf16=(Wrong.counts_in(torch.bfloat16), "beyond_capacity|room_left"),
    in_fp16=(Wrong.counts_in(torch.float16), "beyond_capacity|room_left"),
    sparse=(lambda *given: right(*given).to_sparse(), "not_dense sparse"),
    viewed=(Wrong.viewed, "raised_RuntimeError"))


class Right:
    def copy_after_copy(chosen, experts, capacity):
        taken = [0] * experts
        kept = torch.zeros(chosen.shape, dtype=torch.bool)
        for token, row in enumerate(chosen.tolist()):
            for place, expert in enumerate(row):
                kept[token, place] = taken[expert] < capacity
                taken[expert] += 1
        return kept

    def by_a_stable_sort(chosen, experts, capacity):
        flat = chosen.reshape(-1)
        order = flat.sort(stable=True).indices
        counts = flat.bincount(minlength=experts)
        starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
        places = torch.empty_like(flat).scatter(0, order, torch.arange(len(flat)) - starts)
        return (places < capacity).reshape(chosen.shape)

    def expert_by_expert(chosen, experts, capacity):
        kept = torch.zeros(chosen.numel(), dtype=torch.bool)
        for expert in range(experts):
            kept[(chosen.flatten() == expert).nonzero().flatten()[:capacity]] = True
        return kept.reshape(chosen.shape)


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_within_capacity(answer), expected)


@pytest.mark.parametrize("answer", [right, Right.copy_after_copy, Right.by_a_stable_sort,
                                    Right.expert_by_expert])
def test_right(answer):
    for _ in range(3):  # other cases each time
        verdict = lab.check_within_capacity(answer)
        assert verdict.passed is True, str(verdict)


def test_it_waits():
    assert_waits(lab.check_within_capacity, "9.7")


@pytest.mark.parametrize("tokens, experts, k", [(64, 8, 2), (100, 7, 3)])
def test_no_factor_above_experts_divided_by_k_drops_a_copy(tokens, experts, k):
    """The notebook says it of 2 of 8: an expert gets at most one copy of each token."""
    chosen = torch.arange(k).expand(tokens, k)
    capacity = math.ceil(experts / k * tokens * k / experts)
    assert right(chosen, experts, capacity).all() and not right(chosen, experts, capacity - 1).all()
