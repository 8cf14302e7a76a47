"""Under the grader no verdict on a value exercise says the right value: who hands in twice would
have the answer from the first verdict. And no verdict has numbers of drawn cases, where a notebook
shows it run after run."""

import copy
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Real

import pytest
from _grade import judged_apart
from value_answers import SLOW, ValueExercise, value_exercises

from labs.checks.generator import GRADED, SEED
from labs.checks.verdicts import Verdict

_NUMBER = re.compile(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
# One: the value. Others: as verdicts convert units, to percent, ms, GB, GiB and the like.
_UNITS = (1, 100, 1e3, 1e-3, 1e-6, 1e-9, 2**-20, 2**-30)
DIGITS = 2  # significant ones of a number that is searched for: smaller ones are everywhere
# What they ask was measured or recorded once in this process: 1.7 on models of drawn sizes, 5.8 on
# runs in a drawn order.
MEASURED = {"1.7", "5.8"}


@dataclass
class Asked:
    """What a check asked of an answer: leaves of the arguments and of what it returned, and those
    of what the solution returns for the same arguments, of each call."""

    given: list = field(default_factory=list)
    right: list = field(default_factory=list)


def leaves(value, depth: int = 0) -> Iterator[float | str]:
    """Yields the numbers and strings in a value."""
    if isinstance(value, bool) or value is None or depth > 4:
        return
    if isinstance(value, str | Real):
        yield value if isinstance(value, str) else float(value)
    elif hasattr(value, "tolist"):
        if getattr(value, "nbytes", 0) > 256:  # no verdict lists the elements of a tensor
            return
        yield from leaves(value.tolist(), depth + 1)
    elif isinstance(value, dict):
        for each in value.values():  # keys are names that the exercise gives
            yield from leaves(each, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset | range):
        for each in value:
            yield from leaves(each, depth + 1)
    elif is_dataclass(value):
        for one in fields(value):
            yield from leaves(getattr(value, one.name), depth + 1)


def recording(answer: Callable, solution: Callable, asked: Asked) -> Callable:
    """The answer, which notes what it is asked and what would be right."""
    @functools.wraps(answer)
    def recorded(*args, **options):
        asked.right.append(_right(solution, args, options))
        asked.given.extend(leaves([args, options]))
        returned = answer(*args, **options)
        asked.given.extend(leaves(returned))
        return returned

    return recorded


def _right(solution, args, options) -> list:
    try:
        return list(leaves(solution(*copy.deepcopy(args), **copy.deepcopy(options))))
    except Exception:  # an answer that was changed before calls it with other arguments
        return []


def verdict_of(exercise: ValueExercise, answers: tuple) -> tuple[Verdict, Asked]:
    """(verdict, what was asked) of answers, of which functions are noted."""
    asked = Asked()
    noted = [recording(answer, right, asked) if callable(answer) and callable(right) else answer
             for answer, right in zip(answers, exercise.solution, strict=True)]
    asked.right += [list(leaves(right)) for right in exercise.solution if not callable(right)]
    return exercise.judge(*noted), asked


def said(verdict: Verdict, asked: Asked) -> list[str]:
    """Numbers and words of a verdict that say what is right, and were not in what the check gave to
    the answer or what it returned."""
    text = f"{verdict.sentence} {verdict.hint}"
    numbers = {value for right in asked.right for value in right if isinstance(value, float)}
    known = {value for value in asked.given if isinstance(value, float)}
    found = [token for token in _NUMBER.findall(text) if _digits(token) >= DIGITS
             and _is_one(token, numbers) and not _is_one(token, known)]
    names = {value for right in asked.right for value in right if isinstance(value, str)}
    if all(_has(verdict.sentence, name) for name in names):  # it lists all that there are
        return found
    given = "\n".join(value for value in asked.given if isinstance(value, str))
    return found + [value for value in (asked.right or [[]])[-1] if isinstance(value, str)
                    and len(value) > 2 and value not in given
                    and _has(verdict.sentence, value)]


def _has(text, word) -> bool:
    return bool(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text))


def _digits(token) -> int:
    """Significant digits, without zeros at the end."""
    return len(re.sub(r"e.*|\D", "", token).strip("0"))


def _is_one(token, values) -> bool:
    plain = token.replace(",", "")
    number = float(plain)
    decimals = len(plain.partition("e")[0].partition(".")[2])
    step = 10.0 ** ((int(plain.partition("e")[2] or 0)) - decimals)
    units = _UNITS if _digits(token) > 2 else (1,)
    return any(abs(number - unit * value) <= 0.5001 * step and value
               for value in values for unit in units)


def lazy(exercise: ValueExercise) -> Iterator[tuple]:
    """Answers of which one returns a constant or its first argument."""
    for at, right in enumerate(exercise.solution):
        answers = ([lambda *args, **_: 0, lambda *args, **_: 1.2345, lambda *args, **_: None,
                    lambda *args, **_: args[0]] if callable(right) else [0, (1, 2)])
        for answer in answers:
            yield (*exercise.solution[:at], answer, *exercise.solution[at + 1:])


def wrong_answers(exercise: ValueExercise) -> list[tuple]:
    return [*lazy(exercise), *(answers for answers, _ in exercise.wrong_answers())]


def cases(numbers):
    return [pytest.param(number, marks=[pytest.mark.slow] * (number in SLOW))
            for number in numbers]


@pytest.mark.parametrize("number", cases(sorted(judged_apart.VALUES)))
def test_a_graded_verdict_does_not_say_what_is_right(number, monkeypatch):
    monkeypatch.setenv(GRADED, "1")
    monkeypatch.setenv(SEED, "a secret")
    exercise, leaks = value_exercises()[number], {}
    for answers in wrong_answers(exercise):
        verdict, asked = verdict_of(exercise, answers)
        if found := said(verdict, asked):
            leaks[str(verdict)] = found
    assert leaks == {}


SOME = 6  # calls of each check, of the solution and of the untouched gap


@pytest.mark.parametrize("number", cases(sorted(judged_apart.VALUES)))
def test_a_verdict_has_no_number_of_drawn_cases(number):
    """Of what a notebook shows run after run: the solution's verdict, and that of what is not
    filled in."""
    exercise = value_exercises()[number]

    def unfilled(*_, **__):
        raise NotImplementedError(f"Exercise {number}")

    gap = [unfilled if callable(answer) else ... for answer in exercise.solution]
    assert len({str(exercise.judge(*exercise.solution)) for _ in range(SOME)}) == 1
    assert {str(exercise.judge(*gap)) for _ in range(SOME)} == {
        f"○ Exercise {number}  is waiting for your "
        f"{'answer' if ... in gap else 'code'}"}


@pytest.mark.parametrize("number", cases(sorted(judged_apart.VALUES - MEASURED)))
def test_no_table_has_the_answers(number):
    """Each call of a check asks something that the call before did not ask."""
    exercise = value_exercises()[number]
    calls = []
    for _ in range(2):
        asked = []
        noted = [_noting(answer, asked) if callable(answer) else answer
                 for answer in exercise.solution]
        assert exercise.judge(*noted).passed
        calls.append(set(asked))
    assert calls[1] - calls[0]


def _noting(answer, asked) -> Callable:
    @functools.wraps(answer)
    def noted(*args, **options):
        asked.append(_text([args, options]))
        return answer(*args, **options)

    return noted


def _text(value) -> str:
    """The value as a text, by which two questions are told apart."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    if hasattr(value, "tolist"):
        return repr(value.tolist())
    return repr(value)
