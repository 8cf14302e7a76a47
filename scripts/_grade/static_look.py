"""What a submission's code says that no answer needs, found without running it."""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from _grade.submissions import root_of

# Modules that no exercise needs and that reach around the checks.
_MODULES = {"ctypes", "_ctypes", "gc", "socket", "subprocess", "_posixsubprocess", "pty", "mmap",
            "marshal", "cffi", "posix", "_thread", "signal", "importlib", "builtins", "pickle",
            "atexit", "runpy", "code", "codeop", "inspect", "psutil", "traceback"}
_ATTRIBUTES = {
    "__globals__", "__closure__", "__code__", "__builtins__", "__wrapped__", "cell_contents",
    "__subclasses__", "tb_frame", "tb_next", "f_back", "f_locals", "f_globals", "f_code",
    "gi_frame", "cr_frame", "ag_frame", "gi_code", "_getframe", "_current_frames", "get_objects",
    "get_referrers", "get_referents", "addaudithook", "settrace", "setprofile", "co_consts",
    "__array_interface__", "__array_struct__", "__reduce__", "__reduce_ex__", "__torch_function__",
    "__torch_dispatch__", "_construct_storage_from_data_pointer", "ctypeslib", "__loader__"}
_OF_OS = {"system", "popen", "fork", "forkpty", "kill", "killpg", "abort", "_exit", "setsid",
          "execv", "execve", "execvp", "execl", "spawnv", "spawnl", "posix_spawn", "dup2"}
_BUILTINS = {"exec", "eval", "compile", "__import__", "globals", "breakpoint"}
_LABS = Path(__file__).resolve().parents[2] / "labs"


def findings(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yields what is wrong, a sentence's end each."""
    modules = {"torch", "dist", "labs", "lab", "sys", "os", "builtins", "numpy", "np", "math"}
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports(node)
        elif isinstance(node, ast.Attribute):
            yield from _attribute(node, modules)
        elif isinstance(node, ast.Call):
            yield from _call(node, modules)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _text(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name in _ATTRIBUTES:
            yield f"defines {node.name}"


@functools.cache
def inner_modules() -> frozenset[str]:
    """Names of modules of labs that no notebook uses: they measure and compute what exercises ask
    for."""
    packages = {path.parent.name for path in _LABS.glob("*/checks*")}
    offered = {alias.asname or alias.name for path in [_LABS / "__init__.py",
                                                       *_LABS.glob("*/__init__.py")]
               for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
               if isinstance(node, ast.ImportFrom) for alias in node.names}
    names = {path.stem for path in _LABS.rglob("*.py")} | {path.name for path in _LABS.iterdir()}
    return frozenset(names - packages - offered)


def _imports(node):
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [
        f"{node.module or ''}.{alias.name}" for alias in node.names]
    for name in names:
        first, *rest = name.split(".")
        if first == "labs" and (len(rest) > 2 or inner_modules() & set(rest)):
            yield f"imports {name}, which checks are made of"
        elif first in _MODULES:
            yield f"imports {first}"


def _attribute(node, modules):
    root = root_of(node)
    if node.attr in _ATTRIBUTES:
        yield f"uses .{node.attr}"
    elif root == "os" and node.attr in _OF_OS:
        yield f"calls os.{node.attr}"
    elif root == "sys" and node.attr in ("modules", "exit", "meta_path", "path_hooks"):
        yield f"uses sys.{node.attr}"
    elif ast.unparse(node.value) in ("lab", "labs") and node.attr in inner_modules():
        yield f"uses {ast.unparse(node)}"
    elif not isinstance(node.ctx, ast.Load) and root in modules and \
            ".backends." not in ast.unparse(node):
        yield f"replaces {ast.unparse(node)}"


def _call(node, modules):
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in _BUILTINS:
        yield f"calls {name}"
    elif name in ("setattr", "delattr") and node.args and root_of(node.args[0]) in modules:
        yield f"replaces something of {ast.unparse(node.args[0])}"


def _text(value):
    if "✓ Exercise" in value:
        yield "prints what a check prints"
    if "solutions/" in value or "/proc/" in value:
        yield f"names {'solutions/' if 'solutions/' in value else '/proc/'}"
    elif value in _ATTRIBUTES:
        yield f"uses {value!r}"
