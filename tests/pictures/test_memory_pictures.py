"""Pictures of memory: what is drawn, what is said, and that nothing runs into anything else."""

import re
from xml.etree import ElementTree

import pytest
from drawn import on_the_sheet
from matplotlib.colors import to_hex

from labs.pictures import palette
from labs.pictures.live_memory import memory_html
from labs.pictures.marks import format_number
from labs.pictures.memory import (
    MemoryRow,
    capacities_shown,
    memory_bars,
    memory_columns,
    merge_close,
)
from labs.pictures.widgets import Choice, Controls
from labs.predictions.hardware import GPUS
from labs.training.memory_categories import GB, Memory

SHARD = Memory(2e9, 3e9, 4e9, 5e9, 1e9, 0.5e9)  # 15.5 GB
LINES = [(gpu.usable, gpu.name) for gpu in GPUS.values()]


def widths(picture) -> list:
    """(colour, length, hatched) of every bar."""
    return [(to_hex(bar.get_facecolor()), round(bar.get_width(), 6), bar.get_hatch() is not None)
            for bar in picture.figure.axes[0].patches]


def ticks(picture) -> list:
    """(colour, where) of every thick mark."""
    return [(to_hex(lines.get_colors()[0]), round(lines.get_segments()[0][0][0], 6))
            for lines in picture.figure.axes[0].collections if lines.get_linewidths()[0] >= 3]


def test_a_measured_bar_has_every_category_and_both_ticks():
    picture = memory_bars([MemoryRow("DDP", SHARD, Memory(20 * GB), 10 * GB)], "of one rank")
    assert widths(picture) == [(palette.MEMORY[name], nbytes / GB, False)
                               for name, nbytes in SHARD.by_name().items()]
    assert ticks(picture) == [(palette.PREDICTED, 20), (palette.GUESSED, 10)]
    assert picture.text == (
        "GB of one rank\nDDP: measured 15.5 GB (parameters 2, gradients 3, optimizer state 4, "
        "activations 5, buffers 1, other 0.5), predicted 20, your guess 10\n"
        "You guessed 10, and it is 15.5 GB: 35% too low.")
    assert picture.data[0].measured is SHARD
    on_the_sheet(picture)


def test_a_prediction_alone_is_pale():
    picture = memory_bars([MemoryRow("a", SHARD), MemoryRow("b", predicted=SHARD, guessed=1e9)])
    assert [hatched for *_, hatched in widths(picture)] == 6 * [False] + 6 * [True]
    assert ticks(picture) == [(palette.GUESSED, 1)]  # its bar is the prediction
    assert "b: predicted 15.5 GB (" in picture.text
    assert "predicted only" in [text.get_text() for text in picture.figure.legends[0].get_texts()]


def test_only_categories_that_occur_are_in_the_legend():
    picture = memory_bars([MemoryRow("a", Memory(parameters=1, activations=2))])
    assert [text.get_text() for text in picture.figure.legends[0].get_texts()] == [
        "parameters", "activations"]


@pytest.mark.parametrize("nbytes, unit", [
    (950e6, "GB"), (99e9, "GB"), (1e6, "MB"), (899e6, "MB"), (20e3, "kB"), (16, "bytes")])
def test_the_unit_makes_numbers_handy(nbytes, unit):
    assert memory_bars([MemoryRow("a", Memory(nbytes))]).text.startswith(unit)


def test_the_axis_says_what_a_unit_is():
    axis = memory_bars([MemoryRow("a", SHARD)], "of one rank", unit="MB").figure.axes[0]
    assert axis.get_xlabel() == "MB (10⁶ bytes) of one rank"


def test_a_rank_out_of_memory_ends_at_its_limit():
    picture = memory_bars([MemoryRow("DDP", out_of_memory=True),
                           MemoryRow("half", Memory(9e6), 40e6, out_of_memory=True),
                           MemoryRow("own", out_of_memory=True, limit=5e6),
                           MemoryRow("FSDP", Memory(9e6))], capacities=[(20e6, "the limit")])
    red = [where for colour, where in ticks(picture) if colour == palette.RANK_FAILED]
    assert red == [20, 20, 5]
    assert (palette.PREDICTED, 40) in ticks(picture)  # what it would have needed
    assert picture.text.splitlines()[1:4] == [
        "DDP: out of memory at 20 MB",
        "half: out of memory at 20 MB, measured 9 MB (parameters 9), predicted 40",
        "own: out of memory at 5 MB"]
    on_the_sheet(picture)


def test_a_rank_out_of_memory_without_a_limit_is_refused():
    with pytest.raises(ValueError, match="'DDP' ran out of memory, but at how many bytes"):
        memory_bars([MemoryRow("DDP", out_of_memory=True)])


def test_cuda_and_nccl_are_drawn_after_the_tensors():
    picture = memory_bars([MemoryRow("a\nb", predicted=SHARD, overhead=2e9)], note="Fits.")
    assert widths(picture)[-1] == (palette.PAPER, 2, False)
    assert "a, b: predicted 15.5 GB (" in picture.text and picture.text.endswith("\nFits.")
    assert ", and 2 GB for CUDA and NCCL" in picture.text
    on_the_sheet(picture)


