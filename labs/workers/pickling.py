"""Packs a function from a cell, with everything it closes over, for the trip to the ranks."""

import inspect
import io
import pickle
import types
import warnings

from labs.workers import results, source_lines
from labs.workers.failures import LaunchError

LARGE = 50_000_000  # bytes


class CannotSend(LaunchError):
    """A function, argument or captured value that cannot be pickled; the message names it."""


def pack(fn, args) -> bytes:
    """`(fn, args)` as bytes. Raises CannotSend, and warns above 50 MB, naming the culprit."""
    if not callable(fn):
        raise TypeError(f"launch(fn, ...): fn must be a function, not {_described(fn)}")
    try:
        data = results.dumps((fn, args))
    except Exception as error:
        name, value = _culprit(fn, args) or ("the function", fn)
        raise CannotSend(
            f"{name} cannot be sent to the ranks: it is {_described(value)}. "
            f"Make it inside the function, or pass what it is made from. ({_short(error)})"
        ) from None
    if len(data) > LARGE:
        name, size = max(((name, _size(value)) for name, value in _captured(fn, args)),
                         key=lambda pair: pair[1], default=("the function", len(data)))
        warnings.warn(f"{len(data) / 1e6:.0f} MB travel to every rank, most of it {name} "
                      f"({size / 1e6:.0f} MB): make it inside the function instead",
                      stacklevel=source_lines.steps_to_caller())
    return data


def unpack(data: bytes):
    """The `(fn, args)` that `pack` packed."""
    return pickle.loads(data)


def pack_result(value) -> list:
    """A rank's return value as `results.pack` packs it. Raises CannotSend."""
    try:
        return results.pack(value)
    except MemoryError:
        raise
    except Exception as error:
        raise CannotSend(f"it returned {_described(value)}, which cannot be sent back "
                         f"({_short(error)}). Return numbers, tensors, lists or dicts.") from None


def _captured(fn, args):
    """(name, value) of everything that would travel: arguments, closure, globals; functions of
    the same notebook are followed."""
    for number, value in enumerate(args, 1):
        yield f"argument {number}", value
    seen, todo = set(), [fn]
    while todo:
        function = inspect.unwrap(getattr(todo.pop(), "__func__", fn))
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        names = inspect.getclosurevars(function)
        for name, value in {**names.globals, **names.nonlocals}.items():
            if isinstance(value, types.ModuleType):
                continue
            if isinstance(value, types.FunctionType) and value.__module__ == "__main__":
                todo.append(value)
            else:
                yield f"{name!r}, used in {function.__name__}(),", value


def _culprit(fn, args):
    return next((pair for pair in _captured(fn, args) if _size(pair[1]) is None), None)


def _size(value):
    try:
        return len(results.dumps(value))
    except Exception:
        return None


def _described(value) -> str:
    if isinstance(value, io.IOBase):
        return f"an open file ({getattr(value, 'name', '?')})"
    if isinstance(value, types.GeneratorType):
        return "a generator"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _short(error) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
