"""The exercises whose answers are judged by the values that they return, for tests of their checks:
the solution of each, and the wrong answers that the tests of its check try."""

import functools
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from _build.definitions import definitions
from _grade import judged_apart
from _grade.lessons import read_lessons
from ddp_answers import Answers

from labs.checks.verdicts import Verdict
from labs.training.presets import preset

ROOT = Path(__file__).resolve().parents[1]
# Their checks record or measure runs, train models, or search for seconds.
SLOW = frozenset("1.1 1.5 1.7 2.1 5.1 5.3 5.4 5.5 5.8 6.4 6.11 7.25 8.11 9.5".split())

_REJECTING = {"assert_rejected", "rejected"}  # of tests: functions that hold a verdict to its words


@dataclass(frozen=True)
class ValueExercise:
    """number: "7.14". check: its name in the package `lab`. solution: its arguments."""

    number: str
    check: str
    lab: object
    solution: tuple

    def judge(self, *answers) -> Verdict:
        return getattr(self.lab, self.check)(*answers)

    @property
    def tests(self) -> object:
        """The module with the tests of its check."""
        package, module = inspect.unwrap(getattr(self.lab, self.check)).__module__.split(".")[1:]
        return importlib.import_module(f"{package}.test_{module}")

    def wrong_answers(self) -> list[tuple[tuple, str]]:
        """(answers, expected code) of each case of its tests of wrong answers."""
        tests, right, found, last = self.tests, getattr(self.lab, self.check), [], []

        def check(*answers, **_):
            last[:] = [answers]
            return Verdict(self.number, False, "")

        def rejected(verdict, *expected):
            if verdict is check:
                check(*expected[0])
            found.append((last[0], expected[-1]))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.lab, self.check, check)
            for name in {self.check, *_REJECTING} & set(vars(tests)):
                patch.setattr(tests, name, rejected if name in _REJECTING else check)
            for name, value in list(vars(tests).items()):
                if name.startswith("test_") and _REJECTING & set(value.__code__.co_names):
                    for case in _cases(value):
                        _attempt(value, case)
                # those of 02, which are judged in one launch
                rows = value.rows if isinstance(value, Answers) else []
                found += [row[1:] for row in rows
                          if row[0] is right and len(row) == 3 and isinstance(row[2], str)]
        return found


def _attempt(test, case) -> None:
    names = inspect.signature(test).parameters
    try:
        test(**{name: case.get(name) for name in names})
    except Exception:  # it goes on to ask what the verdict says, or needs a fixture
        pass


def _cases(test: Callable) -> list[dict]:
    """The arguments of each case of a test."""
    marks = [mark for mark in getattr(test, "pytestmark", [])
             if mark.name == "parametrize" and len(mark.args) == 2]
    found = []
    for values in itertools.product(*(mark.args[1] for mark in marks)):
        case = {}
        for mark, value in zip(marks, values, strict=True):
            names = mark.args[0]
            names = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
            row = value.values if hasattr(value, "marks") else value
            if len(names) == 1 and not hasattr(value, "marks"):
                row = (row,)
            case |= dict(zip(names, row, strict=True))
        found.append(case)
    return found


@functools.cache
def value_exercises() -> dict[str, ValueExercise]:
    """Number -> exercise, of those that are judged apart by what they return."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))
    found = {}
    for lesson in read_lessons(ROOT):
        own = [each for each in lesson.exercises if each.number in judged_apart.VALUES]
        if not own:
            continue
        names = vars(definitions(lesson.name, PRESET=preset("laptop")))
        if lesson.name == "06_scaling":  # the notebook computes it by calling the answer
            names["claimed"] = names["efficiency"](2, 1.5, 1), names["efficiency"](2, 1.7, 1)
        lab = importlib.import_module(lesson.package)
        for each in own:
            solution = tuple(eval(text, dict(names)) for text in each.arguments)
            found[each.number] = ValueExercise(each.number, each.check, lab, solution)
    return found
