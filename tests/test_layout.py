"""The packages of labs/: imports run one way, each notebook's package is flat, with one file for
each exercise, and CONTRIBUTING names every shared package."""

import ast
import functools
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from _test_reach import imports_of

ROOT = Path(__file__).resolve().parent.parent
LABS = ROOT / "labs"
# From the bottom to the top: a package imports from itself and from those before it. `notebooks`
# stands for all packages of one notebook each. That of a later notebook may import an earlier
# one's, because a student's earlier work is used again.
ORDER = ["opened_alone", "lazy_exports", "words", "workers", "training", "meters", "predictions",
         "pictures", "faults", "checks", "notebooks", "missing_names"]
NOTEBOOKS = [path.stem.split("_", 1)[1] for path in sorted((ROOT / "solutions").glob("*_*.py"))]
PACKAGES = sorted(path.parent.name for path in LABS.glob("*/__init__.py"))
# Pages that name files of this repository.
MAPS = ["README.md", "CONTRIBUTING.md", *sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "book").glob("*.md"))]


def place_of(module: str) -> tuple[int, int]:
    """(place in ORDER, number of the notebook) of 'labs.workers.launcher'; 0 for what is shared."""
    name = module.split(".")[1]
    if name in NOTEBOOKS:
        return ORDER.index("notebooks"), NOTEBOOKS.index(name)
    return ORDER.index(name), 0


def imports_upwards(path: Path, root: Path = ROOT) -> list[str]:
    """What a module of labs imports from a package above its own."""
    package = ".".join(path.relative_to(root).parent.parts)
    module = ".".join(path.relative_to(root).with_suffix("").parts)
    inside = {name for name in imports_of(path, package) if name.startswith("labs.")}
    return sorted(name for name in inside if place_of(name) > place_of(module))


@pytest.mark.parametrize("path", sorted(LABS.glob("*/**/*.py")),
                         ids=lambda path: path.relative_to(LABS).as_posix())
def test_imports_run_one_way(path):
    assert not imports_upwards(path)


@pytest.mark.parametrize(("where", "code", "found"), [
    ("workers/a.py", "from labs.training import models", ["labs.training.models"]),
    ("workers/a.py", "def f():\n    import labs.meters.memory", ["labs.meters.memory"]),
    ("meters/a.py", "from ..pictures.palette import INK", ["labs.pictures.palette.INK"]),
    ("predictions/b/c.py", "from labs.checks import verdicts", ["labs.checks.verdicts"]),
    ("training/b/__init__.py", "from .c import d\nfrom labs.workers import launcher", []),
    ("meters/a.py", "import torch\nfrom labs.words import plural", [])])
def test_an_import_upwards_is_found(tmp_path, where, code, found):
    path = tmp_path / "labs" / where
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert imports_upwards(path, tmp_path) == found


def test_labs_itself_imports_nothing_from_labs_before_a_name_is_used():
    tree = ast.parse((LABS / "__init__.py").read_text())
    modules = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert modules == ["typing", "labs.lazy_exports"]


@pytest.mark.parametrize("package", NOTEBOOKS)
def test_a_notebooks_package_is_flat(package):
    found = [path for path in (LABS / package).iterdir() if path.name != "__pycache__"]
    assert not [path.name for path in found if path.is_dir()]
    assert "__init__.py" in {path.name for path in found}


def exercises(package: str) -> dict[str, str]:
    """Of a notebook: the name of each check -> the file that has it."""
    return {node.name: path.stem for path in (LABS / package).glob("*.py")
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)
            and any(ast.unparse(each).startswith("check(") for each in node.decorator_list)}


@pytest.mark.parametrize("package", NOTEBOOKS)
def test_each_exercise_has_one_file_named_after_it(package):
    found = exercises(package)
    assert found and all(check == f"check_{file}" for check, file in found.items()), found


@pytest.mark.parametrize("path", sorted(LABS.rglob("*.py")),
                         ids=lambda path: path.relative_to(LABS).as_posix())
def test_a_file_can_be_read_at_once(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 350


def packages_in_map(text: str) -> set[str]:
    """The folders that the map of a page names below labs/: lines '      workers/   what it is'."""
    labs = re.search(r"^    labs/.*\n((?:^      .*\n)+)", text, re.MULTILINE)
    return set(re.findall(r"^      (\w+)/", labs[1], re.MULTILINE))


def test_the_map_names_every_shared_package():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert packages_in_map(text) == set(PACKAGES) - set(NOTEBOOKS)


@pytest.mark.parametrize("page", MAPS)
def test_a_page_names_only_files_that_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:labs|tests|scripts|solutions|notebooks)/[\w/.-]*\w", text))
    examples = re.compile("NN|NAME|quantization|largest")
    named = {name for name in named if not examples.search(name)}
    assert not [name for name in named
                if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()]


