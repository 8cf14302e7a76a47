"""Several measures of the same strategies in one chart."""

import pytest
from drawn import on_the_sheet

from labs.pictures.bars import Panel, side_by_side
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
