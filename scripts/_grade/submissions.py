"""A submission: a notebook file, read as data, and of its code what an exercise needs.

Cells that are ours are taken from our sources, whatever a submission made of them; of its own
cells, the gaps that it filled and what these need.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from _grade import files, limits, syntax
from _grade.files import Unreadable
from _grade.lessons import Exercise, Lesson

_MAGIC = re.compile(r"^([ \t]*)(?:[!?]|%(?!%)).*$", re.MULTILINE)
_CELL_MAGIC = re.compile(r"\A\s*%%(time|timeit|capture)\b.*")
# A cell whose text is a file in the working folder. Such a file is a script that a check starts.
_WRITES = re.compile(r"\A\s*%%(?:writefile|file)[ \t]+(\w+\.py)[ \t]*(?:\n|\Z)")


# Names that notebooks give to modules: what a scratch cell calls of them no exercise needs.
_MODULES = {"torch", "nn", "F", "dist", "np", "numpy", "os", "sys", "math", "time", "random", "plt",
            "functools", "itertools", "dataclasses", "contextlib", "lab", "labs"}
_SETTINGS = ("manual_seed", "seed", "set_", "use_")


@dataclass(frozen=True)
class Code:
    """A code cell of a submission; number counts code cells from 1."""

    number: int
    id: str
    source: str


@dataclass(frozen=True)
class Submission:
    """student: whose it is. path: its file. cells: its code."""

    student: str
    path: Path
    lesson: Lesson
    cells: list[Code]

    @property
    def digest(self) -> str:
        """Of what is graded: not of outputs, nor of text."""
        code = json.dumps([self.lesson.name, [[cell.id, cell.source] for cell in self.cells]])
        return hashlib.sha256(code.encode(errors="replace")).hexdigest()

    @cached_property
    def layout(self) -> tuple[list["Part"], list[int]]:
        """What `parts` returns of it: each exercise asks for it."""
        return parts(self)


@dataclass
class Part:
    """A cell as it is run. own: whether the submission wrote it. source: what was parsed of it,
    without IPython's lines. body: its statements. file: the script that it writes; then source and
    body are the script's, and nothing of them runs in the notebook."""

    name: str
    source: str
    own: bool
    body: list[ast.stmt]
    file: str = ""


def read(student: str, path: Path, lessons: list[Lesson]) -> Submission:
    """The submission in a file. Raises Unreadable."""
    return parse_notebook(student, path, files.read(path), lessons)


def parse_notebook(student: str, path: Path, data: bytes, lessons: list[Lesson]) -> Submission:
    """The submission that a file's bytes are. Raises Unreadable."""
    try:
        found = [cell for cell in json.loads(data)["cells"] if cell["cell_type"] == "code"]
        if len(found) > limits.CELLS:
            raise Unreadable(f"has {len(found):,} code cells: no notebook needs more than "
                             f"{limits.CELLS:,}")
        cells = [_code(number, cell) for number, cell in enumerate(found, 1)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError,
            MemoryError) as error:
        raise Unreadable(f"is no notebook ({type(error).__name__})") from None
    if (length := sum(len(cell.source) for cell in cells)) > limits.CODE:
        raise Unreadable(f"has {length:,} characters of code: no notebook needs more than "
                         f"{limits.CODE:,}")
    return Submission(student, path, _lesson_of(cells, lessons), cells)


def _code(number, cell) -> Code:
    source = cell["source"]
    source = source if isinstance(source, str) else "".join(source)
    return Code(number, str(cell.get("id", ""))[:100], source[:limits.CELL])


def _lesson_of(cells, lessons) -> Lesson:
    """The lesson that shares most cells; where an editor has renamed them, what is imported."""
    ids = {cell.id for cell in cells}
    best = max(lessons, key=lambda lesson: len(ids & {cell.id for cell in lesson.cells}))
    if ids & {cell.id for cell in best.cells}:
        return best
    text = "\n".join(cell.source for cell in cells)
    for lesson in lessons:
        if re.search(rf"^import {re.escape(lesson.package)} as lab", text, re.MULTILINE):
            return lesson
    raise Unreadable("is none of the workbook's notebooks")


def parse(source: str) -> list[ast.stmt]:
    """A cell's statements, with IPython's lines left out; none where it is not Python."""
    return parsed(source)[1]


