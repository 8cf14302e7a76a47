"""Colours can be told apart and texts can be read; conftest looks at each picture of all tests."""

import html
from itertools import combinations

import pytest
from contrast import faint_texts

from labs.pictures import palette
from labs.pictures.picture import Picture, canvas
from labs.pictures.sheet import box, chip, sheet, write


@pytest.mark.parametrize("colour", [*palette.RANKS, *palette.PARTS.values(), *map(
    palette.MACHINE.get, palette.MACHINE)])
def test_text_on_a_colour_and_in_its_shade_can_be_read(colour):
    assert palette.contrast(palette.text_on(colour), colour) >= 4.5
    assert palette.contrast(palette.readable(colour), palette.PAPER) >= 4.5


def test_contrast_is_that_of_the_standard():
    assert palette.contrast("#ffffff", "#000000") == pytest.approx(21)
    assert palette.contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("kind", [palette.MEMORY, palette.PHASES, palette.COLLECTIVES],
                         ids=["memory", "phases", "collectives"])
def test_colours_of_one_chart_differ(kind):
    for one, other in combinations(kind.values(), 2):
        apart = [abs(a - b) for a, b in zip(palette._channels(one), palette._channels(other),
                                            strict=True)]
        assert max(apart) > 0.15


def test_what_belongs_together_has_one_colour():
    assert palette.MEMORY["parameters"] == palette.COLLECTIVES["all_gather"]
    assert palette.MEMORY["gradients"] == palette.PHASES["backward"]
    assert palette.MEMORY["activations"] == palette.PHASES["forward"]
    assert palette.MEMORY["optimizer state"] == palette.PHASES["optimizer"]
    assert palette.GUESSED not in {*palette.PARTS.values(), *palette.RANKS}


def test_faint_text_is_found():
    figure, ax = sheet(4, 2)
    box(ax, 0.5, 0.5, 2, 1, [palette.RANKS[1]])
    write(ax, 1.5, 1, "white on orange", colour="white", ha="center")
    write(ax, 3, 1, "ink on paper")
    write(ax, 3, 1.5, "grey", colour="#999999")
    chip(ax, 0.3, 0.2, 1)
    assert [found.split(":")[0] for found in faint_texts(figure)] == ["'white on orange'", "'grey'"]


def test_text_below_a_box_is_hidden_and_not_faint():
    figure, ax = sheet(4, 2)
    write(ax, 1.5, 1, "below", colour=palette.INK, ha="center")
    box(ax, 0.5, 0.5, 2, 1, [palette.INK]).set_zorder(9)
    assert faint_texts(figure) == []
    write(ax, 1.5, 1, "above", colour=palette.INK, ha="center").set_zorder(10)
    assert [found.split(":")[0] for found in faint_texts(figure)] == ["'above'"]


def test_a_picture_has_its_words_for_screen_readers():
    figure, _ = canvas(4, 2)
    data, metadata = Picture(figure, "2 < 3, 'quoted'\nand more")._repr_mimebundle_()
    words = html.escape("2 < 3, 'quoted'\nand more", quote=True)
    assert data["text/html"].startswith(f"<img alt='{words}' width=")
    assert metadata["image/png"]["alt"] == data["text/plain"] == "2 < 3, 'quoted'\nand more"
