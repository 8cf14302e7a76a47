"""Judges a numeric answer: whether it is a number, whether it is the right one, and which common
mistake explains a wrong one."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations
from numbers import Real
from typing import Any

from labs.checks.generator import is_graded
from labs.checks.tolerances import FLOAT32
from labs.checks.verdicts import Wrong, kind_of
from labs.words import format_distinct


@dataclass(frozen=True)
class Cause:
    """What may explain one wrong number: the number that a known mistake leads to in this case, in
    the answer's unit. sentence: continues after the number and a colon. is_pair: of two mistakes
    that are made together."""

    code: str
    number: float
    sentence: str
    hint: str = ""
    is_pair: bool = False


@dataclass(frozen=True)
class Mistake:
    """A known way to get a formula wrong. number(case): the number that it leads to in any case of
    the exercise, in the answer's unit."""

    code: str
    number: Callable[[Any], float]
    sentence: str
    hint: str = ""

    def cause(self, case: Any) -> Cause:
        return Cause(self.code, self.number(case), self.sentence, self.hint)


class Single(float):
    """A number that came as float32, of which only seven digits count: judge_number allows for
    their rounding, also after a change of units."""

    def __mul__(self, factor):
        return Single(float(self) * factor)

    def __truediv__(self, divisor):
        return Single(float(self) / divisor)


def as_number(value) -> int | float | None:
    """Returns a number as Python's int or float: one of Python (a Fraction or a Decimal too), of
    NumPy, or in a tensor or an array of one element. None for anything else, and for a bool."""
    is_single = isinstance(value, Single) or str(getattr(value, "dtype", "")).endswith("float32")
    # NumPy's scalars and tensors of one element; .item() of a larger one raises.
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, TypeError, ValueError):  # an array of several numbers
            return None
    # bool is a subclass of int: True would be accepted as 1.
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        return None
    if isinstance(value, int):
        return int(value)
    return Single(value) if is_single else float(value)


def number_or_none(answer: Callable[..., object]) -> int | float | None:
    """The number that answer() returns, or None where it fails or returns none: it is asked only to
    find out a cause."""
    try:
        return as_number(answer())
    except Exception:
        return None


def as_list(value) -> list | None:
    """Returns several values as a list: a list, a tuple, a range, a generator, a NumPy array or a
    tensor of one dimension. None for anything else, and for what has no order."""
    if isinstance(value, list | tuple | range):
        return list(value)
    if inspect.isgenerator(value) or isinstance(value, map | zip | filter):
        return list(value)
    return list(value) if getattr(value, "ndim", None) == 1 else None


def require_number(returned, what: str, hint: str = "Return the number; do not print it.",
                   said: str = "it returned") -> int | float:
    """Returns `returned` as Python's int or float. Raises Wrong unless it is a finite number. said:
    the words between `what` and the value, of what is no function's result."""
    number = as_number(returned)
    if number is None:
        raise Wrong(f"{what}: {said} {kind_of(returned)}, not a number", hint, code="not_a_number")
    # math.isfinite converts to float, which raises OverflowError for more than 1,024 bits.
    if isinstance(number, int) and number.bit_length() > 1000:
        raise Wrong(f"{what}: {said} a number of {number.bit_length()} bits", hint,
                    code="not_a_number")
    if not math.isfinite(number):
        raise Wrong(f"{what}: {said} {number}, not a number", "Is something divided by zero?",
                    code="not_a_number")
    return number


def require_numbers(returned, names: tuple[str, ...], what: str,
                    said: str = "it returned") -> tuple[int | float, ...]:
    """Returns one number for each name. Raises Wrong unless `returned` is so many numbers, in a
    tuple, a list, an array or a tensor. said: as of `require_number`."""
    values = require_several(returned, names, f"{what}: {said}", "numbers")
    return tuple(require_number(value, f"{what}, {name}", said=said)
                 for value, name in zip(values, names, strict=True))


def require_named(returned, names: tuple[str, ...], what: str) -> dict[str, int | float]:
    """Returns name -> number. Raises Wrong unless `returned` is a dictionary with a number for each
    of these keys and no other. what: the function that returned it."""
    if not isinstance(returned, Mapping):
        raise Wrong(f"{what} returned {kind_of(returned)}, not a dictionary",
                    f"Its keys are {', '.join(names)}.", code="not_a_dictionary")
    if set(returned) != set(names):
        missing = [name for name in names if name not in returned]
        more = [str(key) for key in returned if key not in names]
        raise Wrong(f"{what} returned a dictionary " + " and ".join(
            [*([f"without {', '.join(missing)}"] if missing else []),
             *([f"with {', '.join(more)} in addition"] if more else [])]),
            f"Its keys are {', '.join(names)}, and nothing else.", code="wrong_keys")
    return {name: require_number(returned[name], f"{what}, {name}") for name in names}


def require_positive(number: float, what: str) -> float:
    """Returns the number. Raises Wrong unless it is above 0."""
    if number <= 0:
        raise Wrong(f"{what}: it returned {number:,.6g}, not a number above 0",
                    code="not_positive")
    return number


