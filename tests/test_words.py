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


@pytest.mark.parametrize("one, other, expected", [
    (6412, 6388, ("6,412", "6,388")), (1.23456, 1.23457, ("1.23456", "1.23457")),
    (1e6 + 1e-3, 1e6, ("1,000,000.001", "1,000,000")), (3, 3 + 1e-12, ("3", "3.000000000001")),
    (0.5, 2, ("0.5", "2"))])
def test_different_numbers_are_told_apart(one, other, expected):
    assert words.format_distinct(one, other, digits=4) == expected


@pytest.mark.parametrize("one, other, expected", [
    (8, 2, "4x"), (6412, 6388, "1.004x"), (1, 3, "0.33x"), (1e9 + 1, 1e9, "1.000000001x"),
    (5, 5, "1x")])
def test_a_factor_is_never_rounded_to_once(one, other, expected):
    assert words.times(one, other) == expected


@pytest.mark.parametrize("ranks, expected", [
    ([3], "rank 3"), ([0, 1], "ranks 0 and 1"), ([2, 0], "ranks 0 and 2"),
    ([0, 1, 2, 3], "ranks 0–3"), ([0, 2, 5], "ranks 0, 2 and 5"),
    (range(0, 32, 2), "ranks 0, 2, … 30 (16 of them)")])
def test_ranks_are_named_shortly(ranks, expected):
    assert words.named_ranks(ranks) == expected


def test_messages_are_broken_between_words():
    text = f"a headline\n    {'word ' * 40}\n" + "x" * 120
    lines = words.wrapped(text).split("\n")
    assert lines[0] == "a headline" and lines[-1] == "x" * 120
    assert len(lines) > 4 and all(len(line) <= words.LINE for line in lines[:-1])
    assert all(line.startswith("    word") and line.endswith("word") for line in lines[1:-1])
    assert words.wrapped("") == "" and words.wrapped("a\n\nb") == "a\n\nb"
