"""SYLLABUS.md and the answers to readings: each exercise and question of the notebooks is there."""

import re

import _notebooks
import pytest
from _build.exercises import exercises, is_optional
from _build.minutes import SITTING, TIME
from _build.source import read_source
from _grade import lessons
from test_notebooks import A_LAB, NAMES, ROOT

WEEKS = [[part.strip() for part in row.split("|")[1:-1]] for row in
         re.findall(r"^\| \d+ \|.*$", (ROOT / "SYLLABUS.md").read_text(), re.MULTILINE)
         if row.count("|") == 7]
LAB = re.compile(r"(\d\d[ab]?)(?:, (first|second|third) sitting)?$")
READING = (ROOT / "solutions" / "reading.md").read_text()


def cells_of(name):
    return read_source(ROOT / "solutions" / f"{name}.py", name)[0]


def required():
    """The notebooks that the term needs: those that are not optional as a whole."""
    return [name for name in NAMES if not is_optional(cells_of(name))]


def sittings_of(number):
    """The minutes of a notebook's sittings, from its text."""
    [name] = [name for name in NAMES if _notebooks.number(name) == number]
    cells = cells_of(name)
    later = [int(said) for cell in cells for said in SITTING.findall(cell.source)]
    return [int(TIME.search(cells[0].source)[1]) - sum(later), *later]


def labs_of(week):
    """(number of a notebook, number of its sitting) of a week's lab; a notebook without a sitting
    is done whole."""
    for part in week[1].split("; "):
        number, ordinal = LAB.match(part).groups()
        chosen = range(len(sittings_of(number)))
        yield from ((number, one) for one in chosen
                    if ordinal is None or one == ("first", "second", "third").index(ordinal))


def test_each_sitting_is_in_one_week_that_is_no_longer_than_a_lab():
    done = [lab for week in WEEKS for lab in labs_of(week)]
    assert len(WEEKS) == 17 and sorted(done) == sorted(
        (number, one) for number in map(_notebooks.number, required())
        for one in range(len(sittings_of(number))))
    for week in WEEKS:
        minutes = sum(sittings_of(number)[one] for number, one in labs_of(week))
        assert int(week[2]) == minutes <= A_LAB, week[0]


def test_optional_notebooks_are_named_and_none_is_in_a_week():
    text = (ROOT / "SYLLABUS.md").read_text()
    optional = [_notebooks.number(name) for name in NAMES if name not in required()]
    assert optional == ["07c", "07d"] and all(number in text for number in optional)


def test_each_exercise_that_is_not_optional_is_graded_in_one_week():
    said = [number for week in WEEKS for number in numbers(week[4])]
    wanted = [exercise.number for name in NAMES for exercise in exercises(cells_of(name))
              if not exercise.optional]
    assert sorted(said) == sorted(wanted)


def numbers(text):
    """The exercises of "0.1–0.4, 1.6"."""
    for part in text.split(", "):
        first, _, last = part.partition("–")
        lesson, begin = first.split(".")
        end = last.split(".")[1] if last else begin
        yield from (f"{lesson}.{number}" for number in range(int(begin), int(end) + 1))


@pytest.mark.parametrize("name", NAMES)
def test_the_question_of_each_reading_has_an_answer(name):
    text = "\n".join(cell.source for cell in cells_of(name) if cell.kind == "markdown")
    rows = text.split("## What to read")[1].split("\n## ")[0]
    titles = [*re.findall(r"^\| \[([^\]]+)\]", rows, re.MULTILINE),
              *re.findall(r"^- [^*\n]+\*\[?([^\]*]+)[\]*]", rows, re.MULTILINE)]
    section = READING.split(f"\n## {_notebooks.number(name)} ")[1].split("\n## ")[0]
    answered = re.findall(r"^- \*\*(.+?)\.\*\* \S", section, re.MULTILINE)
    assert len(titles) >= 3 and {" ".join(title.split()) for title in titles} <= set(answered)


def test_what_no_check_reads_has_a_rubric():
    written = (ROOT / "solutions" / "written.md").read_text()
    wanted = [number for number, found in lessons.headings(ROOT).items() if found.written]
    assert wanted == re.findall(r"^## (\d+\.\d+) ", written, re.MULTILINE) == ["2.10"]