def parsed(source: str) -> tuple[str, list[ast.stmt]]:
    """(the text that was parsed: without IPython's lines, its statements)."""
    source = _WRITES.sub("", _CELL_MAGIC.sub("", source))
    for text in (source, _MAGIC.sub(r"\1pass", source)):
        try:
            return text, syntax.parse(text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return source, []


def not_python(submission: Submission) -> str:
    """What is wrong with the first cell that does not parse; or empty."""
    for cell in submission.cells:
        if cell.source.strip() and not parse(cell.source):
            try:
                syntax.parse(_MAGIC.sub(r"\1pass", cell.source))
            except SyntaxError as error:
                return f"cell {cell.number} is not Python: line {error.lineno}: {error.msg}"
            except (ValueError, RecursionError, MemoryError):
                return f"cell {cell.number} is not Python"
    return ""


def parts(submission: Submission) -> tuple[list[Part], list[int]]:
    """(the cells in the order in which they run, for each of the lesson's cells its place there).
    A cell of ours is our source; a gap is the submission's; what it added follows the cell of
    ours that stands before it."""
    lesson, gaps, added = submission.lesson, {}, {}
    numbers = {cell.id: number for number, cell in enumerate(lesson.cells)}
    sources = {cell.source.strip(): number for number, cell in enumerate(lesson.cells)}
    present = {cell.id for cell in submission.cells}
    missing = {name: number for number, cell in enumerate(lesson.cells)
               if cell.gap and cell.id not in present for name in _bound_by(parse(cell.source))}
    after = -1
    for cell in submission.cells:
        number = numbers.get(cell.id, sources.get(cell.source.strip()))
        if number is None:
            names = _bound_by(parse(cell.source)) & missing.keys()
            number = missing[min(names)] if names else None
        if number is None or number in gaps:
            added.setdefault(after, []).append(cell)
            continue
        after = number
        if lesson.cells[number].gap:
            gaps[number] = cell
    found, places = [_own(cell) for cell in added.get(-1, ())], []
    for number, cell in enumerate(lesson.cells):
        places.append(len(found))
        found.append(_own(gaps[number]) if number in gaps else
                     _part(f"{lesson.name} cell {number + 1}", cell.source, False))
        found += [_own(cell) for cell in added.get(number, ())]
    return found, places


def _own(cell) -> Part:
    return _part(f"cell {cell.number}", cell.source, True)


def _part(name, source, own) -> Part:
    text, body = parsed(source)
    writes = _WRITES.match(source)
    return Part(name, text, own, body, writes[1] if writes else "")


def needed(submission: Submission, exercise: Exercise) -> list[tuple[Part, list[int]]]:
    """The statements that an exercise needs: (cell, indices in its body), all of them of a script
    that its check is given by its name. What stands below the
    check's cell is not there yet when it is called."""
    all_parts, places = submission.layout
    all_parts = all_parts[:places[exercise.cell] + 1]
    given = [syntax.parse(text) for text in exercise.arguments]
    files = {each.value for tree in given for each in ast.walk(tree)
             if isinstance(each, ast.Constant)}
    kept = {(place, index) for place, part in enumerate(all_parts) if part.file in files
            for index in range(len(part.body))}
    # name -> the statements that bind it; each statement and each name is looked at once
    binders, waiting = {}, []
    for place, part in enumerate(all_parts):
        for index, node in enumerate(() if part.file else part.body):
            if is_star_import(node):
                waiting.append((place, index))
            for name in bound(node):
                binders.setdefault(name, []).append((place, index))
    for name in {name for tree in given for name in loaded(tree)}:
        waiting += binders.pop(name, ())
    while waiting:
        place, index = waiting.pop()
        if (place, index) not in kept:
            kept.add((place, index))
            for name in loaded(all_parts[place].body[index]):
                waiting += binders.pop(name, ())
    by_part = {}
    for place, index in sorted(kept):
        by_part.setdefault(place, []).append(index)
    return [(all_parts[place], indices) for place, indices in by_part.items()]


def _bound_by(body) -> set[str]:
    return {name for node in body for name in bound(node)}


def bound(node: ast.stmt) -> set[str]:
    """The names that a top-level statement binds or changes: by setting an attribute or an item, by
    calling something of it, as in TABLE.append(1), or by a decorator of it."""
    if isinstance(node, ast.Expr):
        return {_changed_by(node.value)} - {""} if isinstance(node.value, ast.Call) else set()
    found = set()
    for each in _outside_functions(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found |= {each.name, *map(_changed_by, each.decorator_list)} - {""}
        elif isinstance(each, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in each.names}
        elif isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            found.add(each.id)
        elif isinstance(each, ast.Attribute | ast.Subscript) and not isinstance(each.ctx, ast.Load):
            found |= {root} if (root := root_of(each)) else set()
    return found


def _changed_by(node) -> str:
    """The name that a statement's call or a decorator changes: "share" of @share.register(int), and
    torch of torch.manual_seed(0), but of modules only settings; or empty."""
    node = node.func if isinstance(node, ast.Call) else node
    if not isinstance(node, ast.Attribute):
        return ""
    root = root_of(node)
    return root if root not in _MODULES or node.attr.startswith(_SETTINGS) else ""


def is_star_import(node: ast.stmt) -> bool:
    """Whether it binds names that it does not say."""
    return isinstance(node, ast.ImportFrom) and any(each.name == "*" for each in node.names)


def _outside_functions(node) -> Iterator[ast.AST]:
    """The node and what is in it, without the bodies of functions and classes. Without recursion:
    code may be nested deeper than Python's stack."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        yield each
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(each)


def root_of(node: ast.expr) -> str:
    """The name that an attribute or an item belongs to: "torch" of torch.nn.Linear; or empty."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def loaded(node: ast.AST) -> set[str]:
    """The names that a statement reads, also in the functions that it defines."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
