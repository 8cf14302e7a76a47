"""The exercises of a source: what a student fills in, the check that reads it, and the points.

scripts/grade counts with these points, and nbgrader with the metadata made of them here.
"""

import re
from dataclasses import dataclass, field

from _build.source import CHECK, Cell
from _build.student import exercise_number, is_guess

HEADING = re.compile(r"^### Exercise (\d+\.\d+) · (.+)$", re.MULTILINE)
# The line below an exercise's heading; "· 2 points ·" in it says that it is not worth 1.
LINE = re.compile(r"^\*Difficulty (\d) of 5 · (\d+) minutes?(?: · (\d+) points?)? · target",
                  re.MULTILINE)
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
OPTIONAL = re.compile(r"^# \d\d[a-z]? · Optional: ", re.MULTILINE)  # the title of a notebook
SCHEMA = 3  # of nbgrader's metadata


@dataclass
class Exercise:
    """An exercise. answers: the cells with its gaps. check: the cell that reads them, None where
    somebody has to, or where nothing is handed in. optional: not needed for all points."""

    number: str
    title: str
    difficulty: int = 0
    minutes: int = 0
    optional: bool = False
    stated: int | None = None
    answers: list[Cell] = field(default_factory=list)
    check: Cell | None = None

    @property
    def points(self) -> int:
        """What a right answer is worth: what the exercise's line says, or else 1; 0 for an optional
        one and where there is nothing to hand in."""
        if self.stated is not None:
            return self.stated
        return 0 if self.optional or not self.answers else 1


def is_optional(cells: list[Cell]) -> bool:
    """Whether a notebook is optional, and all of its exercises with it: its title says so."""
    return bool(cells) and bool(OPTIONAL.search(cells[0].source))


def exercises(cells: list[Cell]) -> list[Exercise]:
    """The exercises that have a heading, in the order of the source. Optional are those of a
    section or of a notebook whose title begins with "Optional"."""
    found, section, optional = {}, "", is_optional(cells)
    for cell in cells:
        if cell.kind == "markdown":
            for heading in SECTION.findall(cell.source):
                section = heading
            for number, title in HEADING.findall(cell.source):
                found[number] = _described(cell, number, title,
                                           optional or section.startswith("Optional"))
        elif exercise := found.get(exercise_number(cells, cell, len(cell.lines))):
            if any(not is_guess(cell, region) for region in cell.regions):
                exercise.answers.append(cell)
            if CHECK.search(cell.source):
                exercise.check = exercise.check or cell
    return list(found.values())


def _described(cell, number, title, optional):
    line = LINE.search(cell.source)
    difficulty, minutes, points = line.groups() if line else (0, 0, None)
    return Exercise(number, title, int(difficulty), int(minutes), optional,
                    int(points) if points else None)


def problems(cells: list[Cell]):
    """Yields one sentence for each cell that nbgrader could not lock, or would not count."""
    checked = {exercise.check.number for exercise in exercises(cells) if exercise.check}
    for cell in cells:
        if cell.kind != "code" or not CHECK.search(cell.source):
            continue
        if cell.regions:
            yield cell.problem(0, "a solution and its check in one cell; put the check into a cell "
                                  "of its own, which a grader can lock.")
        elif checked and cell.number not in checked:
            yield cell.problem(0, "a second check of one exercise; an exercise has one.")


def add_metadata(cells: list[Cell]) -> None:
    """Gives the cells of each exercise what nbgrader reads: which a student fills in, which are
    read-only checks, and the points. Both notebooks have it, so that either can be graded."""
    for exercise in exercises(cells):
        name = exercise.number.replace(".", "-")
        by_hand = exercise.check is None and exercise.points
        for number, cell in enumerate(exercise.answers, 1):
            tail = f"-{number}" if number > 1 else ""
            graded = {"points": exercise.points} if by_hand and number == 1 else {}
            _mark(cell, f"exercise-{name}{tail}", solution=True, **graded)
        if exercise.check:
            _mark(exercise.check, f"check-{name}", locked=True, points=exercise.points)


def _mark(cell, grade_id, solution=False, locked=False, **points):
    cell.metadata["nbgrader"] = {
        "schema_version": SCHEMA, "grade_id": grade_id, "grade": bool(points),
        "solution": solution, "locked": locked, "task": False, **points}
