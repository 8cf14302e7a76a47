"""The exercises of the notebooks, from their sources: which cells have gaps, and how each check is
called."""

import ast
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

import _notebooks

from _grade import syntax


@dataclass(frozen=True)
class CleanCell:
    """A code cell as the student gets it. gap: whether it is theirs to fill in."""

    id: str
    source: str
    gap: bool


@dataclass(frozen=True)
class Exercise:
    """number: "0.1". check: a function of the package. arguments: what it is called with, as text.
    cell: where, in the lesson's code cells. points: what the notebook gives for it."""

    number: str
    check: str
    arguments: tuple[str, ...]
    cell: int
    points: float = 1.0


@dataclass(frozen=True)
class Lesson:
    """One notebook: its code cells without answers, and its exercises in their order."""

    name: str
    cells: list[CleanCell]
    exercises: list[Exercise] = field(default_factory=list)

    @property
    def package(self) -> str:
        return f"labs.{_notebooks.package(self.name)}"


def read_lessons(root: Path) -> list[Lesson]:
    """All lessons of a checkout."""
    return [_read(root, path.stem) for path in _notebooks.paths(root / "solutions")]


def _read(root, name) -> Lesson:
    # here, because they import jupytext: the processes that look at submissions do without
    from _build.build import read_lesson
    from _build.student import exercise_number

    built = read_lesson(root, name)
    with_gaps = {cell.id for cell in built.cells if cell.regions}
    by_id = {cell.id: cell for cell in built.cells}
    cells = [cell for cell in built.student["cells"] if cell["cell_type"] == "code"]
    lesson = Lesson(name, [CleanCell(cell["id"], "".join(cell["source"]), cell["id"] in with_gaps)
                           for cell in cells])
    for place, clean in enumerate(lesson.cells):
        cell, metadata = by_id[clean.id], cells[place]["metadata"]
        for call in check_calls(clean.source):
            number = exercise_number(built.cells, cell, len(cell.lines))
            lesson.exercises.append(Exercise(number, call.func.attr, tuple(
                ast.unparse(each) for each in call.args), place,
                metadata.get("nbgrader", {}).get("points", 1.0)))
    return lesson


@dataclass(frozen=True)
class Heading:
    """What a page says of an exercise: its title, its notebook, and the anchor of its section on
    the notebook's page of the book. written: whether a part of it has no check, so that somebody
    has to read it."""

    number: str
    title: str
    lesson: str
    anchor: str
    written: bool


_BY_HAND = "no check reads"  # how a notebook says that an answer has no check


@functools.cache
def headings(root: Path) -> dict[str, Heading]:
    """Number of an exercise -> its heading, of all notebooks."""
    from _build.exercises import exercises
    from _build.source import read_source
    from _build.student import exercise_number

    found = {}
    for path in _notebooks.paths(root / "solutions"):
        cells = read_source(path, path.stem)[0]
        written = {exercise_number(cells, cell, len(cell.lines)) for cell in cells
                   if cell.kind == "code" and _BY_HAND in cell.source}
        for each in exercises(cells):
            by_hand = each.number in written or bool(each.points and each.check is None)
            found[each.number] = Heading(each.number, each.title.replace("`", ""), path.stem,
                                         _anchor(f"Exercise {each.number} {each.title}"), by_hand)
    return found


def _anchor(heading) -> str:
    """The id that Sphinx gives a heading's section (docutils.nodes.make_id, for ASCII)."""
    return re.sub(r"[^a-z0-9]+", "-", heading.lower().encode("ascii", "ignore").decode()).strip("-")


@functools.cache
def titles(root: Path) -> dict[str, str]:
    """Name of a notebook -> "02 Manual DDP"."""
    return {path.stem: re.search(r"^# # (.+)$", path.read_text(encoding="utf-8"),
                                 re.MULTILINE)[1].replace(" · ", " ", 1)
            for path in _notebooks.paths(root / "solutions")}


def check_calls(source: str) -> list[ast.Call]:
    """The calls lab.check_...(...) at a cell's top level."""
    try:
        body = syntax.parse(source).body
    except SyntaxError:
        return []
    return [node.value for node in body if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
            and node.value.func.attr.startswith("check_")
            and getattr(node.value.func.value, "id", "") == "lab"]
