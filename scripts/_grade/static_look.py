"""What a submission's code says that no answer needs, found without running it."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from _grade import syntax
from _grade.submissions import root_of

# What leads from a function or an object to what a check keeps to itself, and no audit event says.
_ATTRIBUTES = {
    "__globals__", "__closure__", "__builtins__", "cell_contents", "__subclasses__",
    "__array_interface__", "__array_struct__", "__torch_function__", "__torch_dispatch__",
    "_construct_storage_from_data_pointer", "ctypeslib", "__loader__"}
_GETTERS = {"getattr", "attrgetter", "methodcaller", "__getattribute__", "vars"}
_KNOWING = {"checks", "predictions", "ground_truth"}  # said of any object
_LOOKING = {"dir", "help", "print", "repr", "type"}  # may be given a package of labs
_ROOT = Path(__file__).resolve().parents[2]
_LABS = _ROOT / "labs"
_PACKAGES = {path.parent.name for path in _LABS.glob("*/scaffold.py")}  # one for each notebook
# An import of what checks are made of; a notebook's scaffold is the student's to use.
_OF_CHECKS = re.compile(rf"labs\.(checks\b|({'|'.join(sorted(_PACKAGES))})\.(?!scaffold\b))")


def findings(body: Iterable[ast.stmt], imports: frozenset[str] | None = None) -> Iterator[str]:
    """Yields what is wrong, a sentence's end each. imports: what `notebooks_imports` returns, where
    the notebooks are out of sight."""
    imports = notebooks_imports() if imports is None else imports
    nodes = [each for statement in body for each in ast.walk(statement)]
    labs = _names_of_labs(nodes)
    modules = {"torch", "dist", "sys", "os", "builtins", "numpy", "np", "math"} | labs
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports_of_labs(node, imports)
        elif isinstance(node, ast.Attribute):
            yield from _attribute(node, modules, labs)
        elif isinstance(node, ast.Call):
            yield from _call(node, modules, labs)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _text(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name in _ATTRIBUTES:
            yield f"defines {node.name}"


def answers_of_labs(body: Iterable[ast.stmt], imports: frozenset[str] | None = None
                    ) -> Iterator[str]:
    """Yields what asks labs for an exercise's answer, a sentence's end each. imports: as `findings`
    has it."""
    imports = notebooks_imports() if imports is None else imports
    nodes = [each for statement in body for each in ast.walk(statement)]
    labs = _names_of_labs(nodes)
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports_of_labs(node, imports)
        elif isinstance(node, ast.Attribute) and _is_inner(node, labs):
            yield f"uses {ast.unparse(node)}"
        elif isinstance(node, ast.Call):
            yield from _call_of_labs(node, labs)


def forgeries(body: Iterable[ast.stmt], imports: frozenset[str] | None = None) -> Iterator[str]:
    """Yields what nobody writes by accident, also where the code is not run: a check's sign, and
    imports of what checks are made of. imports: as `findings` has it."""
    imports = notebooks_imports() if imports is None else imports
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (why for why in _imports_of_labs(node, imports)
                        if _OF_CHECKS.search(why))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from _forged_sign(node.value)


def _names_of_labs(nodes) -> set[str]:
    """The names that hold labs or one of its packages: by an import, or by `name = lab`."""
    found = {"labs", "lab"}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.asname or "labs" for alias in node.names
                      if alias.name.split(".")[0] == "labs"}
    for node in nodes:
        value = getattr(node, "value", None)
        if isinstance(value, ast.Name) and value.id in found:
            targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
            found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


@functools.cache
def notebooks_imports() -> frozenset[str]:
    """The statements by which the notebooks, and the scripts that they write, import labs."""
    solutions = _ROOT / "solutions"
    texts = [path.read_text(encoding="utf-8") for path in [*solutions.glob("[0-9]*.py"),
                                                           *solutions.glob("scripts/*.py")]]
    return frozenset(line for text in texts
                     for line in re.findall(r"^(?:import|from) labs\b.*$", text, re.MULTILINE))


@functools.cache
def offered_by_labs() -> frozenset[str]:
    """What `from labs import ...` gives a student."""
    tree = syntax.parse((_LABS / "__init__.py").read_text(encoding="utf-8"))
    return frozenset(alias.name for block in tree.body if isinstance(block, ast.If)
                     for node in block.body for alias in node.names)


@functools.cache
def inner_modules() -> frozenset[str]:
    """Names of modules of labs that no notebook uses: they measure and compute what exercises ask
    for."""
    offered = {alias.asname or alias.name for path in [_LABS / "__init__.py",
                                                       *_LABS.glob("*/__init__.py")]
               for node in ast.walk(syntax.parse(path.read_text(encoding="utf-8")))
               if isinstance(node, ast.ImportFrom) for alias in node.names}
    names = {path.stem for path in _LABS.rglob("*.py")} | {path.name for path in _LABS.iterdir()}
    return frozenset(names - _PACKAGES - offered)


def _imports_of_labs(node, imports):
    """Only as the notebooks do it, or a name that labs itself offers: its modules know the
    answers."""
    if isinstance(node, ast.ImportFrom):
        of_labs = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        offered = node.module == "labs" and {a.name for a in node.names} <= offered_by_labs()
    else:
        of_labs, offered = [alias.name for alias in node.names], False
    of_labs = [name for name in of_labs if name.split(".")[0] == "labs"]
    if of_labs and not offered and ast.unparse(node) not in imports:
        yield f"imports {of_labs[0]}, which checks are made of"


def _attribute(node, modules, labs):
    root = root_of(node)
    if node.attr in _ATTRIBUTES:
        yield f"uses .{node.attr}"
    elif _is_inner(node, labs):
        yield f"uses {ast.unparse(node)}"
    elif not isinstance(node.ctx, ast.Load) and root in modules and \
            ".backends." not in ast.unparse(node):
        yield f"replaces {ast.unparse(node)}"


def _is_inner(node, labs) -> bool:
    """Whether it is a module of labs that no notebook uses, or all that labs has."""
    return root_of(node) in labs and (
        node.attr in inner_modules() or _is_named_as_its_package(node) or node.attr == "__dict__"
    ) and bool(re.fullmatch(r"[\w.]+", ast.unparse(node)))  # an item is data, not a module


def _is_named_as_its_package(node) -> bool:
    """Whether it is `lab.manual_ddp`, the file of exercise 2.4 in the package of that name."""
    return node.attr in _PACKAGES and isinstance(node.value, ast.Name) and node.value.id == "lab"


def _call(node, modules, labs):
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    first = root_of(node.args[0]) if node.args else ""
    if name in ("setattr", "delattr") and first in modules:
        yield f"replaces something of {ast.unparse(node.args[0])}"
    else:
        yield from _call_of_labs(node, labs)


def _call_of_labs(node, labs):
    name = getattr(node.func, "id", getattr(node.func, "attr", ""))
    first = root_of(node.args[0]) if node.args else ""
    if name == "vars" and first in labs:
        yield f"uses vars({ast.unparse(node.args[0])})"
    elif name in _GETTERS:
        known = inner_modules() if first in labs else _KNOWING
        for text in (each.value for each in node.args if isinstance(each, ast.Constant)):
            if isinstance(text, str) and known & set(text.split(".")):
                yield f"uses {text!r} of labs"
    elif name not in _LOOKING:
        yield from (f"passes {each.id} to a function" for each in node.args
                    if isinstance(each, ast.Name) and each.id in labs)


def _forged_sign(value):
    if "✓ Exercise" in value:
        yield "prints what a check prints"


def _text(value):
    yield from _forged_sign(value)
    if value in _ATTRIBUTES:
        yield f"uses {value!r}"
