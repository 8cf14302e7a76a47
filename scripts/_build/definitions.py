"""What a solution defines, without what it runs: for tests and benches."""

import ast
import linecache
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def definitions(name: str, **values) -> SimpleNamespace:
    """The functions and classes of solutions/NAME.py, and of its assignments those to capitals.

    values replace what the source assigns, for example PRESET=...; checks and pictures do not run.
    """
    path = ROOT / "solutions" / f"{name}.py"
    tree = ast.parse(path.read_text(), str(path))
    kept = [node for node in tree.body if isinstance(node, _KEPT) or _is_constant(node, values)]
    namespace = {"__name__": "__main__", **values}
    linecache.checkcache(str(path))
    exec(compile(ast.Module(kept, []), str(path), "exec"), namespace)
    return SimpleNamespace(**namespace)


def _is_constant(node, values) -> bool:
    return (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id.isupper() and node.targets[0].id not in values)
