"""A guess that a student writes down before a run, to be drawn beside the result."""

import math
from dataclasses import dataclass

from labs.exercises.verdicts import COLOURS, SIGNS, card

_COLOUR = "#d6249f"  # as labs.pictures.palette.GUESSED


@dataclass(frozen=True)
class Guess:
    """A number written down before the run. value is None while there is none."""

    name: str
    value: float

    def __repr__(self):
        if self.value is None:
            return f"○ no guess yet for {self.name}: put a number in place of ..."
        return f"your guess, {self.name}: {self.value:.10g}"

    def _repr_html_(self):
        if self.value is None:
            return card(COLOURS[None], f"{SIGNS[None]} No guess yet",
                         f"for {self.name}: put a number in place of ...")
        return card(_COLOUR, f"Your guess: {self.value:.10g}", self.name)


_guesses = {}


def guess(name: str, value) -> Guess:
    """Writes down a guess, to be drawn beside the result. `...` means: not yet."""
    if value is ...:
        _guesses.pop(name, None)
        return Guess(name, None)
    value = _number(value)
    if value is None:
        raise TypeError(f"a guess is one number, for example labs.guess({name!r}, 1.5)")
    _guesses[name] = float(value)
    return Guess(name, float(value))


def _number(value):
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and not isinstance(value, bool) else None


def guessed(name: str):
    """The guess written down under `name`, or None."""
    return _guesses.get(name)
