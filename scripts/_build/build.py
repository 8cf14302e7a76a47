"""Builds the two notebooks of a source, and tells whether the ones on disk are up to date."""

import re
from dataclasses import dataclass
from pathlib import Path

import _notebooks
from _build import card, exercises, links, lint, notebook, opened_alone, student
from _build.source import Cell, read_source


@dataclass
class Lesson:
    """One source, read: its cells and the two notebooks without outputs."""

    root: Path
    name: str
    cells: list[Cell]
    problems: list[str]
    solution: dict
    student: dict

    @property
    def solution_path(self):
        return self.root / "solutions" / f"{self.name}.ipynb"

    @property
    def student_path(self):
        return self.root / "notebooks" / f"{self.name}.ipynb"


def read_lesson(root: Path, name):
    """Read and check one source; whatever is wrong with it is in `problems`."""
    cells, problems = read_source(root / "solutions" / f"{name}.py", f"solutions/{name}.py")
    notebook.set_ids(cells, name)
    problems += [problem for cell in cells for problem in lint.lint(cell)]
    problems += exercises.problems(cells)
    exercises.add_metadata(cells)
    for_solution = {
        c.number: "\n".join(text for _, text in c.solution_lines()).rstrip()
        for c in cells
        if c.role != "student-only"
    }
    for_student, wrong = student.student_sources(cells)
    problems += wrong
    neighbours = links.neighbours_of(name, root)
    row = card.row_of(name, root)
    for sources in (for_solution, for_student):
        card.add_row(cells, sources, row)
        links.add_links(cells, sources, neighbours)
    opened_alone.add_cell(cells, root, for_solution, for_student)
    return Lesson(
        root,
        name,
        cells,
        sorted(problems, key=_line_number),
        notebook.notebook(cells, for_solution),
        notebook.notebook(cells, for_student),
    )


def run(lesson: Lesson):
    """Execute the solution; returns (notebook with outputs or None, problems)."""
    from _build import execute  # nbclient takes a while to import, and --check must be quick

    try:
        return execute.execute(lesson.solution, lesson.solution_path.parent), []
    except execute.CellFailed as failure:
        return None, [_failure(lesson, *failure.args)]


def keep_earlier_outputs(lesson: Lesson):
    """The solution with the outputs, from the file on disk, of cells that did not change."""
    earlier = notebook.from_file(lesson.solution_path)
    notebook.keep_outputs(lesson.solution, earlier)
    opened_alone.keep_count(lesson.solution, earlier)
    return lesson.solution


def write(path: Path, nb):
    """Write the notebook in one step; a file that already says the same is left alone."""
    notebook.write(path, notebook.to_bytes(nb))


def stale_files(lesson: Lesson):
    """Yields one sentence for each of the lesson's notebooks that is missing or stale."""
    again = f"run scripts/build {lesson.name}"
    shown = f"notebooks/{lesson.name}.ipynb"
    if not lesson.student_path.is_file():
        yield f"{shown} is missing: {again}"
    elif lesson.student_path.read_bytes() != notebook.to_bytes(lesson.student):
        yield f"{shown} is stale: {again}"
    reason = _solution_reason(lesson)
    if reason:
        yield f"solutions/{lesson.name}.ipynb {reason}: {again}"


def orphans(root: Path):
    """Yields one sentence for each generated notebook whose source is gone."""
    for path in [path for folder in ("notebooks", "solutions")
                 for path in _notebooks.paths(root / folder, ".ipynb")]:
        if not (root / "solutions" / f"{path.stem}.py").is_file():
            shown = path.relative_to(root).as_posix()
            yield f"{shown} has no source solutions/{path.stem}.py: run rm {shown}"


def _solution_reason(lesson):
    built = notebook.from_file(lesson.solution_path)
    if not lesson.solution_path.is_file():
        return "is missing"
    if not built or notebook.without_outputs(built) != lesson.solution:
        return "is stale"
    code = [c for c in built["cells"] if c["cell_type"] == "code"]
    if any(cell["execution_count"] is None for cell in code):
        return "has cells that were not executed"
    if any(o["output_type"] == "error" for cell in code for o in cell["outputs"]):
        return "has a stored error"
    return ""


def _failure(lesson, index, line, reason):
    shown = [cell for cell in lesson.cells if cell.role != "student-only"][index]
    number, text = shown.solution_lines()[line]
    return shown.problem(number - shown.line, f"at {text.strip()!r}: {reason}")


def _line_number(problem):
    return int(re.match(r".*?:(\d+):", problem)[1])
