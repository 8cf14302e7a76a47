"""Parts B and C of notebook 08: full disks, kills at file calls, and what their pictures show."""


import threading
from unittest import mock

import pytest
from _build.definitions import definitions

import labs.surviving_failure as lab
from labs.checks.verdicts import Verdict
from labs.faults import full_disk, slow_disk
from labs.faults.kill_process import kill_at_steps
from labs.meters import typical_step
from labs.surviving_failure import crash_series, stalls
from labs.surviving_failure.damage import DAMAGES

right = definitions("08_surviving_failure")


def fill(folder):
    def write(full):
        (folder / "old").write_bytes(b"x" * 100_000)
        with full(), pytest.raises(OSError) as caught:
            (folder / "new").write_bytes(b"x" * 900_000)
        return caught.value.errno
    return write


@pytest.mark.parametrize("refuses", [False, True], ids=["small disk", "limit"])
def test_full_disk(tmp_path, refuses):
    with mock.patch.object(full_disk, "_mount", lambda *_: False) if refuses else mock.MagicMock():
        number, kind = full_disk.on_full_disk(fill(tmp_path), str(tmp_path), 500_000, 300_000)
    assert number == (28 if "disk of 0.5 MB" in kind else 27)  # no space left; file too large
    assert not refuses or kind == "a limit of 0.3 MB on the size of files"
    if number == 28:
        assert not list(tmp_path.iterdir())  # nobody else ever saw that disk


def test_full_disk_raises_what_was_raised(tmp_path):
    def fails(full):
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        full_disk.on_full_disk(fails, str(tmp_path), 500_000, 300_000)


def test_kills_at_each_call(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    found = [(name, path.read_bytes()) for name in
             kill_at_steps(lambda: right.atomic_write(path, b"new"))]
    assert found == [("fsync", b"old"), ("replace", b"old"), ("fsync", b"new")]


def test_late_threads():
    began = threading.Event()
    with slow_disk.late_threads() as go:
        thread = threading.Thread(target=began.set)
        thread.start()
        assert not began.wait(0.05)
        go.set()
        assert began.wait(5)
    thread.join()


def test_slow_disk(tmp_path):
    import time

    disk, began = slow_disk.SlowDisk(right.atomic_write, 1e6), time.monotonic()
    disk(tmp_path / "file", b"x" * 100_000)
    assert time.monotonic() - began >= 0.1
    assert (tmp_path / "file").stat().st_size == 100_000


@pytest.mark.usefixtures("warm_launcher")
def test_damage_is_named():
    table = lab.show_damage(right.save_checkpoint, right.newest_checkpoint)
    assert len(table.rows) == len(DAMAGES) == 16
    rows = {what: (found, said) for what, found, said in table.rows}
    assert rows["a flipped bit in a shard"] == (
        "step_9", "step_10: rank_0.pt is not what was saved")
    assert rows["all of them bad"][0] == "–"


@pytest.mark.usefixtures("warm_launcher")
def test_kills_lose_nothing_but_what_is_written_over():
    with mock.patch.object(crash_series, "SHOWN_KILLS", 6):
        picture = lab.show_kills(right.save_checkpoint, right.newest_checkpoint)
    students, naive = picture.data[0].values()
    assert len(students) == len(naive) == 6
    assert not any(kill.is_lost for kill in students)
    assert any(kill.is_lost for kill in naive)
    assert "0 lost" in picture.text


@pytest.mark.parametrize("plain, drawn", [(0.02, True), (0.026, True), (0.03, False),
                                          (0.01, False)])
def test_steps_unlike_those_before_are_not_drawn(plain, drawn):
    """A step took 20 ms before the job began to save."""
    steps = [plain if number % stalls.EVERY else 0.1 for number in range(1, 2 * stalls.EVERY + 2)]
    found = stalls.Stalls({way: steps for way in (stalls.SYNCHRONOUS, stalls.STUDENTS,
                                                  stalls.TORCHS)}, 0.02, 0.01, 0.01, 0.1, 10**6)
    with mock.patch.object(stalls, "measure_stalls", lambda *_: found):
        picture = lab.show_stalls(right.AsyncSaver, right.atomic_write)
    assert isinstance(picture, Verdict) is not drawn
    if not drawn:
        assert picture.passed is None
        assert f"a step without a save: {1e3 * plain:.0f} ms, but usually 20 ms" in picture.sentence


@pytest.mark.slow
@pytest.mark.usefixtures("warm_launcher")
def test_stalls(monkeypatch):
    # A busy machine breaks no test.
    monkeypatch.setattr(typical_step, "MAX_DEVIATION", float("inf"))
    picture = lab.show_stalls(right.AsyncSaver, right.atomic_write)
    found, _ = picture.data
    assert list(found.seconds) == [stalls.SYNCHRONOUS, stalls.STUDENTS, stalls.TORCHS]
    synchronous = found.stall(stalls.SYNCHRONOUS)
    assert synchronous > 0.9 * found.slow
    assert found.stall(stalls.STUDENTS) < 0.5 * synchronous


@pytest.mark.slow
@pytest.mark.usefixtures("warm_launcher")
def test_snapshots():
    panels = lab.show_snapshot_memory(right.AsyncSaver).data
    in_flight, after = panels["a save is in flight"].values, panels["it is done"].values
    assert in_flight == pytest.approx([64e6, 128e6, 64e6, 64e6], rel=0.1)
    assert after == pytest.approx([0, 0, 0, 64e6], abs=6e6)
