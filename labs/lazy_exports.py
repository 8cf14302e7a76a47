"""The names that a package offers, each imported on first use: importing the package costs nothing
on a rank, needs no Jupyter, and loads nothing that draws."""

import ast
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

_SOLUTION = re.compile(r"\d\d[a-z]?_\w+\.py$")


def lazy_exports(package: str) -> tuple[list[str], Callable, Callable]:
    """(__all__, __getattr__, __dir__) for the package's `__init__`.

    The names are those that its `if TYPE_CHECKING:` block imports: there an editor's "go to
    definition" and type checkers find them, and here they are read from the source, since the block
    never runs. A name must differ from those of the package's own modules: importing one of them
    would hide it.
    """
    names = _imported_for_typing(package)
    main = sys.modules["__main__"]
    if package == "labs" and _SOLUTION.search(getattr(main, "__file__", None) or ""):
        # A solution that runs as a script: its first import of labs comes before all that it does.
        import_module("labs.workers.script_run").begin_if_script(main)

    def look_up(name: str):
        if name not in names:
            raise AttributeError(f"{package} has no {name!r}; it offers {', '.join(names)}")
        module, original = names[name]
        return getattr(import_module(module, package), original)

    def listed() -> list[str]:
        return sorted([*vars(sys.modules[package]), *names])

    return list(names), look_up, listed


def _imported_for_typing(package) -> dict[str, tuple[str, str]]:
    """name -> (module, the name that it has there)."""
    source = Path(sys.modules[package].__file__).read_text(encoding="utf-8")
    blocks = [node.body for node in ast.parse(source).body
              if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"]
    return {name.asname or name.name: ("." * node.level + (node.module or ""), name.name)
            for block in blocks for node in block for name in node.names}
