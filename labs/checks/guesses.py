"""A guess that a student writes down before a run, to be drawn beside the result."""

import math
from dataclasses import dataclass

from labs.checks.numbers import as_number
from labs.checks.verdicts import COLOURS, SIGNS, card, kind_of
from labs.pictures import palette
from labs.workers import notebook_cells

_guesses: dict[str, float] = {}
_questions: dict[str, str] = {}


@dataclass(frozen=True)
class Guess:
    """The answer to `question`, a number written down before the run; None while there is none.
    problem: what is wrong with what was given. Draws itself."""

    question: str
    value: float | None
    problem: str = ""

    def __repr__(self):
        if self.value is None:
            return f"○ no guess yet for {self.question}: {self._what_to_do}"
        return f"your guess, {self.question}: {self.value:.10g}"

    def _repr_html_(self):
        if self.value is None:
            return card(COLOURS[None], f"{SIGNS[None]} No guess yet",
                        f"for {self.question}: {self._what_to_do}")
        return card(palette.GUESS_CARD, f"Your guess: {self.value:.10g}", self.question)

    @property
    def _what_to_do(self) -> str:
        return self.problem or "put a number in place of ..."


def guess(exercise: str, question: str, value) -> Guess:
    """Writes down the guess that belongs to an exercise, to be drawn beside the result.

    exercise: the key under which charts find it, for example "3.8", or "3.8b" for a second one.
    question: what is guessed, with its unit, for the student to read. value: a number; `...` means
    that there is no guess yet. Anything else is no guess either, and the result says so.
    """
    # Removed first: a guess that is withdrawn or invalid leaves no earlier one, and a new one comes
    # last in all_guesses().
    _guesses.pop(exercise, None)
    if value is ...:
        return Guess(question, None)
    number = as_number(value)
    if number is None or not math.isfinite(number):
        got = kind_of(value) if number is None else f"{number}"
        return Guess(question, None, f"a guess is one number, for example 1.5, and this is {got}")
    _guesses[exercise], _questions[exercise] = number, question
    return Guess(question, number)


def guessed(exercise: str) -> float | None:
    """The guess that was written down for an exercise, or None; also None where its last cell is
    not Python: then what was written down before is no guess any more."""
    return None if f"guess {exercise}" in notebook_cells.unread else _guesses.get(exercise)


def all_guesses() -> list[tuple[str, str, float]]:
    """(exercise, question, guess) of all that were written down, in that order."""
    return [(exercise, _questions[exercise], value) for exercise, value in _guesses.items()
            if guessed(exercise) is not None]
