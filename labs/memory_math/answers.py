"""What a student's formula gave back: whether it is a number, and by which slip it is another."""

import inspect
import math
from dataclasses import dataclass
from itertools import combinations

from labs.exercises.verdicts import Wrong, kind_of

CLOSE = 1e-9  # relative: formulas divide, so they are compared as floats are


@dataclass(frozen=True)
class Slip:
    """A mistake that formulas make: how much it adds to the right answer, in words, and a hint."""

    adds: float
    words: str
    hint: str = ""


def close(said: float, want: float) -> bool:
    """Equal up to the rounding of floats."""
    return abs(said - want) <= CLOSE * max(abs(want), 1)


def number(said, what: str) -> float:
    """`said`, if it is a finite number. Raises Wrong."""
    if isinstance(said, bool) or not isinstance(said, int | float):
        raise Wrong(f"{what}: it returned {kind_of(said)}, not a number",
                    "Return the number; do not print it.")
    if not math.isfinite(said):
        raise Wrong(f"{what}: it returned {said}, not a number", "Is something divided by zero?")
    return said


def numbers(said, names: tuple, what: str) -> tuple:
    """`said`, if it is one number for each name. Raises Wrong."""
    if not isinstance(said, tuple | list) or len(said) != len(names):
        raise Wrong(f"{what}: it returned {kind_of(said)}, not {len(names)} numbers",
                    f"Return {', '.join(names)}, in this order.")
    return tuple(number(value, f"{what}, {name}") for value, name in zip(said, names, strict=True))


def takes(function, names: tuple):
    """Raises Wrong unless `function` can be called with so many arguments."""
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise Wrong(f"{function.__name__}({', '.join(names)}) cannot be called: {error}",
                    "Keep the first line of the function as it was.") from None


def compare(said: float, want: float, what: str, unit: str, slips: list, hint: str = ""):
    """Raises Wrong unless `said` is `want`: with the slip, or the two slips, that explain it."""
    if close(said, want):
        return
    found = _explanation(said, want, slips)
    words = f"{what}: your formula says {_number(said)} {unit}, it is {_number(want)}"
    if not found:
        ratio = f", {said / want:.4g}x" if want else ""
        raise Wrong(f"{words}{ratio}", hint)
    raise Wrong(f"{words}: {' and '.join(slip.words for slip in found)}", found[0].hint or hint)


def _explanation(said, want, slips) -> tuple:
    slips = [slip for slip in slips if slip.adds]
    for together in (1, 2):
        for chosen in combinations(slips, together):
            if close(said, want + sum(slip.adds for slip in chosen)):
                return chosen
    return ()


def instead(value: float, want: float, words: str, hint: str = "") -> Slip:
    """The slip of a formula that gives `value` where `want` is right."""
    return Slip(value - want, words, hint)


def _number(value) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"
