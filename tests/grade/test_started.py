"""Scripts that are judged apart: they run in the sandbox, and what comes back is what a run of a
script leaves, or it is refused."""

import json
from dataclasses import replace

import pytest
import torch
from _grade import started
from _grade.outcomes import BROKEN, PASSED, WRONG
from _grade.remote import Forged
from _grade.sandbox import Sandbox
from grading import ROOT, grade_one, looked_at, needs_namespaces, on_scripts

from labs.checks.scripts import forked
from labs.checks.scripts.probe import Batch, RankRecord, Step


@pytest.fixture(scope="module")
def sandbox():
    found = Sandbox(["labs.manual_ddp", "labs.start_here"], seconds=120)
    yield found
    found.close()


def graded(sandbox, lessons, path, lesson, number, is_cell, source):
    """The solution of a lesson with another source in the cell for which is_cell(its source)."""
    notebook = json.loads((ROOT / "solutions" / f"{lesson}.ipynb").read_text())
    [cell] = [cell for cell in notebook["cells"] if is_cell("".join(cell["source"]))]
    cell["source"] = source
    path.write_text(json.dumps(notebook))
    one = looked_at(path, lessons)
    return grade_one(sandbox, one, next(each for each in one.lesson.exercises
                                        if each.number == number))


def ddp(sandbox, lessons, path, script):
    return graded(sandbox, lessons, path, "02_manual_ddp", "2.12",
                  lambda source: source.startswith("%%writefile ddp.py"),
                  f"%%writefile ddp.py\n{script}")


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("name", on_scripts.OF_0_5)
def test_a_result_without_ranks_does_not_pass(sandbox, lessons, tmp_path, name):
    found = graded(sandbox, lessons, tmp_path / "ada.ipynb", "00_start_here", "0.5",
                   lambda source: "\nscript = HEAD" in f"\n{source}",
                   f"script = {on_scripts.OF_0_5[name]!r}\n")
    assert found.outcome in (WRONG, BROKEN), found
    if name == "prints_the_result_alone":
        assert "ranks joined a process group" in found.sentence


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("where", on_scripts.LOOKS_FOR_WHAT_IS_EXPECTED)
def test_nothing_that_is_expected_is_where_a_script_runs(sandbox, lessons, tmp_path, where):
    found = ddp(sandbox, lessons, tmp_path / "ada.ipynb",
                on_scripts.LOOKS_FOR_WHAT_IS_EXPECTED[where])
    assert found.outcome == WRONG and "ValueError: []" in found.sentence, found


@pytest.mark.slow
@needs_namespaces
def test_a_record_of_no_training_does_not_pass(sandbox, lessons, tmp_path):
    found = ddp(sandbox, lessons, tmp_path / "ada.ipynb", on_scripts.WRITES_THE_RECORD_ITSELF)
    assert (found.outcome, found.sentence) == (WRONG, "2 ranks, 22 samples: rank 0 ended without "
                                               "an optimizer step")


@pytest.mark.slow
@needs_namespaces
def test_the_worked_script_passes(sandbox, lessons, tmp_path):
    one = looked_at(ROOT / "solutions" / "02_manual_ddp.ipynb", lessons)
    exercise = next(each for each in one.lesson.exercises if each.number == "2.12")
    assert grade_one(sandbox, one, exercise).outcome == PASSED


def a_run(**changes) -> forked.Run:
    step = Step([Batch(torch.zeros(3, 8), 0.5)], 0.1, {"w": torch.zeros(2)}, ["w"], 8, 0.0, 1.0)
    found = forked.Run("ddp.py", 2, ("--seed", "3"), 0, [0, 0], 1.5,
                       [RankRecord([step]), RankRecord([step], shards={"w": (0, 1, 2)})],
                       ["", ""], [1, 1], ["", "all_reduce"], 0, {"steps": []}, "m.json")
    return replace(found, **changes)


def away(answer):
    """forked.run as the judge has it, where the other process sends this."""
    return started._away("run", forked.run, lambda *_: answer, Forged)("ddp.py", (), 2)


def test_what_a_run_leaves_is_taken():
    found = away((a_run(script="other.py"), {}))
    assert found.script == "ddp.py" and found.records[1].shards == {"w": (0, 1, 2)}


@pytest.mark.parametrize("answer", [
    a_run(), (a_run(),), (a_run(), {}, 1), ("passed", {}), (a_run(codes=[0]), {}),
    (a_run(ranks=1, codes=[0], records=[None], output=[""], batches=[1], waiting=[""]), {}),
    (a_run(codes=[0, "0"]), {}), (a_run(records=[None, {"steps": []}]), {}),
    (a_run(code=True), {}), (a_run(seconds="1"), {}), (a_run(output=["", 1]), {}),
    (a_run(records=[None, RankRecord([1])]), {}),
    (a_run(records=[None, RankRecord(shards={"w": (0, 1)})]), {}),
    (a_run(records=[None, RankRecord(parameters={"w": [1.0]})]), {})])
def test_what_no_run_leaves_is_forged(answer):
    with pytest.raises(Forged, match="sends what no run of a script leaves"):
        away(answer)


@pytest.mark.parametrize("files", [
    {"../up": b""}, {"/abs": b""}, {"": b""}, {"a\0b": b""}, {"a": b"", "a/b": b""},
    {"x" * 501: b""}, {"big": bytes(started.BYTES + 1)},
    {str(number): b"" for number in range(started.FILES + 1)}])
def test_files_stay_in_their_folder(tmp_path, files):
    (tmp_path / "in").mkdir()
    with pytest.raises(started.Misfit):
        started.write_files(files, str(tmp_path / "in"))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_files_come_back_as_they_are(tmp_path):
    (tmp_path / "old").mkdir()
    started.write_files({"a.json": b"{}", "epoch_1/0.distcp": b"\0"}, str(tmp_path))
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert started.read_files(str(tmp_path)) == {"a.json": b"{}", "epoch_1/0.distcp": b"\0"}
    assert not (tmp_path / "old").exists()
