"""What travels in a step, drawn as elements and as bytes."""

import pytest
from drawn import on_the_sheet

from labs.pictures.traffic import TrafficRow, stacked_traffic


@pytest.mark.parametrize("guessed", [None, 0.5, 9.0])
def test_bars_and_words_of_traffic_lie_on_the_sheet(guessed):
    row = TrafficRow("a strategy with quite a name",
                     {"all_gather": 2.0, "reduce_scatter": 1.0},
                     {"all_gather": 8e6, "reduce_scatter": 4e6}, 1234, 3.0, guessed, 12e6)
    odd = TrafficRow("point to point", {"send": 1.0}, {"send": 1e3}, 1)
    drawn = stacked_traffic([row, odd], 8)
    on_the_sheet(drawn)
    assert "each rank sends 7/8 of it" in drawn.text and "other" in str(
        [text.get_text() for text in drawn.figure.legends[0].get_texts()])
