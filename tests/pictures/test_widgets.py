"""A picture's controls: what they pass on to the drawing, and what a machine without them shows."""

import sys

import pytest
from matplotlib.figure import Figure
from traitlets import TraitError

from labs.pictures.picture import Picture
from labs.pictures.slider import Slider
from labs.pictures.widgets import Choice, Controls

WIDGET = "application/vnd.jupyter.widget-view+json"
OPTIONS = [("0.8", 0.8), ("1.6", 1.6), ("all", None)]


@pytest.fixture
def slider():
    return Slider("cap, MB", OPTIONS, 1.6)


def test_a_slider_begins_at_its_value(slider):
    assert slider.value == 1.6
    state = slider.get_state(["label", "options", "index"])
    assert state == {"label": "cap, MB", "options": ["0.8", "1.6", "all"], "index": 1}


def test_a_move_in_the_browser_is_the_value_of_that_option(slider):
    seen = []
    slider.observe(lambda change: seen.append(change.new), names="value")
    for index in (2, 0):
        slider.set_state({"index": index})  # what the browser sends
    assert seen == [None, 0.8] and slider.value == 0.8


def test_a_new_value_moves_the_slider(slider):
    slider.value = None
    assert slider.index == 2


def test_a_slider_refuses_what_is_no_option(slider):
    with pytest.raises(TraitError, match="cap, MB has no option 25"):
        slider.value = 25
    assert (slider.index, slider.value) == (1, 1.6)


@pytest.fixture
def controls():
    choices = [Choice("cap", "cap, MB", OPTIONS, 0.8),
               Choice("model", "model", [("GPT-2", "gpt2")], "gpt2", kind="menu")]
    return Controls(choices, lambda **chosen: Picture(Figure(), f"{chosen}"),
                    live=lambda **chosen: f"<p>{chosen}</p>")


def test_controls_draw_what_is_chosen(controls):
    grid, view = controls.box().children
    grid.children[0].value = 1.6
    assert view.value == "<p>{'cap': 1.6, 'model': 'gpt2'}</p>"


def test_a_still_picture_of_its_own_is_shown_without_a_kernel_and_the_first_choice_with_one():
    drawn = []

    def picture(**chosen):
        drawn.append(chosen)
        return Picture(Figure(), f"{chosen}")

    controls = Controls([Choice("cap", "cap, MB", OPTIONS, 0.8)], picture,
                        still=Picture(Figure(), "all of them", data=[1, 2]))
    assert repr(controls) == "all of them" and controls.data == [1, 2] and not drawn
    _, view = controls.box().children
    assert "cap&#x27;: 0.8" in view.value
    assert controls._repr_mimebundle_()[0]["text/plain"] == "all of them"


@pytest.mark.parametrize("package", ["ipywidgets", "anywidget"])
def test_the_picture_stands_still_without_their_packages(controls, monkeypatch, package):
    assert WIDGET in controls._repr_mimebundle_()[0]
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "labs.pictures.slider")  # it would be imported
    bundle, _ = controls._repr_mimebundle_()
    assert "image/png" in bundle and WIDGET not in bundle
