import pytest
from _grade.lessons import read_lessons
from grading import ROOT


@pytest.fixture(scope="package")
def lessons():
    return read_lessons(ROOT)
