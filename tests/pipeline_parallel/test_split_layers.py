"""What the check of exercise 7.19 must reject, and what it must accept."""

import functools
import itertools
import sys

import cloudpickle
import pytest
import torch
from answers import assert_rejected, assert_waits

from labs.pipeline_parallel.split_layers import check_split_layers, show_split

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")


# 7.19, the laziest first


def even(costs, ranks):
    return [len(costs) // ranks + (rank < len(costs) % ranks) for rank in range(ranks)]


def all_on_the_first(costs, ranks):
    return [len(costs) - ranks + 1] + [1] * (ranks - 1)


def up_to_the_mean(costs, ranks):
    """Fills each stage until it has the mean; the last one gets what is left."""
    counts, sums, mean = [0] * ranks, [0.0] * ranks, sum(costs) / ranks
    rank = 0
    for index, cost in enumerate(costs):
        left = ranks - 1 - rank
        if counts[rank] and left and (sums[rank] + cost > mean or len(costs) - index <= left):
            rank += 1
        counts[rank] += 1
        sums[rank] += cost
    return counts


def heaviest_first(costs, ranks):
    """As equal as can be, but not consecutive: longest processing time first."""
    groups = [[] for _ in range(ranks)]
    for cost in sorted(costs, reverse=True):
        min(groups, key=sum).append(cost)
    return [len(group) for group in groups]


def without_the_head(costs, ranks):
    return min_by_trying([*costs[:-1], 0.0], ranks)


def as_many_costs(costs, ranks):
    """The stages' costs in place of their numbers of parts."""
    counts, ends = even(costs, ranks), [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return [sum(costs[start:end]) for start, end in itertools.pairwise(ends)]


def as_cuts(costs, ranks):
    """Where each stage ends, not how many parts it has."""
    return list(itertools.accumulate(min_by_trying(costs, ranks)))


def sorts_its_input(costs, ranks):
    costs.sort()
    return even(costs, ranks)


def min_by_trying(costs, ranks):
    """By all places of the cuts."""
    def slowest(cuts):
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))

    cuts = min(itertools.combinations(range(1, len(costs)), ranks - 1), key=slowest)
    return [b - a for a, b in itertools.pairwise((0, *cuts, len(costs)))]


def by_bisection(costs, ranks):
    """The least capacity into which filling greedily fits, found by halving; as a tuple."""
    def fill(capacity):
        counts, load = [0], 0.0
        for index, cost in enumerate(costs):
            must_open = len(costs) - index <= ranks - len(counts)
            if counts[-1] and (load + cost > capacity or must_open):
                counts, load = [*counts, 0], 0.0
            counts[-1], load = counts[-1] + 1, load + cost
        return counts

    low, high = 0.0, sum(costs)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if len(fill(middle)) <= ranks else (middle, high)
    return tuple(fill(high * (1 + 1e-12)))


@functools.wraps(min_by_trying)
def as_tensor(costs, ranks):
    return torch.tensor(min_by_trying(costs, ranks))


@pytest.mark.parametrize(("answer", "words"), [
    (lambda costs, ranks: None, "wrong_type"),
    (lambda costs, ranks: len(costs) // ranks, "wrong_type"),
    (even, "not_balanced"),
    (all_on_the_first, "not_balanced"),
    (up_to_the_mean, "not_balanced"),
    (heaviest_first, "not_balanced"),
    (without_the_head, "not_balanced"),
    (as_many_costs, "wrong_type numbers"),
    (as_cuts, "wrong_sum"),
    (sorts_its_input, "not_balanced"),
    (lambda costs, ranks: [len(costs)] + [0] * (ranks - 1), "empty_stage"),
    (lambda costs, ranks: min_by_trying(costs, 4), "wrong_count")])
def test_a_wrong_split_is_rejected(answer, words):
    verdict = check_split_layers(answer)
    print(verdict)
    assert_rejected(verdict, words)


@pytest.mark.parametrize("answer", [min_by_trying, by_bisection, as_tensor])
def test_a_right_split_passes(answer):
    verdict = check_split_layers(answer)
    assert verdict.passed, str(verdict)


def test_the_table_of_a_split():
    table = show_split(by_bisection, [0.0, *[1.0] * 6, 2.5], ranks=4)
    assert table.rows[0][3] == "3.5" and table.rows[1][3] == "2.5"


def test_7_19_and_7_20_wait():
    assert_waits(check_split_layers, "7.19")