def require_several(returned, names: tuple[str, ...], what: str, things: str = "values",
                    hint: str = "") -> list:
    """Returns one value for each name. Raises Wrong unless `returned` is so many values, in
    whatever keeps their order (`as_list`). what: as the message begins, for example "2.6: start
    returned". things: what they are, for the message. hint: instead of one that
    gives the names."""
    values = as_list(returned)
    if values is None or len(values) != len(names):
        raise Wrong(f"{what} {kind_of(returned)}, not {len(names)} {things}",
                    hint or f"Return {', '.join(names)}, in this order.", code="wrong_count")
    return values


def judge_number(got, want: float, causes: Iterable[Cause], what: str, unit: str = "",
                 hint: str = "", *, source: str = "it is", rel_tol: float = 1e-9,
                 abs_tol: float = 1e-12) -> None:
    """Raises Wrong unless `got` is a number close to `want`: with the causes whose number is close
    to `got` (two at most), or with their ratio and `hint` where there is none.

    what: what is judged, as the message begins. source: the words before `want`, which is not said
    where points are given. rel_tol, abs_tol: as of `math.isclose`; a number in float32 is never
    held to more than its precision.
    """
    number = require_number(got, what)
    # A result computed with float32 tensors is right if its seven digits are.
    if isinstance(number, Single):
        rel_tol = max(rel_tol, FLOAT32)

    def is_close(value):
        return math.isclose(number, value, rel_tol=rel_tol, abs_tol=abs_tol)

    # Invariant: the number is the formula's. The known mistakes are compared only after that,
    # because in some cases a mistake leads to the right number too.
    if is_close(want):
        return
    yours, wanted = format_distinct(number, want)
    said = f"{what}: you say {yours}{unit and ' '}{unit}"
    said += ", which is not right" if is_graded() else f", {source} {wanted}"
    # Two mistakes may lead to one number, and then both are named; a pair of mistakes only where
    # none alone explains it.
    found = [cause for cause in causes if is_close(cause.number)]
    if found := [cause for cause in found if not cause.is_pair] or found:
        hints = dict.fromkeys(cause.hint or hint for cause in found[:2])
        sentences = dict.fromkeys(cause.sentence for cause in found[:2])  # one, if rounded twice
        raise Wrong(f"{said}: " + ", or ".join(sentences),
                    " Or: ".join(filter(None, hints)), code=found[0].code)
    factor = "" if is_graded() else _factor(number, want)
    raise Wrong(said + factor, hint, code="wrong_number")


def pairs(causes: Iterable[Cause], want: float) -> list[Cause]:
    """Returns a cause for every two mistakes that are made together, each of which moves the number
    away from `want` by as much as alone. Its code is the first one's."""
    return [Cause(one.code, one.number + other.number - want,
                  f"{one.sentence} and {other.sentence}", one.hint or other.hint, is_pair=True)
            for one, other in combinations(causes, 2)]


def likeliest_cause(mistakes: Sequence[Mistake], cases: Sequence, answers: Sequence[float | None],
                    at: int) -> list[Cause]:
    """Returns the cause of the wrong answers[at]: of the mistakes that lead to it, the one that
    leads to most of the other answers too. Several mistakes may lead to one number, and only the
    other cases tell them apart. answers: one for each case, None where there is none. Returns an
    empty list where no mistake leads to answers[at]."""
    def leads(mistake, place):
        found = answers[place]
        return found is not None and math.isclose(mistake.number(cases[place]), found,
                                                  rel_tol=FLOAT32)

    found = [mistake for mistake in mistakes if leads(mistake, at)]
    return [max(found, key=lambda mistake: sum(
        leads(mistake, place) for place in range(len(cases)))).cause(cases[at])] if found else []


def common_cause(mistakes: Sequence[Mistake], cases: Sequence, answers: Sequence[float | None],
                 at: int, rel_tol: float = FLOAT32) -> list[Cause]:
    """Returns the cause of the wrong answers[at]: the first mistake that leads to every answer, the
    right ones too; an empty list where none does. So no cause is named that one of the cases
    contradicts. answers: one for each case, None where there is none."""
    def leads(mistake, place):
        return answers[place] is None or math.isclose(mistake.number(cases[place]), answers[place],
                                                      rel_tol=rel_tol)

    return next(([mistake.cause(cases[at])] for mistake in mistakes
                 if all(leads(mistake, place) for place in (at, *range(len(cases))))), [])


def require_signature(function: Callable, names: tuple[str, ...]) -> None:
    """Raises Wrong unless `function` can be called with one argument for each name."""
    try:
        inspect.signature(function).bind(*names)
    except TypeError as error:
        raise Wrong(f"{function.__name__}({', '.join(names)}) cannot be called: {error}",
                    "Keep the first line of the function as it was.",
                    code="wrong_signature") from None


def _factor(number, want) -> str:
    """How many times the right number it is, or by how much it is off where that is hardly more or
    less than once."""
    if not number or not want:
        return ""
    if f"{number / want:.4g}" != "1":
        return f", {number / want:.4g}x"
    return f", {abs(number - want):,.4g} too {'much' if number > want else 'little'}"
