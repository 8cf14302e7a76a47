"""scripts/work: the student's copies of the notebooks, before and after a pull."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAME = "03_zero_stages"
FIRST = {"title": "# Zero", "gap-1": "x = ...", "gap-2": "y = ..."}
NEWER = {"title": "# Zero stages", "gap-1": "x = ...", "gap-2": "y = ...  # bytes", "more": "z = 1"}


def write(path, cells):
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"id": key, "cell_type": "code", "source": [text], "outputs": []}
             for key, text in cells.items()]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))


def texts(path):
    return {cell["id"]: "".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]}


class Tree:
    """A repository with one notebook, and a student."""

    def __init__(self, root):
        self.root, self.mine = root, root / "work" / f"{NAME}.ipynb"
        self.publish(FIRST)

    def publish(self, cells):
        write(self.root / "notebooks" / f"{NAME}.ipynb", cells)

    def run(self, *arguments):
        command = [sys.executable, ROOT / "scripts" / "work", "--root", self.root, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    def says(self, *arguments):
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def tree(tmp_path):
    made = Tree(tmp_path)
    assert made.says() == "" and texts(made.mine) == FIRST
    return made


def test_work_is_kept_while_nothing_new_comes(tree):
    write(tree.mine, FIRST | {"gap-1": "x = 1"})
    assert tree.says() == "" and texts(tree.mine)["gap-1"] == "x = 1"


def test_an_unchanged_copy_is_renewed_also_if_it_was_run(tree):
    ran = json.loads(tree.mine.read_text())
    ran["cells"][1]["outputs"] = [{"output_type": "stream", "text": "ran"}]
    tree.mine.write_text(json.dumps(ran))
    tree.publish(NEWER)
    assert "is renewed" in tree.says() and texts(tree.mine) == NEWER
    assert tree.says() == ""


def test_changes_are_kept_until_the_new_version_is_taken(tree):
    mine = FIRST | {"gap-1": "x = 1", "gap-2": "y = 2", "own": "print(x)"}
    write(tree.mine, mine)
    tree.publish(NEWER)
    for _ in range(2):  # at each start
        assert "scripts/work --take 03" in tree.says() and texts(tree.mine) == mine
    said = tree.says("--take", "03")
    assert "with 1 cells of yours; 2 more are not in it" in said and "'print(x)'" in said
    assert texts(tree.mine) == NEWER | {"gap-1": "x = 1"}
    assert texts(tree.root / "work" / f"{NAME}.old-1.ipynb") == mine
    assert tree.says() == ""


def test_taking_twice_loses_nothing(tree):
    write(tree.mine, FIRST | {"gap-1": "x = 1"})
    for _ in range(2):
        tree.says("--take", f"notebooks/{NAME}.ipynb")
    assert texts(tree.mine)["gap-1"] == "x = 1"
    assert {path.name for path in tree.mine.parent.glob("*.old-*")} == {
        f"{NAME}.old-1.ipynb", f"{NAME}.old-2.ipynb"}


def test_an_answer_goes_into_a_cell_that_the_new_version_changed(tree):
    """Also into one that has another id, and to the cell of the same rank of its exercise."""
    gap = "# Exercise 3.2: {}\ndef shard(x):\n    {}\n\n{}"
    old = {"a": gap.format("shard", "raise NotImplementedError", "show(1)"),
           "b": "# Exercise 3.2, continued\ny = ..."}
    tree.publish(old)
    tree.says()
    write(tree.mine, {"a": gap.format("shard", "y = x\n    return y", "show(1)"),
                      "b": "# Exercise 3.2, continued\ny = 2"})
    tree.publish({"new": "# Exercise 3.1\nz = 1", "c": gap.format(
        "partition", "raise NotImplementedError", "lab.show(1)"),
        "d": "# Exercise 3.2, continued\ny = ..."})
    assert "with 2 cells of yours." in tree.says("--take", "03")
    assert texts(tree.mine) == {"new": "# Exercise 3.1\nz = 1", "c": gap.format(
        "partition", "y = x\n    return y", "lab.show(1)"),
        "d": "# Exercise 3.2, continued\ny = 2"}


def test_answers_that_fit_nowhere_are_named_by_their_exercise(tree):
    tree.publish({"a": "# Exercise 3.2\nx = ...", "b": "# Exercise 3.3\ny = ..."})
    tree.says()
    write(tree.mine, {"a": "# Exercise 3.2\nx = 1", "b": "# Exercise 3.3\ny = 2",
                      "mine": "p(x)\nq"})
    tree.publish({"a": "# Exercise 3.2\nsomething = else_()"})
    said = tree.says("--take", "03")
    assert "with 0 cells of yours; 3 more are not in it" in said
    assert "has not got them: exercise 3.2, exercise 3.3, 'p(x)'. Yours as it was" in said


def test_an_exercise_that_another_notebook_has_now_is_named_with_it(tree):
    tree.publish({"a": "# Exercise 3.2\nx = ...", "b": "# Exercise 3.3\ny = ..."})
    tree.says()
    write(tree.mine, {"a": "# Exercise 3.2\nx = 1", "b": "# Exercise 3.3\ny = 2"})
    tree.publish({"c": "z = 1"})
    write(tree.root / "notebooks" / "03b_more.ipynb", {"b": "# Exercise 3.3\ny = ..."})
    said = tree.says("--take", "03_zero_stages")
    assert "exercise 3.2, exercise 3.3. Exercise 3.3 is in 03b_more now. Yours as" in said


def test_a_broken_copy_is_left_alone_and_can_be_replaced(tree):
    tree.mine.write_text("{half written")
    tree.publish(NEWER)
    assert "--take 03" in tree.says() and tree.mine.read_text() == "{half written"
    tree.says("--take", "03")
    assert texts(tree.mine) == NEWER


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_tree_that_cannot_be_written_is_said_in_a_sentence(tmp_path):
    tree = Tree(tmp_path)
    tmp_path.chmod(0o500)
    done = tree.run()
    tmp_path.chmod(0o700)
    assert done.returncode == 1 and done.stderr.startswith("work/ could not be filled")


def test_notebooks_that_share_their_digits(tree):
    names = ["07a_tensor", "07b_pipeline"]
    for name in names:
        write(tree.root / "notebooks" / f"{name}.ipynb", FIRST)
    assert tree.says() == "" and {path.stem for path in tree.mine.parent.glob("*.ipynb")} == {
        NAME, *names}
    assert [f"work/{name}.ipynb" in tree.says("--take", "07b") for name in names] == [False, True]
    said = tree.says("--take", "07")
    assert all(f"work/{name}.ipynb" in said for name in names)


def test_bad_arguments_get_a_sentence(tree):
    done = tree.run("--take", "09")
    assert done.returncode == 2 and f"no notebook 09; there are: {NAME}" in done.stderr


def test_git_ignores_the_students_work():
    path = "work/03_zero_stages.ipynb"
    assert subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT).returncode == 0


def test_students_of_one_copy_each_have_a_folder_of_their_own(tmp_path):
    tree = Tree(tmp_path / "workbook")
    for name in ("ada", "emmy"):
        mine = tmp_path / name / "work"
        assert tree.says("--to", mine) == "" and texts(mine / f"{NAME}.ipynb") == FIRST
    assert not tree.mine.exists()


def test_a_reset_notebook_is_new_and_the_old_one_is_kept(tree):
    write(tree.mine, FIRST | {"gap-1": "x = 1"})
    said = tree.says("--reset", "03")
    assert said == (f"work/{NAME}.ipynb is new, without answers. Yours as it was: "
                    f"work/{NAME}.old-1.ipynb.\n")
    assert texts(tree.mine) == FIRST
    assert texts(tree.mine.with_name(f"{NAME}.old-1.ipynb"))["gap-1"] == "x = 1"
    tree.publish(NEWER)
    assert "had no changes" in tree.says()  # its original is the fresh one's


def test_a_notebook_that_is_gone_can_be_reset(tree):
    tree.mine.unlink()
    assert tree.says("--reset", NAME) == f"work/{NAME}.ipynb is new, without answers.\n"


def test_one_notebook_is_not_taken_and_reset(tree):
    done = tree.run("--take", "03", "--reset", "03")
    assert done.returncode == 2 and "choose one" in done.stderr