def names_of_torch_cuda(path: Path) -> list[int]:
    """The lines of a file whose code, not its texts, names torch.cuda."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute)
             and node.attr == "cuda" and ast.unparse(node.value) == "torch"]
    return named + [node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
                    and (node.module or "").startswith("torch.cuda")]


def test_one_module_names_torch_cuda():
    files = [*LABS.rglob("*.py"), *(ROOT / "scripts").rglob("*.py"),
             *(ROOT / "solutions").glob("[0-9]*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if names_of_torch_cuda(path)}
    assert found == {"labs/workers/cuda.py"}


def modules_of_ranks(path: Path) -> set[str]:
    """The modules of labs from which a file sends a function to ranks: `launch(function, ...)`,
    `launch(module.function, ...)`, `compare(..., observe=function)`, also inside `partial`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    where = {node.name: own for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labs."):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                where[alias.asname or alias.name] = inner if file_of(inner) else node.module
    sent = [node for call in ast.walk(tree) if isinstance(call, ast.Call)
            for node in [*(call.args[:1] if ast.unparse(call.func).endswith("launch") else ()),
                         *(keyword.value for keyword in call.keywords
                           if keyword.arg in ("observe", "measure", "configure"))]]
    names = [name.id for node in sent for name in ast.walk(node) if isinstance(name, ast.Name)]
    return {where[name] for name in names if name in where}


def file_of(module: str) -> Path | None:
    """The file of a module of labs, or None if there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py")
                 if file.is_file()), None)


@functools.cache
def reached_by(module: str) -> frozenset[str]:
    """All modules that are imported, at the top of a module, when this module of labs is."""
    found, todo = set(), [module]
    while todo:
        file = file_of(todo.pop())
        for node in ast.parse(file.read_text(encoding="utf-8")).body if file else ():
            names = ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                     [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                     if isinstance(node, ast.ImportFrom) else [])
            new = set(names) - found
            found |= new
            todo += [name for name in new if name.startswith("labs.")]
    return frozenset(found)


def _list(file: str, name: str) -> list[str]:
    """A list of a module of labs, read."""
    body = ast.parse((LABS / file).read_text(encoding="utf-8")).body
    [found] = [ast.literal_eval(node.value) for node in body
               if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name]
    return found


RANKS_CODE = sorted(set().union(*map(modules_of_ranks, LABS.rglob("*.py"))))
# Imported at the top of a module by what ranks run. The fork server has all of it already: to
# import matplotlib takes each rank 0.25 s of CPU; 8 ranks on 2 cores would wait for a second.
PRELOADED = {name.partition(".")[0] for name in _list("workers/third_party.py", "MODULES")}
SMALL = {"anywidget", "ipywidgets", "PIL", "psutil", "tqdm"}  # come with those, or quickly


@pytest.mark.parametrize("module", RANKS_CODE)
def test_a_rank_imports_nothing_that_takes_long(module):
    third_party = {name.partition(".")[0] for name in reached_by(module)}
    assert third_party - set(sys.stdlib_module_names) - {"labs"} <= PRELOADED | SMALL


def test_functions_for_ranks_are_found():
    assert {"labs.checks.comparison", "labs.zero_stages.lifecycle_recording",
            "labs.manual_ddp.variants", "labs.meters.trace_units"} <= set(RANKS_CODE)
    assert "matplotlib.figure" in reached_by("labs.zero_stages.zero1")


def decorated(path: Path) -> list[str]:
    """The functions of a file that are a check, or draw what a notebook shows."""
    found = [node for node in ast.parse(path.read_text(encoding="utf-8")).body
             if isinstance(node, ast.FunctionDef)]
    return [node.name for node in found for each in node.decorator_list
            if getattr(getattr(each, "func", each), "id", "") in ("check", "shows")]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_offered_all_of_its_checks_and_pictures(name):
    offered = set(import_module(f"labs.{name}").__all__)
    assert not {each for path in (LABS / name).glob("*.py") for each in decorated(path)} - offered
