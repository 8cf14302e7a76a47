"""What of labs the process of an answer has, where the exercise is judged apart: what the notebook
has named up to the exercise, and what that is made of. No module with a check is among it, and none
of those that the exercise's own check computes with: an answer cannot ask them, by whatever name.
"""

import ast
import functools
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from _grade import submissions
from _grade.lessons import Exercise, Lesson

_LABS = Path(__file__).resolve().parents[2] / "labs"
# What every such process has: it starts ranks and scripts, and finds the line that raised.
BASE = ("labs", "labs.lazy_exports", "labs.workers.launcher", "labs.checks.student_code",
        "labs.checks.scripts.forked", "labs.surviving_failure.forked_starts",
        "labs.start_here.scripts")
# What an answer needs although its check computes with it, too, or with what it is made of: the
# notebook names it, or it is the class of an argument. An answer can use all of these modules.
NEEDED = {
    **dict.fromkeys(("1.1", "1.4"), ("labs.predictions.memory.shape",)),
    "1.6": ("labs.predictions.memory.shape", "labs.predictions.hardware"),
    "3.9": ("labs.zero_stages.scaffold",),
    **dict.fromkeys(("5.1", "5.3", "5.4", "5.5", "5.8", "5.9"),
                    ("labs.fsdp_profiling.scaffold", "labs.fsdp_profiling.recorded_runs")),
    "6.3": ("labs.scaling.release_notes",),
    "6.4": ("labs.scaling.lost_time_runs",), "6.9": ("labs.scaling.scaffold",),
    **dict.fromkeys(("6.16", "6.17", "6.18"), ("labs.scaling.gpu_steps",)),
    "6.12": ("labs.predictions.cost.prices",), "6.15": ("labs.scaling.ragged",),
    "7.10": ("labs.tensor_parallel.attention_blocks",),
    **dict.fromkeys(("7.14", "7.17"), ("labs.predictions.pipelines.schedule",)),
    **dict.fromkeys(("7.24", "7.25"), (
        "labs.predictions.plans.job", "labs.predictions.plans.known_jobs",
        "labs.predictions.plans.memory")),
    "8.6": ("labs.surviving_failure.elastic_job",),
    "8.8": ("labs.predictions.failures.reports",),
    "8.9": ("labs.predictions.failures.intervals",),
    "8.11": ("labs.surviving_failure.scaffold",)}
NEEDED["7.25"] += ("labs.predictions.plans.search",)
# What draws or judges an answer is none's part.
_SHOWN = re.compile(r"(check|show|explore)_")
_CHECK = re.compile(r"^@check\(", re.MULTILINE)


def modules_for(lesson: Lesson, exercise: Exercise) -> frozenset[str]:
    """The modules of labs that an answer to an exercise may import."""
    check = offered(lesson.package)[exercise.check]
    knowing = with_checks() | _known_by(check)
    roots = {*BASE, lesson.package, *NEEDED.get(exercise.number, ())}
    roots |= {name for name in _named(lesson, exercise) if not closure((name,)) & knowing}
    return closure(roots)


def copy(modules: Iterable[str], to: Path) -> None:
    """Copies these modules of labs into a folder, open to all, and the data beside them."""
    for folder in {_file(name).parent for name in modules}:
        files = [folder / "__init__.py"] if (folder / "__init__.py").exists() else []
        files += [path for path in folder.iterdir() if path.suffix in (".json", ".csv")]
        files += [path for path in folder.glob("*/*.json")
                  if not (path.parent / "__init__.py").exists()]
        for path in files:
            _copy(path, to)
    for name in modules:
        _copy(_file(name), to)
    for folder, _, files in os.walk(to):
        os.chmod(folder, 0o755)
        for name in files:
            os.chmod(os.path.join(folder, name), 0o644)


def _copy(path, to):
    target = to / path.relative_to(_LABS)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def _file(name) -> Path:
    path = _LABS.parent.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def with_checks() -> frozenset[str]:
    """The modules of labs that define a check."""
    return frozenset(".".join(path.relative_to(_LABS.parent).with_suffix("").parts)
                     for path in _LABS.rglob("*.py")
                     if _CHECK.search(path.read_text(encoding="utf-8")))


@functools.cache
def offered(package: str) -> dict[str, str]:
    """What a package of labs offers: name -> the module that has it."""
    return {alias.asname or alias.name: f"{package}.{node.module}" if node.level else node.module
            for block in _tree(package).body if _is_for_typing(block)
            for node in block.body for alias in node.names}


def closure(names: Iterable[str]) -> frozenset[str]:
    """Modules of labs with all that they import, at any time."""
    found, todo = set(), list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += [*_imports(name), *filter(None, [name.rpartition(".")[0]])]
    return frozenset(found)


def _known_by(check) -> frozenset[str]:
    """What a module with a check computes with: predictions, and what the notebooks' packages
    have, its own and by other modules with checks."""
    found, todo = {check}, [check]
    while todo:
        for name in _imports(todo.pop()):
            package = name.split(".")[1]
            if name not in found and (package == "predictions" or package in _packages()):
                found.add(name)
                todo += [name] * (name in with_checks())
    return frozenset(name for name in found if name.count(".") > 1)


@functools.cache
def _packages() -> frozenset[str]:
    return frozenset(path.parent.name for path in _LABS.glob("*/scaffold.py"))


def _named(lesson, exercise) -> set[str]:
    """The modules of what the notebook names up to the exercise's check."""
    found = set()
    for cell in lesson.cells[:exercise.cell + 1]:
        for statement in submissions.parse(cell.source):
            found |= set(_imported(ast.walk(statement)))
            for node in ast.walk(statement):
                if (isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "lab"
                        and not _SHOWN.match(node.attr)):
                    found.add(offered(lesson.package)[node.attr])
    return found


@functools.cache
def _imports(name) -> frozenset[str]:
    return frozenset(_imported(_run(_tree(name))))


def _run(tree) -> Iterator[ast.AST]:
    """The nodes of a module without what is there for type checkers alone."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if not _is_for_typing(node):
            yield node
            todo += ast.iter_child_nodes(node)


def _imported(nodes) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "labs")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "labs":
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if _file(module).exists() else (
                    offered(node.module).get(alias.name, node.module))


def _is_for_typing(node) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


@functools.cache
def _tree(name) -> ast.Module:
    return ast.parse(_file(name).read_text(encoding="utf-8"))
