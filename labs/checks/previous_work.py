"""A student's previous notebook: its functions and classes, without running its cells, for later
notebooks, tests and benchmarks."""

import ast
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from labs.checks.student_code import guarded
from labs.checks.verdicts import Verdict, Wrong, verdict_of

ROOT = Path(__file__).resolve().parents[2]
STUDENTS = ROOT / "work"  # scripts/lab copies notebooks/ there
_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class PreviousStrategy:
    """A strategy defined in a previous notebook, used like any other. verdict: what its check says;
    path: the student's notebook, None if there is none. Draws itself as its verdict."""

    strategy: Callable
    verdict: Verdict
    path: Path | None

    @property
    def is_students(self) -> bool:
        return bool(self.verdict.passed)

    def __call__(self, model, optimizer_class, **settings):
        return self.strategy(model, optimizer_class, **settings)

    def __repr__(self):
        return str(self.verdict)

    def _repr_html_(self):
        return self.verdict._repr_html_()


def previous_strategy(notebook: str, name: str, exercise: str,
                      check: Callable[[Callable], str]) -> PreviousStrategy:
    """The strategy `name` that the student's NOTEBOOK.ipynb defines, in the working folder or else
    in work/, if `check(strategy)` returns a sentence; the worked answer if it raises. Raises Wrong
    where there are no worked answers, as in a release for students."""
    path = next((found for folder in (Path.cwd(), STUDENTS)
                 if (found := folder / f"{notebook}.ipynb").exists()), None)
    try:
        mine = getattr(definitions(path), name)
        with guarded():
            sentence = check(mine)
        verdict = Verdict(exercise, True, f"your {name} from {path.name}, as it was last saved: "
                                          f"{sentence}")
        return PreviousStrategy(mine, verdict, path)
    except KeyboardInterrupt:
        raise
    # Any failure of the student's notebook leads to the worked answer: later notebooks must run.
    except BaseException as error:  # sys.exit() too
        source = ROOT / "solutions" / f"{notebook}.py"
        if not source.exists():  # a release for students has no worked answers
            raise Wrong(f"this needs your {name} of {notebook}, and there is none that passes",
                        f"Pass exercise {exercise} first, and save {notebook}.ipynb.",
                        code="needs_previous_work") from error
        worked = getattr(definitions(source), name)
        why = Verdict(exercise, None, _why_not(name, path, exercise, error))
        return PreviousStrategy(worked, why, path)


def _why_not(name, path, exercise, error) -> str:
    if path is None:
        return f"the worked {name}: there is no notebook with yours here"
    if isinstance(error, AttributeError) and getattr(error, "name", None) == name:
        return f"the worked {name}: {path.name}, as it was last saved, defines none"
    found = verdict_of(exercise, error)
    return f"the worked {name}: yours in {path.name}, as it was last saved, " + (
        found.sentence if found.passed is None else f"does not pass its check: {found.sentence}")


def definitions(path: Path, **values) -> SimpleNamespace:
    """The functions and classes of a notebook (.ipynb) or of its source (.py), and its assignments
    of literals or to names in capitals; checks and pictures do not run. values: instead of what the
    notebook assigns to these names, for example PRESET=.... A cell that does not parse is skipped.
    """
    namespace = {"__name__": "__main__", **values}
    for name, tree in _trees(path):
        kept = [node for node in tree.body if isinstance(node, _KEPT) or _is_kept(node, values)]
        exec(compile(ast.Module(kept, []), name, "exec"), namespace)
    return SimpleNamespace(**namespace)


def _trees(path):
    """(name for tracebacks, parsed code), one for a source and one for each cell of a notebook."""
    if path.suffix == ".py":
        # Drops cached lines of a source that has changed, for tracebacks.
        linecache.checkcache(str(path))
        yield str(path), ast.parse(path.read_text(encoding="utf-8"), str(path))
        return
    import nbformat

    try:
        cells = nbformat.read(path, as_version=4).cells
    except (nbformat.reader.NotJSONError, nbformat.ValidationError) as error:
        raise Wrong(f"{path.name} cannot be read as a notebook: {str(error)[:60]}",
                    code="unreadable_notebook") from error
    for number, cell in enumerate(cells, 1):
        name = f"{path} cell {number}"
        # A cell has no file: its lines are given to linecache, which tracebacks and `inspect` read.
        # (size, mtime, lines, name): an mtime of None keeps the entry in checkcache().
        linecache.cache[name] = len(cell.source), None, cell.source.splitlines(True), name
        try:
            yield name, ast.parse(cell.source if cell.cell_type == "code" else "", name)
        except SyntaxError:
            continue  # a magic command, or something half written


def _is_kept(node, values) -> bool:
    if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
        return False
    name = node.targets[0].id
    return name not in values and (name.isupper() or _is_literal(node.value))


def _is_literal(node) -> bool:
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True
