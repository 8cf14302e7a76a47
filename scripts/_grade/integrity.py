"""Whether functions and constants that checks use are what they were before a submission ran."""

import builtins
import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

_MODULES = ("builtins", "sys", "os", "math", "operator", "random", "time", "pickle", "io", "copy",
            "itertools", "functools", "collections", "contextlib", "statistics", "threading",
            "inspect", "re", "fractions", "unittest.mock", "hashlib", "posixpath", "pathlib",
            "multiprocessing.connection", "multiprocessing.reduction", "numpy", "torch",
            "torch._tensor", "torch.functional", "torch.nn.functional", "torch.nn",
            "torch.optim", "torch.autograd", "torch.distributed",
            "torch.distributed.distributed_c10d", "torch.multiprocessing", "cloudpickle")
_CLASSES = ("Tensor", "nn.Module", "nn.Parameter", "optim.Optimizer", "Size", "Generator")
_CONSTANTS = (int, float, complex, str, bytes, tuple, frozenset, list, dict, set)
_CALLED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
           types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType,
           property, staticmethod, classmethod, functools.partial,
           type(functools.cache(len)))
# What checks themselves replace while they run.
_REPLACED = {("builtins", "input"), ("sys", "stdout"), ("sys", "stderr")}
# What of it checks replace temporarily, by functions of labs; None: any name of it.
_REPLACED_BY_LABS = {
    "builtins": {"hash"}, "os": None,
    "torch.distributed": None, "torch.distributed.distributed_c10d": None,
    "torch.nn.functional": {"dropout", "scaled_dot_product_attention"},
    "torch.autograd": {"backward"}, "torch": {"get_rng_state"}, "torch.Tensor": {"pin_memory"},
    "labs.meters.trace_file": {"_open"}}
# By these a value's class would decide itself whether it is right.
COMPARISON_METHODS = (
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__torch_function__",
    "__torch_dispatch__", "__array__", "__array_ufunc__", "__sub__", "__rsub__", "__bool__",
    "__getattribute__", "__reduce__", "__reduce_ex__")


def baseline() -> tuple[Callable[[bool], str], Callable[[], str]]:
    """Notes what is there: of each module and class its functions, classes and constants. Returns
    changed(strict): what is not as it was, as a sentence's end, or empty; and deceptive(): a new
    kind of tensor or number that decides itself what it equals. strict: also what checks replace
    temporarily, by functions that they make.

    Functions, not a class: classes can be found by `object.__subclasses__`, and changed.
    """
    import torch

    modules = sys.modules
    loaded = {name: module for name, module in list(modules.items())
              if name.split(".")[0] in ("torch", "labs", "numpy", "builtins", "sys")}
    spaces, copies, names = [], [], []
    for name in dict.fromkeys([*loaded, *_MODULES]):
        if name in modules and (name.startswith("labs") or name in _MODULES):
            _note(spaces, copies, names, name, vars(modules[name]), name.startswith("labs"))
    for path in _CLASSES:
        kind = functools.reduce(getattr, path.split("."), torch)
        _note(spaces, copies, names, f"torch.{path}", vars(kind), False)
    tensors = _subclasses()

    def changed(strict: bool) -> str:
        if sys.modules is not modules:
            return "replaces sys.modules"
        for name, module in loaded.items():
            if modules.get(name) is not module:
                return f"replaces the module {name}"
        return (_changed_spaces(spaces, strict) or _changed_names(names)
                or _changed_copies(copies))

    return changed, functools.partial(_deceptive_classes, tensors)


def _note(spaces, copies, names, name, space, ours) -> None:
    """Adds what is in a module's or class's dictionary: (name, dictionary, what must stay) to
    spaces, (name, holder, what it holds) to copies, (name, dictionary, its keys) to names."""
    dunders = name.removeprefix("torch.") in _CLASSES
    kept = {key: value for key, value in list(space.items())
            if _is_kept(key, value, ours) or dunders and _is_called(value)}
    spaces.append((name, space, tuple(kept.items())))
    if ours or name not in sys.modules:  # of torch's modules, which grow, only the classes
        names.append((name, space, frozenset(space)))
    for key, value in kept.items() if ours else ():
        if isinstance(value, list | dict | set):
            copies.append((f"{name}.{key}", value, value.copy()))
        cells = value.__closure__ if isinstance(value, types.FunctionType) else None
        for cell in cells or ():
            copies.append((f"{name}.{key}", cell, _content(cell)))
        if isinstance(value, type) and value.__module__ == name:
            _note(spaces, copies, names, f"{name}.{key}", vars(value), False)


def _changed_spaces(spaces, strict) -> str:
    for name, space, kept in spaces:
        for key, value in kept:
            now = space.get(key)
            if now is not value and not _is_torchs(now, value) and (
                    strict or not _is_checks(name, key, now)):
                return f"replaces {name}.{key}"
    return ""


