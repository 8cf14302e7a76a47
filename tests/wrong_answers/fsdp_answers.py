"""What the tests of notebook 04's wrong answers share: the solution, and how a table of answers is
tried."""

import re

import pytest
from _build.definitions import definitions

from labs.training.presets import preset

right = definitions("04_fsdp", PRESET=preset("laptop"))


def _name_of(answer) -> str:
    parts = answer if isinstance(answer, tuple) else (answer,)
    return "-".join(getattr(part, "__name__", str(part)) for part in parts)


def cases(table: dict) -> list:
    """Returns a pytest case for each answer of a table, check -> [(answer, words)] or [answer]."""
    rows = [(check, *(row if isinstance(row, tuple) and isinstance(row[-1], (str, re.Pattern))
                        else (row,)))
            for check, answers in table.items() for row in answers]
    return [pytest.param(check, answer, *rest, id=f"{check.__name__}-{_name_of(answer)}")
            for check, answer, *rest in rows]


def judge(check, answer):
    """Returns the verdict; an answer of several functions is a tuple."""
    return check(*answer) if isinstance(answer, tuple) else check(answer)


def rejected(check, answer, words):
    """words: a string that the verdict contains, or a compiled pattern."""
    verdict = judge(check, answer)
    assert verdict.passed is False, verdict
    found = words in str(verdict) if isinstance(words, str) else words.search(str(verdict))
    assert found, verdict


def accepted(check, answer):
    verdict = judge(check, answer)
    assert verdict.passed, verdict
