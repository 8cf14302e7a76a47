"""A whole class in one run: hostile submissions among honest ones."""

import csv
import json
import os
import re
from types import SimpleNamespace

import psutil
import pytest
from _grade import judged_apart, session
from _grade.__main__ import check
from _grade.sandbox import BROKEN, TIMED_OUT
from grading import needs_namespaces, on_the_machine, students


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The class, graded: folder, out, kinds of submissions and records by student. 2.1 too is
    checked under the guard's eyes, as exercises on ranks are."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(judged_apart, "EXERCISES", frozenset())
        yield _graded(tmp_path_factory)


def _graded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("class")
    (folder / "in").mkdir()
    beside = folder / "in" / "somebody_elses.txt"
    beside.write_text("private")
    kinds = students.hand_in(folder / "in")
    out = folder / "grades.csv"
    options = check([str(folder / "in"), "--out", str(out), "--only", "0.1,2.1", "--at-once", "2",
                     "--seconds", "15"])
    before = set(psutil.pids())
    code = session.run(options, [folder / "in"], out)
    if any(records(out)[name]["exercises"][0]["outcome"] == TIMED_OUT for name in kinds["right"]):
        options.seconds = 60  # the machine is busy; what is done stays
        code = session.run(options, [folder / "in"], out)
    # All of a sandbox is below the zygote. Tests beside this one have theirs, which are below them.
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline", "ppid"])
            if "_grade.zygote" in (process.info["cmdline"] or []) and process.pid not in before
            and process.info["ppid"] in (1, os.getpid())]
    return SimpleNamespace(folder=folder, out=out, kinds=kinds, code=code, beside=beside, left=left,
                           options=options, records=records(out))


def records(out) -> dict[str, dict]:
    lines = (out.with_suffix("") / "results.jsonl").read_text().splitlines()
    return {one["student"]: one for one in map(json.loads, lines)}


@pytest.mark.slow
@needs_namespaces
class TestClass:
    def test_forty_honest_ones_get_their_point(self, graded):
        assert len(graded.kinds["right"]) == 40
        found = {name: graded.records[name]["exercises"][0] for name in graded.kinds["right"]}
        assert {name: one for name, one in found.items() if one["points"] != 1} == {}
        assert not any(graded.records[name]["forged"] for name in graded.kinds["right"])

    def test_an_honest_mistake_is_no_attack(self, graded):
        for name in graded.kinds["wrong"]:
            one = graded.records[name]
            assert (one["exercises"][0]["points"], one["forged"]) == (0, []), one
        assert "plain mean" in graded.records["plain_mean"]["exercises"][0]["sentence"]

    def test_no_hostile_one_gains_a_point_and_each_has_its_sentence(self, graded):
        assert len(graded.kinds["hostile"]) >= 25
        for name, words in graded.kinds["hostile"].items():
            one = graded.records[name]
            sentence = one["exercises"][0]["sentence"]
            print(f"{name:32s} {one['exercises'][0]['outcome']:10s} {sentence[:100]!r}")
            assert one["exercises"][0]["points"] == 0, name
            assert re.search(words, "\n".join([sentence, *one["remarks"]])), (name, one)

    def test_nothing_outlives_its_grading(self, graded):
        assert graded.left == []
        assert not [p for p in psutil.process_iter(["cmdline"])
                    if on_the_machine.SECONDS in (p.info["cmdline"] or [])]

    def test_nothing_outside_is_touched(self, graded):
        assert graded.beside.read_text() == "private"
        assert {path.name for path in graded.folder.iterdir()} == {"in", "grades", "grades.csv"}

    def test_exit_code_says_that_some_forged(self, graded):
        assert graded.code == 1

    def test_one_row_a_student(self, graded):
        rows = rows_of(graded.out)
        assert len(rows) == sum(map(len, graded.kinds.values()))
        row = next(row for row in rows if row["student"] == "honest_00")
        assert (row["points"], row["of"], row["2.1"]) == ("1", "1", "1")
        assert row["2.1 says"].startswith("the shards' gradients give")

    def test_pages(self, graded):
        pages = graded.out.with_suffix("")
        page = (pages / "sum.html").read_text()
        assert "Hint" in page and "0 of 1 points" in page and "honest_00" not in page
        whole = (pages / "class.html").read_text()
        assert "the result is the plain mean of the gradients" in whole
        assert "<svg" in whole and (pages / "class.svg").stat().st_size > 500

    def test_a_second_run_grades_nothing_again_and_gives_the_same(self, graded, capsys):
        kept = {name for name, one in graded.records.items()
                if one["exercises"][0]["outcome"] not in (TIMED_OUT, BROKEN)}
        before = {row["student"]: row for row in rows_of(graded.out)}
        files = [graded.folder / "in" / f"{name}.ipynb" for name in kept]
        assert len(kept) > 80 and session.run(graded.options, files, graded.out) == 1
        assert f"{len(kept)} graded before, and unchanged" in capsys.readouterr().out
        assert rows_of(graded.out) == [before[name] for name in sorted(kept)]


def rows_of(out) -> list[dict[str, str]]:
    with open(out, newline="") as file:
        return list(csv.DictReader(file))
