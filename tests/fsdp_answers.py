"""What the tests of notebook 04's wrong answers share: the solution, and how a table of answers is
tried."""

from collections.abc import Callable

import pytest
from _build.definitions import definitions
from answers import assert_rejected, judge_in_one_launch

import labs.fsdp as lab
from labs.training.presets import preset

# Checks whose answers are judged in one launch -> on how many ranks. Of one that records memory a
# rank would judge each answer beside what gloo's threads have not freed of the last.
IN_ONE_LAUNCH = {lab.check_from_meta: 4, lab.check_loop: 2, lab.check_scaled_step: 2}

right = definitions("04_fsdp", PRESET=preset("laptop"))
_verdicts = {}


def _name_of(answer) -> str:
    parts = answer if isinstance(answer, tuple) else (answer,)
    return "-".join(getattr(part, "__name__", str(part)) for part in parts)


def cases(check: Callable, table: list) -> list:
    """Returns a pytest case for each answer of a table: (answer, expected), or a right answer."""
    rows = [row if isinstance(row, tuple) and isinstance(row[-1], str) else (row,) for row in table]
    return [pytest.param(check, answer, *rest, id=f"{check.__name__}-{_name_of(answer)}")
            for answer, *rest in rows]


def judge(check, answer, request=None):
    """Returns the verdict; an answer of several functions is a tuple. request: pytest's, of a test
    with parameters `check` and `answer`, whose other answers may be judged in the same launch."""
    if check not in IN_ONE_LAUNCH or request is None:
        return check(*answer) if isinstance(answer, tuple) else check(answer)
    if (check, answer) not in _verdicts:
        chosen = [item.callspec.params for item in request.session.items
                  if item.path == request.path and hasattr(item, "callspec")]
        mine = [one["answer"] for one in chosen if one["check"] is check]
        verdicts = judge_in_one_launch(check, [(one,) for one in mine], IN_ONE_LAUNCH[check])
        _verdicts.update({(check, one): verdict
                          for one, verdict in zip(mine, verdicts, strict=True)})
    return _verdicts[check, answer]


def rejected(check, answer, expected, request=None):
    assert_rejected(judge(check, answer, request), expected)


def accepted(check, answer, request=None):
    verdict = judge(check, answer, request)
    assert verdict.passed, verdict
