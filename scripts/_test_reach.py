"""Which tests a change can reach: those whose imports lead to a changed file, and those that name
it, because they start it as a program or read it."""

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Where an import is looked for, as in pytest's `pythonpath` and where a script puts itself.
PLACES = [ROOT / name for name in (".", "tests", "scripts", "scripts/_build", "tests/pretend")]
EVERYTHING = {"pyproject.toml", "requirements.lock", "tests/conftest.py"}


def imports_of(path: Path, package: str) -> set[str]:
    """What a file imports, also inside a function or for type checkers: 'labs.words.plural'."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def tests_reached(commit: str) -> list[str]:
    """Return the test files, from the root, that what was changed since a commit can reach."""
    changed = changed_since(commit)
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [path for path in tests if EVERYTHING & set(changed) or is_reached(path, changed)]
    return [path.relative_to(ROOT).as_posix() for path in found]


def changed_since(commit: str) -> list[str]:
    """Return the files that differ from a commit, new ones too. Exits where there is none such."""
    lists = [["git", "diff", "--name-only", commit, "--"],
             ["git", "ls-files", "--others", "--exclude-standard"]]
    done = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True) for command in lists]
    if done[0].returncode:
        sys.exit(f"--since {commit}: git knows no such commit here ({done[0].stderr.strip()}).")
    return "".join(each.stdout for each in done).splitlines()


def is_reached(test: Path, changed: list[str]) -> bool:
    """Return whether a test's imports lead to one of these files, or to a text that names it."""
    files = imported_by(test)
    of_tests = [text_of(file) for file in files if ROOT / "tests" in file.parents]
    return any(ROOT / path in files or any(name_of(path) in text for text in of_tests)
               for path in changed)


def name_of(path: str) -> str:
    """Return how code names a file that it does not import but starts or reads: a script, or that
    of a private package, a notebook, a data file."""
    first, *rest = path.split("/")
    if first == "scripts" and rest:
        return rest[0].lstrip("_").removesuffix(".py")
    name = os.path.basename(path)
    return name if first in ("labs", "tests") else name.partition(".")[0]


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def imported_by(path: Path) -> frozenset[Path]:
    """Return the file itself, and all of ours that its imports lead to."""
    found, todo = set(), [path]
    while todo:
        file = todo.pop()
        if file not in found:
            found.add(file)
            todo += imported_directly(file)
    return frozenset(found)


@functools.cache
def imported_directly(path: Path) -> frozenset[Path]:
    """Return our files that a file imports, and those beside it that it names: it starts them."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    named = re.findall(r"[\"'](\w+\.py)[\"']", text_of(path))
    return frozenset([*(file for name in imports_of(path, package)
                        for file in files_of(name, path.parent)),
                      *(file for name in named if (file := path.with_name(name)).is_file())])


def files_of(name: str, beside: Path) -> list[Path]:
    """Return our files that importing this runs: of 'labs.words.plural', two __init__.py, or a
    module."""
    parts, found = name.split("."), []
    for place in [beside, *PLACES]:
        for length in range(1, len(parts) + 1):
            path = place.joinpath(*parts[:length])
            found += [file for file in (path.with_suffix(".py"), path / "__init__.py")
                      if file.is_file()]
        if found:
            break
    return found
