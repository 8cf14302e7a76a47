"""A guess that a student writes down before a run, to be drawn beside the result."""

import math
from dataclasses import dataclass

from labs.exercises.numbers import as_number
from labs.exercises.verdicts import COLOURS, SIGNS, card
from labs.pictures import palette

_guesses: dict[str, float] = {}


@dataclass(frozen=True)
class Guess:
    """The answer to `question`, a number written down before the run; None while there is none.
    Draws itself."""

    question: str
    value: float | None

    def __repr__(self):
        if self.value is None:
            return f"○ no guess yet for {self.question}: put a number in place of ..."
        return f"your guess, {self.question}: {self.value:.10g}"

    def _repr_html_(self):
        if self.value is None:
            return card(COLOURS[None], f"{SIGNS[None]} No guess yet",
                        f"for {self.question}: put a number in place of ...")
        return card(palette.GUESS_CARD, f"Your guess: {self.value:.10g}", self.question)


def guess(exercise: str, question: str, value) -> Guess:
    """Writes down the guess that belongs to an exercise, to be drawn beside the result.

    exercise: the key under which charts find it, for example "3.8", or "3.8b" for a second one.
    question: what is guessed, with its unit, for the student to read. value: a number; `...` means
    that there is no guess yet. Raises TypeError where value is neither.
    """
    if value is ...:
        _guesses.pop(exercise, None)
        return Guess(question, None)
    number = as_number(value)
    if number is None or not math.isfinite(number):
        raise TypeError(f"a guess is one number, for example "
                        f"labs.guess({exercise!r}, {question!r}, 1.5)")
    _guesses[exercise] = number
    return Guess(question, number)


def guessed(exercise: str) -> float | None:
    """The guess that was written down for an exercise, or None."""
    return _guesses.get(exercise)