def _changed_names(names) -> str:
    for name, space, known in names:
        for key in space.keys() ^ known:
            if key not in space:
                return f"removes {name}.{key}"
            if _hides(name, key, space[key]):
                return f"hides what {name} calls {key}"
    return ""


def _changed_copies(copies) -> str:
    for name, holder, before in copies:
        if isinstance(holder, types.CellType):
            if _content(holder) is not before:
                return f"replaces what {name} uses"
        elif not _same(holder, before):
            return f"changes {name}"
    return ""


def _is_kept(key, value, ours) -> bool:
    if key.startswith("__") and key not in ("__init__", "__call__", "__eq__", "__new__",
                                            "__torch_function__", "__setattr__", "__getattr__",
                                            "__str__", "__repr__", "__post_init__", "__import__"):
        return False
    return _is_called(value) or ours and key.isupper() and issubclass(type(value), _CONSTANTS)


def _is_called(value) -> bool:
    return issubclass(type(value), _CALLED)  # isinstance would ask torch's objects: some warn


def _hides(name, key, now) -> bool:
    """Whether a new name of a module stands before a builtin one, or of a class before one that it
    inherits; labs and packages may do that to a class."""
    if name in sys.modules:
        return hasattr(builtins, key)
    code = getattr(now, "__code__", None)
    known = code is not None and ("/labs/" in code.co_filename or "-packages/" in code.co_filename)
    return callable(now) and not known and not key.startswith("_abc")


def _is_torchs(now, before) -> bool:
    """Whether torch has wrapped it: an optimizer's first instance does so with its class's step."""
    return (type(now) is types.FunctionType and getattr(now, "__wrapped__", None) is before
            and now.__name__ == "step" and now.__code__.co_filename.endswith("torch/optim/"
                                                                             "optimizer.py"))


def _is_checks(name, key, now) -> bool:
    """Whether a check put it there: a function made inside one of labs."""
    if (name, key) in _REPLACED:
        return True
    names = _REPLACED_BY_LABS.get(name, ())
    refused = name.startswith("labs.") and key == "__init__"  # a class that an exercise forbids
    if names is not None and key not in names and not refused:
        return False
    if name == "builtins":  # 8.10 has ranks salt it, by an object of a class of labs
        return type(now).__module__.startswith("labs.") and not _is_submissions(type(now))
    module = getattr(now, "__module__", "") or ""
    code = getattr(now, "__code__", None)
    return (type(now) is types.FunctionType and module.startswith("labs.")
            and "/labs/" in code.co_filename and "<locals>" in now.__qualname__)


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None


def _same(now, before) -> bool:
    """Whether all that was there is there still; a table that remembers results may grow."""
    if isinstance(now, dict):  # not by now.get: a check may have replaced hash (8.10)
        kept = {(id(key), id(value)) for key, value in now.items()}
        return all((id(key), id(value)) in kept for key, value in before.items())
    if isinstance(now, set):
        return now >= before
    return len(now) >= len(before) and all(map(operator.is_, now, before))


def _subclasses() -> set[type]:
    import numpy
    import torch

    return {kind for base in (torch.Tensor, torch.nn.Parameter, numpy.ndarray, float)
            for kind in type.__subclasses__(base)}


def _deceptive_classes(known) -> str:
    """A new kind of tensor or number that the submission made; or empty."""
    for kind in _subclasses() - known:
        if _is_submissions(kind) and (issubclass(kind, float) or _defines_comparison(kind)):
            return f"makes a kind of tensor or number of its own, {kind.__name__}"
    return ""


def deceptive_type(value: Any, depth: int = 3) -> str:
    """What is wrong with the kind of a value that a submission returned, or empty."""
    kind = type(value)
    if kind in (int, float, bool, str, type(None)):
        return ""
    if kind in (list, tuple, set, dict):
        parts = list(value.values() if kind is dict else value)[:1000] if depth else ()
        return next((found for part in parts if (found := deceptive_type(part, depth - 1))), "")
    if not _is_submissions(kind):
        return ""
    if issubclass(kind, int | float | complex | str | bytes) or _defines_comparison(kind):
        return f"returns a {kind.__name__}, a class of its own that decides what it equals"
    return ""


def _defines_comparison(kind) -> bool:
    for base in kind.__mro__:
        if not _is_submissions(base):
            continue
        for name in COMPARISON_METHODS:
            code = getattr(vars(base).get(name), "__code__", None)
            if name in vars(base) and (code is None or not code.co_filename.startswith("<")):
                if vars(base)[name] is not None:
                    return True
    return False


def _is_submissions(kind) -> bool:
    """Whether a class is not where it says that it comes from. A class can lie on that, too."""
    module = sys.modules.get(getattr(kind, "__module__", None))
    if module is None or getattr(module, "__name__", "") == "__main__":
        return True
    found = module
    for part in kind.__qualname__.split("."):
        if part == "<locals>":
            return False
        found = getattr(found, part, None)
    return found is not kind
