"""A notebook that was opened without the workbook: its first code cell gets it, or says how to."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from _build import build, opened_alone

import labs.opened_alone as rest

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "solutions").glob("[0-9]*.py"))
ADDRESS = "https://example.org/workbook"
# As Jupyter would show it; labs is hidden, as where nobody has installed it.
RUN = """\
import sys
from IPython.core.interactiveshell import InteractiveShell

if "hidden" in sys.argv:
    sys.path[:] = [path for path in sys.path if path != sys.argv[1]]
    sys.meta_path[:] = [found for found in sys.meta_path if "editable" not in str(found)]
shell = InteractiveShell.instance(colors="nocolor")
before = sys.path[:]
shell.run_cell(sys.stdin.read())
print("\\nPATH", sys.path[len(before):])
shell.run_cell("import labs; print(labs.launch(int, ranks=2, quiet=True))")
"""


def first_code(name: str, address: str | None = None) -> str:
    """The source of a notebook's first code cell; with the address of a published workbook."""
    nb = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    source = next(cell for cell in nb.cells if cell.cell_type == "code").source
    if address is None:
        return source
    return opened_alone.cell(address)


def shown(cell: str, folder: Path, *hidden: str, **environment: str) -> str:
    """What Jupyter would show of the cell, run in `folder`."""
    done = subprocess.run([sys.executable, "-c", RUN, str(ROOT), *hidden], input=cell,
                          capture_output=True, text=True, cwd=folder, timeout=120,
                          env={**os.environ, **environment})
    return done.stdout


@pytest.fixture
def repository(tmp_path):
    """The address of a repository with what the cell needs of the workbook."""
    folder = tmp_path / "published"
    subprocess.run(["git", "init", "-q", folder], check=True)
    files = [*ROOT.glob("labs/**/*.py"), *ROOT.glob("labs/**/*.json"), ROOT / "pyproject.toml"]
    for file in files:
        copy = folder / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    return folder.as_uri()


@pytest.mark.parametrize("name", NAMES)
def test_every_notebook_begins_with_the_cell(name):
    for folder in ("notebooks", "solutions"):
        nb = nbformat.read(ROOT / folder / f"{name}.ipynb", as_version=4)
        cell = next(cell for cell in nb.cells if cell.cell_type == "code")
        assert cell.source == opened_alone.cell(opened_alone.known(ROOT))
        assert cell.id.endswith("opened-alone")
        assert cell.metadata.jupyter.source_hidden and not cell.outputs
    assert len(cell.source.splitlines()) <= 16


def test_alone_it_says_one_sentence(tmp_path):
    said = shown(first_code("02_manual_ddp"), tmp_path, "hidden")
    assert said.splitlines()[0].strip() == opened_alone.sentence(opened_alone.known(ROOT))
    assert "Traceback" not in said.split("PATH")[0] and said.split("\nPATH")[0].count("\n") == 1
    assert "No module named 'labs'" in said.split("PATH")[1]  # what the next cell would say


@pytest.mark.slow
def test_in_the_workbook_it_does_nothing(tmp_path):
    said = shown(first_code("02_manual_ddp"), tmp_path)
    assert said.splitlines() == ["", "PATH []", "[0, 0]"]


@pytest.mark.slow
def test_with_an_address_it_gets_the_workbook_and_ranks_find_it(tmp_path, repository):
    """All packages are here already, so it installs none."""
    said = shown(first_code("02_manual_ddp", repository), tmp_path, "hidden")
    clone = tmp_path / opened_alone.FOLDER
    assert said.splitlines() == [
        f"Getting the workbook, 8 MB, from {repository} into {opened_alone.FOLDER} ...",
        "The workbook is complete: the notebook goes on below.", "",
        f"PATH [{str(clone)!r}]", "[0, 0]"]


def test_where_git_fails_its_reason_is_in_the_sentence(tmp_path):
    said = shown(first_code("02_manual_ddp", (tmp_path / "gone").as_uri()), tmp_path, "hidden")
    sentence = said.splitlines()[1]
    assert sentence.startswith("This notebook needs the rest of its workbook: run `git clone ")
    assert "fatal: " in sentence and "Traceback" not in said.split("PATH")[0]


