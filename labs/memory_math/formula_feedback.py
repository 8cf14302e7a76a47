"""Feedback on a student's formula: whether it returned a number, and which common mistakes explain
a wrong one."""

import inspect
import math
from dataclasses import dataclass
from itertools import combinations

from labs.exercises.verdicts import Wrong, kind_of

TOLERANCE = 1e-9  # relative: formulas divide, so they are compared as floats are


@dataclass(frozen=True)
class Cause:
    """A common mistake as the cause of a wrong number: how much it adds to the right one, what it
    is, and a hint. Two causes may explain a number together, except for those that are `alone`."""

    adds: float
    description: str
    hint: str = ""
    alone: bool = False

    @classmethod
    def returning(cls, value: float, expected: float, description: str, hint: str = ""):
        """The cause for a formula to return `value` where `expected` is right."""
        return cls(value - expected, description, hint, alone=True)


def is_close(returned: float, expected: float) -> bool:
    """Whether two numbers agree up to the rounding of floats."""
    return abs(returned - expected) <= TOLERANCE * max(abs(expected), 1)


def require_signature(function, names: tuple[str, ...]):
    """Raises Wrong unless `function` can be called with one argument for each name."""
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise Wrong(f"{function.__name__}({', '.join(names)}) cannot be called: {error}",
                    "Keep the first line of the function as it was.") from None


def finite_number(returned, what: str) -> float:
    """`returned`, if it is a finite number; raises Wrong if not."""
    if isinstance(returned, bool) or not isinstance(returned, int | float):
        raise Wrong(f"{what}: it returned {kind_of(returned)}, not a number",
                    "Return the number; do not print it.")
    if not math.isfinite(returned):
        raise Wrong(f"{what}: it returned {returned}, not a number",
                    "Is something divided by zero?")
    return returned


def finite_numbers(returned, names: tuple[str, ...], what: str) -> tuple[float, ...]:
    """`returned`, if it is one finite number for each name; raises Wrong if not."""
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        raise Wrong(f"{what}: it returned {kind_of(returned)}, not {len(names)} numbers",
                    f"Return {', '.join(names)}, in this order.")
    return tuple(finite_number(value, f"{what}, {name}")
                 for value, name in zip(returned, names, strict=True))


def require_value(returned: float, expected: float, what: str, unit: str, causes: list[Cause],
                  hint: str = "", source: str = "it is"):
    """Raises Wrong unless `returned` is a number close to `expected`. source: of the latter."""
    if not is_close(finite_number(returned, what), expected):
        raise wrong_value(f"{what}: your formula says {_text(returned)} {unit}, "
                          f"{source} {_text(expected)}", returned, expected, causes, hint)


def wrong_value(sentence: str, returned: float, expected: float, causes: list[Cause],
                hint: str = "") -> Wrong:
    """The sentence as a Wrong, with the cause, or the two causes, that explain the difference;
    with the ratio and `hint` where none does."""
    found = _explanation(returned, expected, causes)
    if not found:
        return Wrong(sentence + (f", {returned / expected:.4g}x" if expected else ""), hint)
    return Wrong(f"{sentence}: {' and '.join(cause.description for cause in found)}",
                 found[0].hint or hint)


def _explanation(returned, expected, causes) -> tuple[Cause, ...]:
    causes = [cause for cause in causes if cause.adds]
    pairs = combinations([cause for cause in causes if not cause.alone], 2)
    for chosen in (*((cause,) for cause in causes), *pairs):
        if is_close(returned, expected + sum(cause.adds for cause in chosen)):
            return chosen
    return ()


def _text(value) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"
