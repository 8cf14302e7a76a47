"""One source of colours, which everybody can tell apart."""

import re
from itertools import combinations
from pathlib import Path

import pytest
from colour_difference import (
    LEAST,
    SIGHT,
    ciede2000,
    differences,
    entries_alike,
    on_dark_page,
)
from colour_difference import smallest_difference as apart
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch

from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.marks import legend_above
from labs.pictures.picture import canvas
from labs.training.memory_categories import Memory

LABS = Path(__file__).resolve().parents[2] / "labs"
FILLED = {**palette.PARTS, **{f"rank {rank}": colour for rank, colour in enumerate(palette.RANKS)},
          **{f"run {run}": colour for run, colour in enumerate(palette.RUNS)}}

# Sharma, Wu and Dalal 2005, table 1: CIELAB of two colours and their difference. Pair 14 is left
# out: its hues are 180 degrees apart, so that rounding decides between two values of the formula.
PUBLISHED = """
50 2.6772 -79.7751 50 0 -82.7485 2.0425, 50 3.1571 -77.2803 50 0 -82.7485 2.8615,
50 2.8361 -74.0200 50 0 -82.7485 3.4412, 50 -1.3802 -84.2814 50 0 -82.7485 1.0000,
50 -1.1848 -84.8006 50 0 -82.7485 1.0000, 50 -0.9009 -85.5211 50 0 -82.7485 1.0000,
50 0 0 50 -1 2 2.3669, 50 -1 2 50 0 0 2.3669, 50 2.4900 -0.0010 50 -2.4900 0.0009 7.1792,
50 2.4900 -0.0010 50 -2.4900 0.0010 7.1792, 50 2.4900 -0.0010 50 -2.4900 0.0011 7.2195,
50 2.4900 -0.0010 50 -2.4900 0.0012 7.2195, 50 -0.0010 2.4900 50 0.0009 -2.4900 4.8045,
50 -0.0010 2.4900 50 0.0011 -2.4900 4.7461, 50 2.5 0 50 0 -2.5 4.3065, 50 2.5 0 73 25 -18 27.1492,
50 2.5 0 61 -5 29 22.8977, 50 2.5 0 56 -27 -3 31.9030, 50 2.5 0 58 24 15 19.4535,
50 2.5 0 50 3.1736 0.5854 1.0000, 50 2.5 0 50 3.2972 0 1.0000, 50 2.5 0 50 1.8634 0.5757 1.0000,
50 2.5 0 50 3.2592 0.3350 1.0000, 60.2574 -34.0099 36.2677 60.4626 -34.1751 39.4387 1.2644,
63.0109 -31.0961 -5.8663 62.8187 -29.7946 -4.0864 1.2630,
61.2901 3.7196 -5.3901 61.4292 2.2480 -4.9620 1.8731,
35.0831 -44.1164 3.7933 35.0232 -40.0716 1.5901 1.8645,
22.7233 20.0904 -46.6940 23.0331 14.9730 -42.5619 2.0373,
36.4612 47.8580 18.3852 36.2715 50.5065 21.2231 1.4146,
90.8027 -2.0831 1.4410 91.1528 -1.6435 0.0447 1.4441,
90.9257 -0.5406 -0.9208 88.6381 -0.8985 -0.7239 1.5381,
6.7747 -0.2908 -2.4247 5.8714 -0.0985 -2.2286 0.6377,
2.0776 0.0795 -1.1350 0.9033 -0.0636 -0.5514 0.9082"""


def test_only_the_palette_has_colours():
    found = [path.name for path in LABS.rglob("*.py")
             if re.search("#[0-9a-fA-F]{6}", path.read_text())]
    assert found == ["palette.py"]


def test_the_difference_of_colours_is_the_published_one():
    pairs = [tuple(map(float, pair.split())) for pair in PUBLISHED.split(",")]
    assert len(pairs) == 33
    for *colours, published in pairs:
        assert ciede2000(colours[:3], colours[3:]) == pytest.approx(published, abs=1e-4)
        assert ciede2000(colours[3:], colours[:3]) == pytest.approx(published, abs=1e-4)


def test_colour_blindness_is_simulated():
    for matrix in SIGHT.values():  # grey stays grey
        assert [sum(row) for row in matrix] == pytest.approx([1, 1, 1], abs=2e-6)
    # The colours that this palette had for parameters and optimizer state, and for two ranks.
    states = differences(to_rgb("#3b6fb6"), to_rgb("#7a62b3"))
    assert states["normal"] > 15 and states["protan"] < 2 and states["deutan"] < 3
    assert apart("#3b6fb6", "#a05bb0") < 3


@pytest.mark.parametrize("picture", palette.TOGETHER)
def test_colours_that_meet_can_be_told_apart_by_everyone(picture):
    colours = {}
    for name, colour in palette.TOGETHER[picture].items():
        colours.setdefault(colour, []).append(name)  # gradients and backward are one
    close = {(*names, *others): round(found, 1)
             for (one, names), (other, others) in combinations(colours.items(), 2)
             if (found := apart(one, other)) < LEAST}
    assert not close


def test_what_is_sent_does_not_look_like_what_is_held():
    for sent in palette.COLLECTIVES.items() - palette.MEMORY.items():
        for held in palette.MEMORY.items():
            fills = [(colour, palette.HATCHES.get(name)) for name, colour in (sent, held)]
            assert fills[0][1] != fills[1][1], (sent, held)


def test_colours_are_seen_on_paper_and_on_a_dark_page():
    for name, colour in FILLED.items():
        assert apart(colour, palette.PAPER) > (7 if name == "other" else LEAST - 1), name
    for name, colour in palette.MARKS.items():
        assert apart(colour, palette.PAPER) > LEAST, name


@pytest.mark.parametrize("colour", [
    *palette.RANKS, palette.PLAIN, *palette.LOST.values(), *palette.BUCKETS,
    palette.PHASES["forward"], palette.MEMORY["parameters"], palette.MEMORY["optimizer state"]])
def test_text_on_a_colour_can_be_read_on_a_dark_page(colour):
    dark = [to_hex(on_dark_page(one)) for one in (palette.text_on(colour), colour)]
    assert palette.contrast(*dark) >= 4.5
    dark = [to_hex(on_dark_page(one)) for one in (palette.readable(colour), palette.PAPER)]
    assert palette.contrast(*dark) >= 4.5


def test_two_entries_of_a_legend_that_look_alike_are_found():
    figure, _ = canvas(4, 2)
    legend_above(figure, [Patch(color="#3b6fb6", label="parameters"),
                          Patch(color="#7a62b3", label="optimizer state"),
                          Patch(facecolor="#7a62b3", hatch="//", label="hatched")])
    assert [found.split(":")[0] for found in entries_alike(figure)] == [
        "'parameters' and 'optimizer state'"]


def test_parameters_and_the_all_gather_have_entries_of_their_own():
    drawn = side_by_side(["FSDP"], [
        Panel("peak", "MB", [Memory(parameters=9e6, gradients=3e6)], 1e6),
        Panel("sent", "MB", [{"all_gather": 8e6, "reduce_scatter": 4e6}], 1e6)])
    [legend] = drawn.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "parameters", "gradients", "reduce_scatter", "all_gather"]
    assert not entries_alike(drawn.figure)
