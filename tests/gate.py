"""The gate: the tests that `scripts/test` runs of all, chosen by how long they took in the last run
of everything (tests/durations.json).

What is quick is taken whole. Of a test whose cases together take long, the first and the last one
are: wrong answers stand in that order, the laziest first and the nearest to right last; of right
ones, and of a file that is no exercise's, fewer. A case marked `gate`, which stands for its kind,
is always taken.
"""

import functools
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

QUICK = 2.0  # seconds of all cases of one test
OF_A_FILE = 6.0  # seconds of the tests of a file that is no exercise's
ROOT = Path(__file__).resolve().parent.parent
_RIGHT = re.compile("right|accepted|passes")
_whole: list[str] | None = None  # in the gate: files of which all tests are taken


def chosen(items: list, seconds: dict[str, float], whole: list[str]) -> list:
    """The items to run. seconds: of each test that takes long, by its node ID; one that is not
    there is quick, or new. whole: files, from the root, of which all tests are taken."""
    kept, by_file = set(), defaultdict(list)
    for item in items:
        by_file[item.nodeid.partition("::")[0]].append(item)
    seconds = _shared(items, seconds)
    for file, of_file in by_file.items():
        if file in whole:
            kept |= set(of_file)
            continue
        answers = is_of_an_exercise(file)
        some = [item for cases in _tests(of_file, answers).values()
                for item in _some(cases, seconds)]
        kept |= set(some if answers else _shortest(some, seconds))
        kept |= {item for item in of_file if item.get_closest_marker("gate")}
    return [item for item in items if item in kept]


@functools.cache
def is_of_an_exercise(file: str) -> bool:
    """Whether a test file, from the root, tries the answers to an exercise: labs has a file of the
    same name, with its check."""
    name = re.fullmatch(r"tests/(\w+)/test_(\w+)\.py", file)
    check = name and ROOT / "labs" / name[1] / f"{name[2]}.py"
    return bool(check) and check.is_file() and "\n@check(" in check.read_text(encoding="utf-8")


def _shared(items, seconds) -> dict[str, float]:
    """What each test takes when it is run: at least the mean of its test's cases, or of its class,
    where one may have waited for what all of them need."""
    units = defaultdict(list)
    for item in items:
        above, _, last = item.nodeid.rpartition("::")
        units[above if "::" in above else item.nodeid.partition("[")[0]].append(item.nodeid)
    means = {test: sum(seconds.get(each, 0.0) for each in tests) / len(tests)
             for tests in units.values() for test in tests}
    return {test: max(mean, seconds.get(test, 0.0)) for test, mean in means.items()}


def begin(whole: list[str]) -> None:
    """Tells tests of several answers each that only some are to be tried; see `chosen`."""
    global _whole
    _whole = whole


def some_of(answers: Sequence, most: int = 2) -> list:
    """Of the answers that the current test tries, in the gate the first and the last (most=1: the
    first); else all."""
    file = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
    if _whole is None or file in _whole:
        return list(answers)
    return [*answers[:1], *answers[1:][-1:]][:most]


def _tests(items, are_answers) -> dict[tuple, list]:
    """The cases of each test, of answers those to each exercise."""
    found = defaultdict(list)
    for item in items:
        exercise = _exercise(item) if are_answers else ""
        found[item.nodeid.partition("[")[0], exercise].append(item)
    return found


def _exercise(item) -> str:
    """What names the exercise of a case: its check, or the beginning of the case's name."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for name in ("exercise", "check", "show"):
        if name in parameters:
            return getattr(parameters[name], "__name__", str(parameters[name]))
    return item.callspec.id.partition("-")[0] if "number" in parameters else ""


def _some(cases, seconds) -> list:
    if sum(seconds.get(item.nodeid, 0.0) for item in cases) <= QUICK:
        return cases
    ends = cases[:1] if _RIGHT.search(cases[0].name) else [cases[0], cases[-1]]
    return list(dict.fromkeys(ends))


def _shortest(items, seconds) -> list:
    """The shortest tests of a file, at least one, as many as its time allows."""
    taken, left = [], OF_A_FILE
    for item in sorted(items, key=lambda item: seconds.get(item.nodeid, 0.0)):
        left -= seconds.get(item.nodeid, 0.0)
        if left < 0 and taken:
            break
        taken.append(item)
    return taken
