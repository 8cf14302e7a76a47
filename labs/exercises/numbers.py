"""Judges a numeric answer: whether it is a number, whether it is the right one, and which common
mistake explains a wrong one."""

import inspect
import math
from collections.abc import Callable, Iterable
from itertools import combinations
from numbers import Real

from labs.exercises.verdicts import Wrong, kind_of

# A common mistake: the number that it leads to, what it is, and a hint (may be empty).
Cause = tuple[float, str, str]

_FLOAT32 = 1e-6  # relative: what a few operations in float32 may be off by


def as_number(value) -> int | float | None:
    """Returns a number of Python, of NumPy, or in a tensor of one element as Python's int or float.
    None for anything else, and for a bool."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, TypeError, ValueError):  # an array of several numbers
            return None
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    return value if isinstance(value, int) else float(value)


def require_number(returned, what: str,
                   hint: str = "Return the number; do not print it.") -> int | float:
    """Returns `returned` as Python's int or float. Raises Wrong unless it is a finite number."""
    number = as_number(returned)
    if number is None:
        raise Wrong(f"{what}: it returned {kind_of(returned)}, not a number", hint)
    if not math.isfinite(number):
        raise Wrong(f"{what}: it returned {number}, not a number", "Is something divided by zero?")
    return number


def require_numbers(returned, names: tuple[str, ...], what: str) -> tuple[int | float, ...]:
    """Returns one number for each name. Raises Wrong unless `returned` is so many numbers."""
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        raise Wrong(f"{what}: it returned {kind_of(returned)}, not {len(names)} numbers",
                    f"Return {', '.join(names)}, in this order.")
    return tuple(require_number(value, f"{what}, {name}")
                 for value, name in zip(returned, names, strict=True))


def judge_number(got, want: float, causes: Iterable[Cause], what: str, unit: str = "",
                 hint: str = "", *, source: str = "it is", rel_tol: float = 1e-9,
                 abs_tol: float = 1e-12) -> None:
    """Raises Wrong unless `got` is a number close to `want`: with the first cause whose number is
    close to `got`, or with their ratio and `hint` where there is none.

    what: what is judged, as the message begins. source: the words before `want`. rel_tol, abs_tol:
    as of `math.isclose`; a number in float32 is never held to more than its precision.
    """
    if str(getattr(got, "dtype", "")).endswith("float32"):
        rel_tol = max(rel_tol, _FLOAT32)
    number = require_number(got, what)

    def is_close(value):
        return math.isclose(number, value, rel_tol=rel_tol, abs_tol=abs_tol)

    if is_close(want):
        return
    said = f"{what}: you say {_text(number)}{unit and ' '}{unit}, {source} {_text(want)}"
    for value, sentence, own_hint in causes:
        if is_close(value):
            raise Wrong(f"{said}: {sentence}", own_hint or hint)
    raise Wrong(said + (f", {number / want:.4g}x" if number and want else ""), hint)


def pairs(causes: Iterable[Cause], want: float) -> list[Cause]:
    """Returns a cause for every two mistakes that are made together, each of which moves the number
    away from `want` by as much as alone."""
    return [(a + b - want, f"{first} and {second}", first_hint or second_hint)
            for (a, first, first_hint), (b, second, second_hint) in combinations(causes, 2)]


def require_signature(function: Callable, names: tuple[str, ...]) -> None:
    """Raises Wrong unless `function` can be called with one argument for each name."""
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise Wrong(f"{function.__name__}({', '.join(names)}) cannot be called: {error}",
                    "Keep the first line of the function as it was.") from None


def _text(value) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"
