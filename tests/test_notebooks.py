"""Every notebook as a student finds it, from top to bottom in a fresh kernel; and as it is solved.

nbval, which scripts/test runs too, runs both and holds what each check of a solution says against
what is read here. This run is the one that notices a cell that dies on an unknown %magic.
"""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from labs.predictions import rent

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "solutions").glob("*.py"))
EXERCISE = re.compile(r"raise NotImplementedError\(\"Exercise (\d+\.\d+)\"\)")
CHECK = re.compile(r"^lab\.check_", re.MULTILINE)
pytestmark = pytest.mark.slow


def executed(path):
    """The notebook, run; nbclient raises at the first cell that does."""
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3",
                            resources={"metadata": {"path": str(path.parent)}}).execute()
    return notebook


def outputs(notebook):
    """(cell's source, text of its outputs) of every code cell."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            texts = [output.get("text") or output.get("data", {}).get("text/plain", "")
                     for output in cell.outputs]
            yield cell.source, "\n".join(texts)


def errors(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"
            for output in cell.outputs if output.output_type == "error"]


@pytest.mark.parametrize("name", NAMES)
def test_an_untouched_student_notebook_waits_and_never_fails(name):
    notebook = executed(ROOT / "notebooks" / f"{name}.ipynb")
    texts = list(outputs(notebook))
    everything = "\n".join(text for _, text in texts)
    assert not errors(notebook) and "Traceback" not in everything
    assert "✓" not in "".join(text for source, text in texts if CHECK.search(source))
    for exercise in sorted(set(EXERCISE.findall("\n".join(source for source, _ in texts)))):
        assert re.search(rf"○ Exercise {exercise}\s+(is waiting|waits for)", everything), exercise


@pytest.mark.parametrize("name", NAMES)
def test_a_solution_passes_every_check(name):
    notebook = nbformat.read(ROOT / "solutions" / f"{name}.ipynb", as_version=4)
    compared = [cell.source for cell in notebook.cells if
                "nbval-check-output" in cell.metadata.get("tags", [])]
    checks = [(source, text) for source, text in outputs(notebook) if CHECK.search(source)]
    assert checks and not errors(notebook)
    assert [source for source, text in checks if "✓ Exercise" not in text] == []
    assert {source for source, _ in checks} <= set(compared)
    everything = "\n".join(text for _, text in outputs(notebook))
    assert "is waiting" not in everything and "no guess yet" not in everything


@pytest.mark.parametrize("name", NAMES)
def test_the_price_in_the_header_is_computed(name):
    source = (ROOT / "solutions" / f"{name}.py").read_text()
    minutes, dollars = map(float, re.search(r"(\d+) minutes? of compute, about \$(\d+\.\d+)",
                                            source).groups())
    assert dollars == pytest.approx(rent.node_dollars(minutes), abs=0.005)


@pytest.mark.parametrize("name", NAMES)
def test_every_exercise_is_checked(name):
    student = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    source = "\n".join(cell.source for cell in student.cells)
    files = sorted((ROOT / "tests" / "wrong_answers").glob(f"test_{name[:2]}_*.py"))
    tests = "\n".join(path.read_text() for path in files)
    for check in set(re.findall(r"lab\.(check_\w+)", source)):
        assert check in tests, f"{check} has no wrong answers"
