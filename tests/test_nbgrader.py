"""Exercises, their points, and nbgrader's metadata in every notebook; then nbgrader itself, from a
virtual environment of its own, validates, releases and grades one of them."""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import nbformat
import pytest
from _build import build, exercises

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "solutions").glob("[0-9]*.py"))
NOTHING_TO_WRITE, BY_HAND = set(), set()
GRADED = "00_start_here"
SOURCE = """\
# %% [markdown]
# {heading}

# %% [markdown]
# ### Exercise 3.1 · Sum
#
# *Difficulty 1 of 5 · 5 minutes{points} · target: the sum*

# %%
# A guess, for exercise 3.1
### BEGIN SOLUTION
mine = 3
### END SOLUTION

# %%
# Exercise 3.1: first half
def one(a):
    ### BEGIN SOLUTION
    return a + 1
    ### END SOLUTION

# %%
# Exercise 3.1: second half
two = 2

### BEGIN SOLUTION
three = two + 1
### END SOLUTION
{check}
"""


def lesson(name: str, root: Path = ROOT) -> build.Lesson:
    return build.read_lesson(root, name)


def tiny(tmp_path, points="", check="\n# %%\nlab.check_sum(one, three)\n",
         heading="# 03 · Sums") -> build.Lesson:
    (tmp_path / "solutions").mkdir()
    source = SOURCE.format(points=points, check=check, heading=heading)
    (tmp_path / "solutions" / "03_tiny.py").write_text(source)
    return lesson("03_tiny", tmp_path)


def marked(nb: dict) -> dict[str, dict]:
    """grade_id -> nbgrader's metadata, of the cells that have some."""
    found = [cell["metadata"].get("nbgrader") for cell in nb["cells"]]
    return {data["grade_id"]: data for data in found if data}


def test_an_exercise_has_a_point_unless_its_line_says_otherwise(tmp_path):
    (exercise,) = exercises.exercises(tiny(tmp_path).cells)
    assert (exercise.number, exercise.title, exercise.points) == ("3.1", "Sum", 1)
    assert (exercise.difficulty, exercise.minutes, exercise.optional) == (1, 5, False)
    assert [cell.title for cell in exercise.answers] == [
        "# Exercise 3.1: first half", "# Exercise 3.1: second half"]


def test_an_exercises_line_can_give_points(tmp_path):
    (exercise,) = exercises.exercises(tiny(tmp_path, points=" · 3 points").cells)
    assert exercise.points == 3


@pytest.mark.parametrize(("heading", "points"), [
    ("# 03a · Optional: sums", 0), ("# 03 · Optional: sums", 0), ("# 03 · Sums", 1),
    ("# 03 · Optional sums", 1), ("## Optional: sums", 0), ("## Sums", 1)])
def test_an_optional_notebook_or_section_gives_no_points(tmp_path, heading, points):
    (exercise,) = exercises.exercises(tiny(tmp_path, heading=heading).cells)
    assert (exercise.points, exercise.optional) == (points, not points)


def test_some_exercises_are_optional():
    assert any(each.optional for name in NAMES for each in exercises.exercises(lesson(name).cells))


def test_answers_can_be_edited_and_checks_not(tmp_path):
    found = marked(tiny(tmp_path).student)
    assert list(found) == ["exercise-3-1", "exercise-3-1-2", "check-3-1"]
    assert found["exercise-3-1"] == {"schema_version": 3, "grade_id": "exercise-3-1", "task": False,
                                     "grade": False, "solution": True, "locked": False}
    assert found["check-3-1"] == {"schema_version": 3, "grade_id": "check-3-1", "task": False,
                                  "grade": True, "solution": False, "locked": True, "points": 1}


def test_without_a_check_somebody_gives_the_points(tmp_path):
    first, second = marked(tiny(tmp_path, check="").student).values()
    assert first["grade"] and first["solution"] and not first["locked"] and first["points"] == 1
    assert not second["grade"]


@pytest.mark.parametrize(("check", "said"), [
    ("lab.check_sum(one, three)\n", "a solution and its check in one cell"),
    ("\n# %%\nlab.check_sum(one)\n\n# %%\nlab.check_sum(three)\n", "an exercise has one")])
def test_a_check_has_a_cell_of_its_own(tmp_path, check, said):
    (problem,) = tiny(tmp_path, check=check).problems
    assert said in problem


@pytest.mark.parametrize("name", NAMES)
def test_the_points_of_every_notebook(name):
    found = exercises.exercises(lesson(name).cells)
    assert all(exercise.difficulty and exercise.minutes for exercise in found)
    assert {each.number for each in found if not each.answers} <= NOTHING_TO_WRITE
    assert {each.number for each in found if not each.check} <= NOTHING_TO_WRITE | BY_HAND
    assert {each.number: each.points for each in found} == {
        each.number: int(not each.optional and each.number not in NOTHING_TO_WRITE)
        for each in found}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", ["notebooks", "solutions"])
