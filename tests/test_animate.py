"""scripts/animate: a small animation of a real run, and the committed ones within their limits."""

import json
import re

import pytest
from _animate import __main__ as command
from _animate import catalogue, deadlock, film, make, prefetch
from PIL import Image, ImageSequence

from labs.pictures import palette
from labs.pictures.timelines import Lifecycle
from labs.words import counted

ENTRIES = catalogue.read()


def animate(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["animate", *map(str, arguments)])
    return command.main()


def frames_in(path):
    """(image in RGB, seconds) of each frame of a file."""
    with Image.open(path) as image:
        return [(frame.convert("RGB"), frame.info["duration"] / 1e3)
                for frame in ImageSequence.Iterator(image)]


def assert_within_limits(folder, entry):
    frames = frames_in(folder / entry["file"])
    assert (folder / entry["file"]).stat().st_size <= film.LIMIT
    assert 6 <= sum(seconds for _, seconds in frames) <= 10
    # Paper is paper in every frame: one that is a shade off would flicker.
    paper = tuple(int(palette.PAPER[at:at + 2], 16) for at in (1, 3, 5))
    assert {frame.getpixel((0, 0)) for frame, _ in frames} == {paper}
    with Image.open(folder / entry["still"]) as still:
        assert [round(side / 2) for side in still.size] == entry["size"]
    assert len(entry["alt"]) > 100 and 20 < len(entry["title"]) < 100
    return frames


@pytest.mark.slow
@pytest.mark.gate
def test_a_small_animation_of_a_real_run(tmp_path, monkeypatch, capsys, warm_launcher):
    assert animate(monkeypatch, "--only", "ring", "--ranks", 3, "--out", tmp_path) == 0
    entry = catalogue.read(tmp_path)["ring"]
    frames = assert_within_limits(tmp_path, entry)
    assert len(frames) == 1 + 4 * 8  # before, and 4 steps: 7 frames on the way and one after it
    printed = capsys.readouterr()
    assert re.search(r"ring\.webp: \d+ kB, 33 frames, \d\.\d s; ring\.png: \d+ kB", printed.out)
    assert "ring: frame 31 is drawn" in printed.err
    # Real ranks: what they held is kept.
    states = json.loads((tmp_path / catalogue.RECORDED).read_text())["ring"]["states"]
    assert states[-1]["held"] == [[111, 222, 333]] * 3


@pytest.mark.parametrize("name", command.ANIMATIONS)
def test_the_committed_animations_keep_their_limits(name):
    assert_within_limits(catalogue.FOLDER, ENTRIES[name])


def test_nothing_else_is_committed_beside_them():
    files = {path.name for path in catalogue.FOLDER.iterdir()}
    assert files == {catalogue.NAME, catalogue.RECORDED} | {
        entry[kind] for entry in ENTRIES.values() for kind in ("file", "still")}


def test_the_committed_prefetch_shows_what_its_title_says():
    recorded = catalogue.read_recorded(catalogue.FOLDER)["prefetch"]
    without, with_it = (Lifecycle(**recorded[name]) for name in prefetch.NAMES)
    assert with_it.waited < prefetch.GAIN * without.waited
    assert f"{with_it.waited * 1e3:.0f} ms instead of" in ENTRIES["prefetch"]["alt"]


def test_the_deadlock_runs_until_launch_says_what_is_wrong(warm_launcher, monkeypatch):
    for name in ("BATCH", "LATER"):
        monkeypatch.setattr(deadlock, name, 0.01)
    recorded = deadlock.record(3)
    assert [[doing for _, doing, _ in events][-1] for events in recorded["events"]] == [
        "returned", "waits in all_reduce", "waits in all_reduce"]
    lanes = deadlock.still(recorded).data
    assert [lane.label for lane in lanes] == ["returned", *["waits in all_reduce (#3)"] * 2]
    assert lanes[1].place.source == "dist.all_reduce(total)"
    begin = next(deadlock.frames(recorded))[0].data
    assert {lane.label for lane in begin} == {"computes batch 1"}
    assert "rank 0 never joined all_reduce" in deadlock.alt(recorded)


def test_a_cursor_covers_what_has_not_happened_yet():
    recorded = catalogue.read_recorded(catalogue.FOLDER)["prefetch"]
    begin, end = next(prefetch.frames(recorded))[0].image(1), prefetch.still(recorded).image(1)
    assert begin.size == end.size
    middle = [image.crop((200, 100, image.width - 20, image.height // 2)) for image in (begin, end)]
    blue = tuple(int(palette.MEMORY["parameters"][at:at + 2], 16) for at in (1, 3, 5))
    assert [blue in {colour for _, colour in image.getcolors(1 << 20)} for image in middle] == [
        False, True]


def test_a_busy_machine_is_named(tmp_path, monkeypatch, capsys):
    def busy(ranks):
        raise prefetch.NotShown(f"the machine is busy, on {counted(ranks, 'rank')}")

    monkeypatch.setattr(prefetch, "record", busy)
    assert animate(monkeypatch, "--only", "prefetch", "--out", tmp_path) == 1
    assert capsys.readouterr().err.endswith("the machine is busy, on 4 ranks\n")
    assert not list(tmp_path.iterdir())


def test_nothing_is_redrawn_where_nothing_was_recorded(tmp_path, capsys):
    assert make.make(["deadlock"], tmp_path, 4, redraw=True) == 1
    assert "has no run of deadlock: leave --redraw out." in capsys.readouterr().err


@pytest.mark.parametrize("name", command.ANIMATIONS)
def test_a_page_shows_the_still_to_who_prefers_no_motion(name):
    found = catalogue.picture_html(name, "../animations")
    assert ('<source media="(prefers-reduced-motion: reduce)" '
            f'srcset="../animations/{name}.png">') in found
    assert f'<img src="../animations/{name}.webp" alt="' in found
    assert re.search(r'width="760" height="\d{3}"></picture>$', found)


def test_words_with_quotes_stay_in_their_attribute(tmp_path):
    catalogue.add(tmp_path, "any", file="any.webp", still="any.png", title="", alt='a "b" <c>',
                  size=[760, 300])
    assert 'alt="a &quot;b&quot; &lt;c&gt;"' in catalogue.picture_html("any", "here", tmp_path)
