"""Who holds what: reading origins off the numbers, and drawings that stay on the sheet."""

import pytest
from drawn import on_the_sheet

from labs.pictures import collectives
from labs.pictures.collectives import State, digits, origins, places


@pytest.mark.parametrize("value, expected", [
    (3000, [(0, 2)]), (3, [(3, 2)]), (2222, [(0, 1), (1, 1), (2, 1), (3, 1)]),
    (220, [(1, 1), (2, 1)]), (0, []), (-10, []), (10000, []), (1.5, []),
    (float("inf"), []), (float("nan"), [])])
def test_origins(value, expected):
    assert origins(value, ranks=4) == expected


@pytest.mark.parametrize("value, expected", [
    (33333333, "33333333"), (2222.0, "2222"), (7.5, "7.5"), (1 / 3, "0.333333"),
    (float("inf"), "inf"), (float("nan"), "nan")])
def test_whole_numbers_are_written_whole(value, expected):
    assert digits(value) == expected


@pytest.mark.parametrize("numbers, expected", [
    ([30], [None, None, 30, None]), ([], [None] * 4), ([7.5], [7.5, None, None, None]),
    ([1, 2, 3, 4], [1, 2, 3, 4]), ([2000, 200], [200, 2000, None, None])])
def test_a_shard_is_drawn_where_it_belongs(numbers, expected):
    assert places(numbers, ranks=4) == expected


def whole(ranks):
    return [[(piece + 1) * 10 ** (ranks - 1 - rank) for piece in range(ranks)]
            for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("count", [2, 3])
def test_every_size_stays_on_the_sheet(ranks, count):
    states = [State("before", whole(ranks))]
    states += [State("after", whole(ranks), "reduce_scatter") for _ in range(count - 1)]
    on_the_sheet(collectives.who_holds_what(states, note="a note"))


def test_an_answer_of_another_length_can_be_drawn():
    on_the_sheet(collectives.who_holds_what([State("before", whole(2)),
                                             State("after", [[1, 2, 3, 4, 5], []], "all_gather")]))
