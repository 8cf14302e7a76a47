"""What a check says of an exercise, and what a student guessed before the run."""

import functools
import html
from dataclasses import dataclass

from labs.workers import places
from labs.workers.failures import LaunchError, RankFailed

_COLOURS = {True: "#1a7f37", False: "#b42318", None: "#6b7280"}
_SIGNS = {True: "✓", False: "✗", None: "○"}


class Wrong(Exception):
    """Raised inside a check: the invariant that broke, and a hint. Travels from a rank."""

    def __init__(self, sentence: str, hint: str = ""):
        super().__init__(sentence, hint)
        self.sentence, self.hint = sentence, hint

    def __str__(self):
        return self.sentence


@dataclass(frozen=True)
class Verdict:
    """passed: True, False, or None while the exercise waits. Draws itself in a notebook."""

    exercise: str
    passed: bool
    sentence: str
    hint: str = ""

    def __str__(self):
        hint = f"\n  Hint: {self.hint}" if self.hint else ""
        return f"{_SIGNS[self.passed]} Exercise {self.exercise}  {self.sentence}{hint}"

    __repr__ = __str__

    def _repr_html_(self):
        colour = _COLOURS[self.passed]
        hint = f"<div style='color:#6b7280;margin-top:2px'>{_html(self.hint)}</div>"
        title = f"{_SIGNS[self.passed]} Exercise {self.exercise}"
        sentence = html.escape(self.sentence)
        return (f"<div style='border-left:4px solid {colour};padding:6px 12px;margin:4px 0'>"
                f"<b style='color:{colour}'>{title}</b>&ensp;"
                f"<span style='white-space:pre-wrap'>{sentence}</span>"
                f"{hint * bool(self.hint)}</div>")


def check(exercise: str):
    """Makes a check of a function that returns a sentence when all is well and raises `Wrong`
    when not. The check returns a Verdict and never raises because of the student's code."""
    return functools.partial(_judged, exercise, lambda verdict_or_sentence: Verdict(
        exercise, True, verdict_or_sentence))


def shows(exercise: str):
    """For pictures made with the student's code: the picture, or a Verdict that says why not."""
    return functools.partial(_judged, exercise, lambda picture: picture)


def _judged(exercise, finish, function):
    @functools.wraps(function)
    def judged(*answers, **options):
        verdicts = [answer for answer in answers if isinstance(answer, Verdict)]
        if verdicts:
            return verdicts[0]  # of an earlier cell, whose result this one needs
        if any(answer is ... for answer in answers):
            return Verdict(exercise, None, "is waiting for your answer")
        try:
            return finish(function(*answers, **options))
        except Exception as error:
            return _verdict(exercise, error)

    return judged


def _verdict(exercise, error) -> Verdict:
    cause = error.cause if isinstance(error, RankFailed) and error.cause is not None else error
    if isinstance(cause, NotImplementedError) and str(cause).startswith("Exercise"):
        own = str(cause) == f"Exercise {exercise}"
        return Verdict(exercise, None, "is waiting for your code" if own else f"waits for {cause}")
    if isinstance(cause, Wrong):
        return Verdict(exercise, False, cause.sentence, cause.hint)
    if isinstance(error, LaunchError):
        return Verdict(exercise, False, str(error))
    own = [place for place in places.traceback_of(error) if place.is_students]
    if not own:
        raise error  # no line of the student's is involved: a mistake of ours must not be hidden
    return Verdict(exercise, False, f"{type(error).__name__}: {error}\n"
                                    f"    {own[-1]}, in {own[-1].function}:  {own[-1].source}")


def _html(text):
    return html.escape(text).replace("\n", "<br>")


@dataclass(frozen=True)
class Guess:
    """A number written down before the run. value is None while there is none."""

    name: str
    value: float

    def __repr__(self):
        if self.value is None:
            return f"○ no guess yet for {self.name}: put a number in place of ..."
        return f"your guess, {self.name}: {self.value:g}"


_guesses = {}


def guess(name: str, value) -> Guess:
    """Writes down a guess, to be drawn beside the result. `...` means: not yet."""
    if value is ...:
        _guesses.pop(name, None)
        return Guess(name, None)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a guess is one number, for example labs.guess({name!r}, 1.5)")
    _guesses[name] = float(value)
    return Guess(name, float(value))


def guessed(name: str):
    """The guess written down under `name`, or None."""
    return _guesses.get(name)