def test_a_wrong_kernel_beside_the_workbook_is_told_which_is_right(tmp_path, repository):
    """A notebook of notebooks/ or work/ in VS Code, whose kernel is not the one of .venv."""
    subprocess.run(["git", "clone", "-q", repository, tmp_path / "clone"], check=True)
    venv = tmp_path / "clone" / ".venv"
    venv.mkdir()
    (venv / "setup.stamp").touch()
    (tmp_path / "clone" / "work").mkdir()
    said = shown(first_code("02_manual_ddp"), tmp_path / "clone" / "work", "hidden")
    assert said.splitlines()[0].startswith(
        f"This kernel is not the workbook's own: choose the one of {venv}")


def project(folder: Path, *needs: str) -> Path:
    """A tree whose pyproject.toml needs these."""
    (folder / "pyproject.toml").write_text(f"[project]\ndependencies = {json.dumps(needs)}\n")
    return folder


def test_another_torch_is_named_and_not_replaced(tmp_path):
    here = re.escape(importlib.metadata.version("torch"))
    with pytest.raises(ValueError, match=rf"needs torch>=99 and this kernel's Python has {here}"):
        rest.complete(ValueError, project(tmp_path, "torch>=99"))


def wheel(folder: Path, name: str, needs: str = "") -> None:
    """A wheel of a package with one module."""
    info = f"{name}-1.0.dist-info"
    files = {f"{name}.py": "", f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
             f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}",
             f"{info}/RECORD": ""}
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        for path, text in files.items():
            file.writestr(path, text)


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """The folder that pip installs from, and the one that it installs into."""
    for folder in ("wheels", "target", "root"):
        (tmp_path / folder).mkdir()
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", tmp_path / "wheels"),
                        ("TARGET", tmp_path / "target"), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", str(value))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


@pytest.mark.slow
def test_only_what_is_missing_is_installed_and_named(pip, capsys):
    wheel(pip / "wheels", "missing_here")
    root = project(pip / "root", "torch>=2", "jupyterlab>=99", "numpy>=1", "missing_here>=1")
    rest.complete(ValueError, root)
    said = capsys.readouterr().out
    version = importlib.metadata.version("torch")
    assert f"Installing missing_here into {sys.prefix}" in said and f"torch {version} stays" in said
    assert said.splitlines()[-1] == "The workbook is complete: the notebook goes on below."
    assert sorted(path.name for path in (pip / "target").glob("*.py")) == ["missing_here.py"]


@pytest.mark.slow
def test_what_the_kernel_has_loaded_is_not_replaced(pip):
    """pip says what asks for another version, and so does the sentence."""
    wheel(pip / "wheels", "missing_here", "Requires-Dist: pytest>=99\n")
    root = project(pip / "root", "torch>=2", "pytest>=99", "missing_here>=1")
    with pytest.raises(ValueError, match="could not be installed.*missing.here.* pytest>=99"):
        rest.complete(ValueError, root)
    assert not list((pip / "target").iterdir())


def test_what_pip_does_is_named_at_once_with_sizes():
    lines = ["Collecting accelerate>=1.10",
             "Downloading accelerate-1.9.0-py3-none-any.whl.metadata (9 kB)",
             "Collecting tqdm (from a)", "Requirement already satisfied: numpy",
             "Downloading https://host/a/hf_xet-1.8.0-cp37-abi3-linux_x86_64.whl (4.3 MB)",
             "Downloading tqdm-4.67.1.tar.gz (78 kB)", "Collecting psygnal"]
    said = "".join(rest.progress(lines[:n + 1]) for n in range(len(lines)))
    assert said.splitlines() == ["", "  accelerate tqdm", "  hf_xet-1.8.0, 4.3 MB",
                                 "  tqdm-4.67.1, 78 kB", "  psygnal"]


def test_a_new_address_needs_no_execution(monkeypatch):
    monkeypatch.setattr(opened_alone, "known", lambda root: ADDRESS)
    lesson = build.read_lesson(ROOT, "02_manual_ddp")
    cell = next(cell for cell in build.keep_earlier_outputs(lesson)["cells"]
                if cell["cell_type"] == "code")
    assert f'address, said = "{ADDRESS}", ""' in "".join(cell["source"])
    assert cell["execution_count"] == 1


@pytest.mark.parametrize("address", [None, ADDRESS])
def test_the_sentence_stands_in_the_cell(address):
    said = opened_alone.sentence(address)
    assert (address or "does not know its own address yet") in said
    json.dumps(said)  # and no quote in it that would end the cell's string
    assert '"' not in said and "\n" not in said
    compile(opened_alone.cell(address), "cell", "exec")
