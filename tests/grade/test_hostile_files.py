"""Hostile files in a class: each has its row, honest ones keep their points, and neither the reader
nor the machine keeps anything of them."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from _grade import files
from grading import ROOT, needs_namespaces, on_the_reader, students

pytestmark = [pytest.mark.slow, needs_namespaces]
CGROUPS = [Path("/sys/fs/cgroup") / name for name in ("", "memory", "pids")]


def machine(home) -> dict[str, list[str]]:
    """What a grader could have left: by folder, the paths in it. The temporary files of others who
    work here are not its."""
    ours = [each.name for each in os.scandir("/dev/shm")
            if 60_000 <= each.stat(follow_symlinks=False).st_uid < 65_000]
    return {"/": sorted(os.listdir("/")), "/dev/shm": ours,
            **{str(folder): sorted(map(str, Path(folder).rglob("*")))
               for folder in ("/student", home)}}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Our command on the class, started in its folder, where there are modules of its own, too."""
    folder = tmp_path_factory.mktemp("class")
    submissions, home, temporary = (folder / name for name in ("in", "home", "tmp"))
    for each in (submissions, home, temporary):
        each.mkdir()
    words = on_the_reader.hand_in(submissions)
    for name in ("ada", "zoe"):
        (submissions / f"{name}.ipynb").write_bytes(on_the_reader.notebook(students.RIGHT[1]))
    for name in ("json", "argparse", "_grade", "labs", "torch"):
        (submissions / f"{name}.py").write_text("open('ran', 'a').write(__name__)")
    before = machine(home)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "_grade", ".", "--out", folder / "g.csv", "--only", "2.1"],
        cwd=submissions, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"HOME": str(home), "TMPDIR": str(temporary),
                          "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"})
    said, _ = process.communicate(timeout=900)
    with open(folder / "g.csv", newline="", encoding="utf-8") as file:
        rows = {row["student"].removeprefix("'"): row for row in csv.DictReader(file)}
    groups = [path for above in CGROUPS for path in above.glob(f"workbook-{process.pid}-*")]
    return SimpleNamespace(folder=folder, words=words, rows=rows, said=said.decode(),
                           code=process.returncode, before=before, after=machine(home),
                           temporary=temporary, groups=groups, submissions=submissions)


def test_each_has_its_row_with_a_reason(graded):
    names = {"folder_loop": "again"}
    for name, words in graded.words.items():
        row = graded.rows[files.shown(names.get(name, name))]
        print(f"{row['student'][:30]:30s} {row['points']:3s} {row['2.1 says']}")
        assert re.search(words, row["forged"] or row["unreadable"] or row["2.1 says"]), (name, row)
        if not words:
            assert row["points"] == "1", (name, row)
    assert len(graded.rows) == len(graded.words) + 2 and graded.code == 1


def test_honest_ones_keep_their_points(graded):
    assert [graded.rows[name]["points"] for name in ("ada", "zoe")] == ["1", "1"]
    assert (graded.folder / "g" / "ada.html").exists()


def test_no_name_reaches_the_terminal_as_it_is(graded):
    assert "escape\\x1b[2J" in graded.said and "\x1b" not in graded.said
    assert "\\xfc\\xff" in graded.said and "line\\x0afeed" in graded.said
    lines = (graded.folder / "g" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert all("\x1b" not in json.loads(line)["student"] for line in lines)


def test_nothing_beside_them_runs(graded):
    assert not (graded.submissions / "ran").exists()


def test_nothing_is_left_on_the_machine(graded):
    assert graded.after == graded.before
    assert graded.groups == [] and list(graded.temporary.iterdir()) == []
    assert {path.name for path in graded.folder.iterdir()} == {"in", "home", "tmp", "g", "g.csv"}
