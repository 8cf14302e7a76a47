"""A notebook that was opened without the workbook: its first code cell says how to get it."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from _build import build, opened_alone

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "solutions").glob("[0-9]*.py"))
# As Jupyter would show it; labs is hidden, as where nobody has installed it.
RUN = """\
import sys
from IPython.core.interactiveshell import InteractiveShell

if "hidden" in sys.argv:
    sys.path[:] = [path for path in sys.path if path != sys.argv[1]]
    sys.meta_path[:] = [found for found in sys.meta_path if "editable" not in str(found)]
shell = InteractiveShell.instance(colors="nocolor")
before, cell = sys.path[:], sys.stdin.read()
shell.run_cell(cell)
if "!" in sys.argv[-1]:  # the line, then the cell again
    shell.run_cell(sys.argv[-1])
    shell.run_cell(cell)
print("\\nPATH", sys.path[len(before):], "LABS", "labs" in sys.modules)
shell.run_cell("import labs; print(labs.launch(int, ranks=2, quiet=True))")
"""


def first_code(folder: str, name: str) -> nbformat.NotebookNode:
    nb = nbformat.read(ROOT / folder / f"{name}.ipynb", as_version=4)
    return next(cell for cell in nb.cells if cell.cell_type == "code")


def shown(cell, folder: Path, *hidden: str) -> str:
    """What Jupyter would show of the cell, run in `folder`."""
    done = subprocess.run([sys.executable, "-c", RUN, str(ROOT), *hidden], input=cell.source,
                          capture_output=True, text=True, cwd=folder, timeout=120)
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_notebook_begins_with_the_cell(name):
    for folder in ("notebooks", "solutions"):
        cell = first_code(folder, name)
        assert opened_alone.sentence() in cell.source and cell.id.endswith("opened-alone")
        assert cell.metadata.jupyter.source_hidden and not cell.outputs


def test_alone_it_says_one_sentence(tmp_path):
    said = shown(first_code("notebooks", "02_manual_ddp"), tmp_path, "hidden")
    assert said.splitlines()[0] == opened_alone.sentence()
    assert "Traceback" not in said.split("PATH")[0] and said.split("\nPATH")[0].count("\n") == 1
    assert "No module named 'labs'" in said.split("PATH")[1]  # what the next cell would say


@pytest.mark.slow
def test_in_the_workbook_it_does_nothing(tmp_path):
    said = shown(first_code("notebooks", "02_manual_ddp"), tmp_path)
    assert said.splitlines() == ["", "PATH [] LABS False", "[0, 0]"]


@pytest.mark.slow
def test_after_the_line_for_colab_the_same_kernel_finds_the_workbook(tmp_path):
    """The clone of the line, without what pip installs: this machine has that already."""
    line = opened_alone.sentence("REPOSITORY").split("`")[1]
    clone = line.split(" && ")[0].replace("--depth 1 REPOSITORY", f"-q --no-checkout {ROOT}")
    checkout = f"git -C {opened_alone.FOLDER} checkout -q HEAD -- labs"
    said = shown(first_code("notebooks", "02_manual_ddp"), tmp_path, "hidden",
                 f"{clone} && {checkout}")
    assert said.splitlines() == [
        opened_alone.sentence(), "",
        f"PATH [{str(tmp_path / opened_alone.FOLDER)!r}] LABS False", "[0, 0]"]


def test_a_new_address_needs_no_execution(monkeypatch):
    monkeypatch.setattr(opened_alone, "REPOSITORY", "https://example.org/workbook")
    lesson = build.read_lesson(ROOT, "02_manual_ddp")
    cell = next(cell for cell in build.keep_earlier_outputs(lesson)["cells"]
                if cell["cell_type"] == "code")
    assert "clone --depth 1 https://example.org" in "".join(cell["source"])
    assert cell["execution_count"] == 1


def test_the_sentence_names_the_address_once_it_is_known():
    known = opened_alone.sentence("https://example.org/workbook")
    assert "git clone --depth 1 https://example.org/workbook data-parallel-workbook && " in known
    assert "ADDRESS" not in known and opened_alone.sentence("").count("ADDRESS") == 3
    json.dumps(known)  # and no quote in it that would end the cell's string
    assert '"' not in known and "\n" not in known
