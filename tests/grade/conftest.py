import pytest
from _grade import judged_apart
from _grade.lessons import read_lessons
from grading import ROOT


@pytest.fixture(scope="package")
def lessons():
    return read_lessons(ROOT)


@pytest.fixture
def under_guard(monkeypatch):
    """All exercises are checked beside the answer, 2.1 too, as those on ranks are."""
    monkeypatch.setattr(judged_apart, "EXERCISES", frozenset())