def test_metadata_of_every_notebook(folder, name):
    """What nbgrader's own validation asks for, without nbgrader."""
    nb = nbformat.read(ROOT / folder / f"{name}.ipynb", as_version=4)
    data = [cell.metadata.nbgrader for cell in nb.cells if "nbgrader" in cell.metadata]
    ids = [each.grade_id for each in data]
    assert ids and len(ids) == len(set(ids)) and all(re.fullmatch(r"[\w-]+", i) for i in ids)
    for each in data:
        assert each.schema_version == 3 and each.solution != each.locked
        assert each.grade == ("points" in each) and (each.grade or each.solution)


# ---- nbgrader's own words


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course with one notebook and a submission, and `nbgrader` as a command. Packages that
    are here already are seen, not installed again."""
    folder = tmp_path_factory.mktemp("course")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    (site / "workbook.pth").write_text("\n".join(p for p in sys.path if "site-packages" in p))
    done = subprocess.run([python, "-m", "pip", "install", "-q", "nbgrader==0.9.6"],
                          capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"nbgrader cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return Course(folder, python)


class Course:
    """A folder for nbgrader, with the configuration that the workbook ships."""

    def __init__(self, folder: Path, python: Path):
        self.folder, self.python = folder, python
        kernel = folder / "jupyter" / "kernels" / "python3"  # the workbook's own Python runs cells
        kernel.mkdir(parents=True)
        (kernel / "kernel.json").write_text(json.dumps({
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": "workbook", "language": "python"}))
        config = ROOT / "scripts" / "_build" / "nbgrader_config.py"
        (folder / "nbgrader_config.py").write_bytes(config.read_bytes())
        self.put(ROOT / "notebooks", "source")
        self.put(ROOT / "solutions", "right", until="check-0-2")
        self.put(ROOT / "notebooks", "submitted/half", answers=1, until="check-0-2")

    def put(self, folder, into, answers=0, until=None):
        """Copies the notebook, with the first so many exercises answered. until: leaves out what
        comes after this cell, to save its time: 00 lets ranks hang there."""
        nb = nbformat.read(folder / f"{GRADED}.ipynb", as_version=4)
        worked = {cell.id: cell for cell in lesson_cells()}
        wanted = [f"exercise-0-{number}" for number in range(1, answers + 1)]
        for cell in nb.cells:
            if cell.metadata.get("nbgrader", {}).get("grade_id") in wanted:
                cell.source = worked[cell.id].source
        names = [cell.metadata.get("nbgrader", {}).get("grade_id") for cell in nb.cells]
        nb.cells = nb.cells[:names.index(until) + 1] if until else nb.cells
        path = self.folder / into / "week0" / f"{GRADED}.ipynb"
        path.parent.mkdir(parents=True)
        nbformat.write(nb, path)

    def run(self, *arguments) -> subprocess.CompletedProcess:
        programs = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"  # nbgrader calls alembic
        environment = {**os.environ, "PATH": programs, "JUPYTER_PATH": str(self.folder / "jupyter"),
                       "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(self.folder / "ipython")}
        environment.pop("PYTEST_CURRENT_TEST", None)
        return subprocess.run([self.python, "-m", "nbgrader", *arguments], cwd=self.folder,
                              env=environment, capture_output=True, text=True, timeout=300)

    def said(self, *arguments) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def scores(self) -> dict[str, dict[str, float]]:
        """student -> name of a graded cell -> points."""
        code = ("import json; from nbgrader.api import Gradebook; "
                "book = Gradebook('sqlite:///gradebook.db'); print(json.dumps({s.student.id: "
                "{g.name: g.score for n in s.notebooks for g in n.grades} "
                "for s in book.assignment_submissions('week0')}))")
        done = subprocess.run([self.python, "-c", code], cwd=self.folder, capture_output=True,
                              text=True)
        return json.loads(done.stdout)


def lesson_cells():
    return nbformat.read(ROOT / "solutions" / f"{GRADED}.ipynb", as_version=4).cells


@pytest.mark.slow
def test_nbgrader_validates_releases_and_grades(course):
    """In its own words."""
    said = course.said("validate", f"right/week0/{GRADED}.ipynb")
    assert "Success! Your notebook passes all the tests." in said and "WARNING | Cell" not in said

    course.said("generate_assignment", "week0")
    source = nbformat.read(course.folder / "source" / "week0" / f"{GRADED}.ipynb", as_version=4)
    release = nbformat.read(course.folder / "release" / "week0" / f"{GRADED}.ipynb", as_version=4)
    assert [cell.source for cell in release.cells] == [cell.source for cell in source.cells]
    locked = [cell.source for cell in release.cells if cell.metadata.get("editable") is False]
    assert len(locked) == 5 and all(text.startswith("lab.check_") for text in locked)

    said = course.said("autograde", "week0")
    assert "Autograding" in said and "WARNING | Cell" not in said
    points = course.scores()["half"]
    assert points.pop("check-0-1") == 1 and points.pop("check-0-2") == 0
    assert not any(points.values())  # of the cells that were not handed in