@pytest.mark.parametrize("longest", [1, 14, 20, 45, 84, 130, 200, 1100, 4000])
def test_names_of_gpus_never_overlap(longest):
    rows = [MemoryRow("ZeRO-3, a long name", Memory(longest * GB, buffers=2 * GB), guessed=9 * GB),
            MemoryRow("small", Memory(1 * GB))]
    picture = memory_bars(rows, capacities=LINES)
    on_the_sheet(picture)
    figure, names = picture.figure, {name for _, name in LINES}
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    shown = [text for text in figure.axes[0].texts
             if {*text.get_text().strip().split(", ")} <= names]
    assert shown or longest == 1
    assert not [1 for i, one in enumerate(boxes) for other in boxes[:i] if one.overlaps(other)]
    for text in shown:  # nor does a line run through a name
        box = text.get_window_extent()
        for lines in figure.axes[0].collections:
            (x, low), (_, high) = figure.axes[0].transData.transform(lines.get_segments()[0])
            assert not (box.x0 < x < box.x1 and min(low, high) < box.y0 + 1 < max(low, high))


def test_capacities_that_belong_on_a_chart():
    lines = [(10, "a"), (20, "b"), (20.2, "c"), (100, "d")]
    assert capacities_shown(lines, 12) == lines[:3]  # crossed, and the next, with its twin
    assert capacities_shown(lines, 21) == lines[:3]  # d is too far off
    assert capacities_shown(lines, 30) == lines
    assert capacities_shown([(100, "the limit")], 1) == [(100, "the limit")]
    assert capacities_shown([], 1) == []
    assert merge_close([(20.2, "c"), (20, "b"), (10, "a")], 1) == [(10, "a"), (20, "c, b")]


@pytest.mark.parametrize("value, words", [
    (1234.5, "1,234"), (999.96, "1,000"), (227.5, "227.5"), (840, "840"), (15.55, "15.6"), (0, "0"),
    (0.1234, "0.123")])
def test_numbers_of_labels(value, words):
    assert format_number(value) == words


def test_phases_are_columns():
    held = {"build": Memory(1e6), "peak": Memory(1e6, 2e6)}
    picture = memory_columns(held, {"peak": 4e6}, "of one rank")
    bars = picture.figure.axes[0].patches
    assert [(bar.get_y(), bar.get_height()) for bar in bars] == [(0, 1), (0, 1), (1, 2)]
    assert picture.text.splitlines() == [
        "MB of one rank", "build: measured 1 MB (parameters 1)",
        "peak: measured 3 MB (parameters 1, gradients 2), predicted 4"]
    on_the_sheet(picture)


def test_columns_that_were_only_predicted_are_pale():
    picture = memory_columns({"8": Memory(2e9)}, {"4": Memory(4e9), "8": Memory(2e9)},
                             capacities=LINES, source="dry run", note="Said above.")
    assert [bar.get_hatch() is not None for bar in picture.figure.axes[0].patches] == [True, False]
    assert "4: predicted 4 GB (parameters 4)\n8: dry run 2 GB (parameters 2), predicted 2" in (
        picture.text)
    assert picture.text.endswith("\nSaid above.")
    on_the_sheet(picture)


def drawn_live(held, overhead=2e9, lines=(("small", 10, False), ("large", 40, True))):
    gpus = [(size * GB, name, fits) for name, size, fits in lines]
    return memory_html(held, overhead, gpus, "Fits <on> the large one.", "And more.")


def test_the_live_drawing_has_the_same_lengths():
    html = drawn_live(SHARD)
    chart = ElementTree.fromstring(re.search(r"<svg viewBox.*?</svg>", html)[0])
    boxes = [box for box in chart.findall("rect")]
    lengths = [float(box.get("width")) for box in boxes]
    sizes = [*SHARD.by_name().values(), 2e9]
    assert lengths == pytest.approx([n / sum(sizes) * sum(lengths) for n in sizes], abs=0.02)
    assert [box.get("fill") for box in boxes[:6]] == list(palette.MEMORY.values())
    places = {line.find("title").text.split(":")[0]: float(line.get("x1"))
              for line in chart.findall("line") if line.find("title") is not None}
    left = float(boxes[0].get("x"))
    assert places["small"] - left == pytest.approx(10e9 / sum(sizes) * sum(lengths), abs=0.1)
    assert "✗ small" in html and "✓ large" in html and "Fits &lt;on&gt; the large one." in html


@pytest.mark.parametrize("total", [0.001, 1, 9, 30, 39, 45, 400, 3000])
def test_all_of_the_live_drawing_is_within_its_frame(total):
    html = drawn_live(Memory(total * GB))
    chart = ElementTree.fromstring(re.search(r"<svg viewBox.*?</svg>", html)[0])
    _, _, width, height = map(float, chart.get("viewBox").split())
    for text in chart.iter("text"):
        long = 7.6 * len("".join(text.itertext())) if text.get("text-anchor") == "start" else 0
        assert 0 <= float(text.get("x")) and float(text.get("x")) + long <= width
        assert float(text.get("y")) <= height


def test_a_live_drawing_of_nothing_still_has_its_axis():
    html = drawn_live(None, lines=[("small", 10, None), ("large", 40, None)])
    assert "small" in html and "✓" not in html and "<rect" not in html.split("</svg>")[0]


def test_controls_redraw_the_picture_for_what_they_say():
    seen = []

    def picture(**chosen):
        seen.append(chosen)
        return memory_bars([MemoryRow("a", Memory(chosen["nbytes"]))], note=chosen["words"])

    controls = Controls([Choice("nbytes", "bytes", [("1", 1), ("2", 2)], 1),
                         Choice("words", "words", [("x", "x"), ("y", "y")], "y", "menu")], picture)
    grid, image = controls.box().children
    before = image.value
    grid.children[0].value = 2
    assert seen == [dict(nbytes=1, words="y"), dict(nbytes=2, words="y")]
    assert image.value != before and image.value.startswith("<img alt=")
    assert repr(controls) == controls.still.text
