"""Several measures of the same strategies in one chart."""

from labs.pictures.panels import Panel, side_by_side
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
