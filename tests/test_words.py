"""Articles, plurals and lists as messages use them."""

import pytest

from labs import words


@pytest.mark.parametrize("noun, expected", [
    ("str", "a str"), ("int", "an int"), ("Tensor", "a Tensor"), ("FSDPModule", "an FSDPModule"),
    ("LSTM", "an LSTM"), ("UserModel", "a UserModel"), ("Adam", "an Adam")])
def test_the_article_follows_the_first_sound(noun, expected):
    assert words.with_article(noun) == expected


def test_a_noun_follows_its_number():
    assert [words.counted(n, "rank") for n in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]


@pytest.mark.parametrize("ranks, expected", [
    ([3], "rank 3"), ([0, 1], "ranks 0 and 1"), ([2, 0], "ranks 0 and 2"),
    ([0, 1, 2, 3], "ranks 0–3"), ([0, 2, 5], "ranks 0, 2 and 5"),
    (range(0, 32, 2), "ranks 0, 2, … 30 (16 of them)")])
def test_ranks_are_named_shortly(ranks, expected):
    assert words.named_ranks(ranks) == expected
