"""Several measures of the same strategies in one chart."""

import pytest
from drawn import on_the_sheet

from labs.pictures import marks
from labs.pictures.bars import Bar, Panel, bars, numbers_before_and_after, side_by_side
from labs.training.memory_categories import Memory


def test_a_bar_that_exceeds_the_limit_says_so():
    panel = Panel("held", "MB", [Memory(9e6), Memory(1e6)], 1e6, limit=5e6, out_of_memory=(0,))
    text = repr(side_by_side(["DDP", "FSDP"], [panel]))
    assert "DDP: held: out of memory, needs 9 MB" in text and "the limit is 5 MB" in text


def test_ticks_and_missing_values_are_said():
    panel = Panel("time", "ms", [0.002, None], 1e-3, [0.003, None], [None, 0.001], missing="none")
    picture = side_by_side(["DDP", "FSDP"], [panel], "a note")
    assert repr(picture).splitlines() == [
        "DDP: time 2 ms, predicted 3", "FSDP: time none, your guess 1", "a note"]
    assert picture.data["time"] is panel and picture.png().startswith(b"\x89PNG")


@pytest.mark.parametrize("guessed", [None, 0.5, 9.0])
def test_bars_and_words_of_traffic_lie_on_the_sheet(guessed):
    elements = [{"all_gather": 2.0, "reduce_scatter": 1.0}, {"send": 1.0}]
    nbytes = [{"all_gather": 8e6, "reduce_scatter": 4e6}, {"send": 1e3}]
    drawn = side_by_side(["a strategy with quite a name", "point to point"], [
        Panel("elements that travel", "Ψ per step", elements, 1, [3.0, None], [guessed, None]),
        Panel("bytes that travel", "MB per step", nbytes, 1e6, [12e6, None])],
        "An all-reduce counts twice.")
    on_the_sheet(drawn)
    assert "elements that travel 3 Ψ per step (all_gather 2, reduce_scatter 1), predicted 3" in (
        drawn.text)
    assert [text.get_text() for text in drawn.figure.legends[0].get_texts()][:3] == [
        "reduce_scatter", "all_gather", "send"]


def entries(picture):
    return [text.get_text() for text in picture.figure.legends[0].get_texts()]


def test_a_legend_of_many_parts_is_not_wider_than_the_picture():
    everything = Memory(9e6, 3e6, 2e6, 5e6, 4e6, 1e6)
    drawn = side_by_side(["FSDP", "DDP"], [
        Panel("peak", "MB", [everything, everything], 1e6, [9.0, None], [8.0, None], limit=5e6),
        Panel("sent", "MB", [{"all_gather": 8.0, "all_reduce": 1.0}, {"broadcast": 2.0}], 1),
        Panel("a step", "ms", [{"computing": 4.0, "exposed": 1.0, "host": 1.0}, None], 1)])
    drawn.figure.canvas.draw()
    box = drawn.figure.legends[0].get_window_extent()
    assert box.x1 <= drawn.figure.bbox.x1, entries(drawn)


@pytest.mark.parametrize(("guess", "found", "words"), [
    (7, 7, "You guessed 7, and it is 7 calls: right."),
    (6.8, 7, "You guessed 6.8, and it is 7 calls: right."),
    (6, 7, "You guessed 6, and it is 7 calls: 14% too low."),
    (28, 7, "You guessed 28, and it is 7 calls: 4 times too high."),
    (0, 7, "You guessed 0, and it is 7 calls: too low."),
    (None, 7, "")])
def test_a_guess_is_answered_in_words(guess, found, words):
    assert marks.answered(guess, found, "calls") == words


def test_answers_stand_below_the_bars_and_in_the_words():
    drawn = bars([Bar("buckets", 7, 7, 6), Bar("overlapped", 7, 7, 6), Bar("DDP", 6)], "calls",
                 lesson="Buckets")
    answer = "You guessed 6, and it is 7 calls: 14% too low."
    assert drawn.figure.get_supxlabel() == answer  # once, though two bars have the guess
    assert drawn.text.splitlines()[0] == "Buckets" and drawn.text.endswith(answer)
    two = bars([Bar("a", 7, guessed=7), Bar("b", 3, guessed=7)], "calls")
    assert two.figure.get_supxlabel().splitlines() == [
        "a: you guessed 7, and it is 7 calls: right.",
        "b: you guessed 7, and it is 3 calls: 2.3 times too high."]


def test_the_title_stands_above_the_legend():
    drawn = side_by_side(["FSDP"], [Panel("peak", "MB", [Memory(9e6)], 1e6)], lesson="A title")
    [legend] = drawn.figure.legends
    assert legend.get_title().get_text() == "A title" and drawn.text.startswith("A title\n")
    drawn.figure.canvas.draw()
    top = drawn.figure.axes[0].title.get_window_extent().y1
    assert legend.get_window_extent().y0 >= top - 1


def test_counts_have_whole_ticks():
    drawn = bars([Bar("a", 2), Bar("b", 3)], "calls")
    drawn.figure.canvas.draw()
    assert all(tick == int(tick) for tick in drawn.figure.axes[0].get_xticks())


def test_no_limit_runs_through_a_label():
    drawn = side_by_side(["DDP", "FSDP"], [
        Panel("peak", "GB", [87.0, 73.6], 1, limit=84.0, out_of_memory=(0,))])
    [ax] = drawn.figure.axes
    drawn.figure.canvas.draw()
    line = ax.transData.transform((84.0, 0))[0]
    for label in ax.texts:
        box = label.get_window_extent()
        assert not box.x0 < line < box.x1, label.get_text()
        assert box.x1 <= drawn.figure.bbox.x1


def test_a_number_that_is_small_beside_the_sum_is_written():
    drawn = numbers_before_and_after([1, 4, 9, 16], [120] * 4, 60)
    [ax] = drawn.figure.axes
    assert {"1", "4", "9", "16"} <= {text.get_text() for text in ax.texts}


def test_numbers_after_a_collective_answer_the_guess():
    drawn = numbers_before_and_after([1, 4], [2.5, 2.5], 8)
    assert drawn.figure.legends[0].get_title().get_text() == "After: every rank has 2.5"
    assert drawn.text.endswith("You guessed 8, and it is 2.5.")
    right = numbers_before_and_after([1, 4], [2.5, 2.5], 2.5)
    assert right.text.endswith("You guessed 2.5, and it is 2.5: right.")
    different = numbers_before_and_after([1, 4], [2.5, 4], 8)
    assert "You guessed" not in different.text
