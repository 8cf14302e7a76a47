"""Points as a gradebook imports them: one column a notebook, one row a student of the roster.

What is nobody's on the roster is left out, because an importer would make a student of it, or stop.
A notebook that was not handed in has 0. Who has a file that could not be read has no grade for what
was not graded: look at the file first.
"""

import csv
import re
from pathlib import Path

from _grade import lessons, table
from _grade.handed_in import Row
from _grade.roster import Roster, Student
from _grade.sandbox import ROOT


def canvas(path: Path, rows: list[Row], roster: Roster) -> None:
    """Writes what Canvas's gradebook imports (Grades, Import): the columns Student, ID, SIS User
    ID, SIS Login ID, Section, then assignments; the second row is "Points Possible".

    Sources: the importer, lib/gradebook_importer.rb of
    https://github.com/instructure/canvas-lms; and "Import CSV File to Carmen Grades",
    https://teaching.resources.osu.edu/toolsets/carmencanvas/guides/calculating-final-grades/
    import-csv-file-carmen-grades. It asks for "Student" first, "ID" second, and "Section" last
    before the assignments; finds a student by ID (Canvas's own number), else by SIS User ID, SIS
    Login ID, or name; and an assignment by "title (number)" or by its title. It makes a new one of
    a title that it does not know.

    Where the roster is a gradebook that Canvas exported, its header has the assignments' numbers,
    and they are used: "02 Manual DDP (12345)".
    """
    worth = _worth(rows)
    known = {_title(text): text for text in roster.header if _title(text) != text}
    names = lessons.titles(ROOT)
    lines = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section",
              *(known.get(names[lesson], names[lesson]) for lesson in worth)],
             ["    Points Possible", "", "", "", "", *(f"{of:g}" for of in worth.values())]]
    for row in rows:
        if one := row.student:
            # By the other columns Canvas finds the student, so they stay as the roster has them.
            lines.append([table.safe(one.name), one.canvas, one.id, one.login, one.section,
                          *_points(row, worth)])
    _write(path, lines)


def moodle(path: Path, rows: list[Row]) -> None:
    """Writes what Moodle imports (Grades, Import, CSV file): Username, ID number and Email address
    as far as each student has them, then grade items.

    Sources: MoodleDocs, "Grade import", https://docs.moodle.org/311/en/Grade_import; and the
    importer, grade/import/csv/classes/load_data.php of https://github.com/moodle/moodle. In the
    form one column is mapped to the user, which must be filled in every row, and each other one
    to a grade item or to "new grade item", whose maximum is 100. It stops at a user that it does
    not know, and at a value above 100. A value above the item's maximum becomes the maximum
    (bounded_grade in lib/grade/grade_item.php).
    """
    rows, worth, names = [row for row in rows if row.student], _worth(rows), lessons.titles(ROOT)
    columns = moodle_columns([row.student for row in rows])
    lines = [[*columns, *(names[lesson] for lesson in worth)]]
    for row in rows:
        lines.append([*(getattr(row.student, name) for name in columns.values()),
                      *_points(row, worth, "-")])
    _write(path, lines)


def moodle_columns(students: list[Student]) -> dict[str, str]:
    """Moodle's name of a column -> our field, of those in which each student has an entry. Not "0":
    PHP's empty() is true for it, and Moodle then gives the row's points to the student of the row
    above (map_user_data_with_value)."""
    found = {"Username": "login", "ID number": "id", "Email address": "email"}
    return {head: name for head, name in found.items()
            if all(getattr(one, name) not in ("", "0") for one in students)}


def _worth(rows) -> dict[str, float]:
    """Name of a notebook -> its points, of those that were graded and give some."""
    found: dict[str, dict[str, float]] = {}
    for one in (one for row in rows for one in row.records):
        found.setdefault(one["lesson"], {}).update(
            {each["number"]: each["of"] for each in one["exercises"]})
    sums = {lesson: sum(found[lesson].values()) for lesson in sorted(found)}
    return {lesson: of for lesson, of in sums.items() if of}


def _points(row, worth, none="") -> list[str]:
    """none: what the importer reads as no grade."""
    got = {one["lesson"]: sum(each["points"] for each in one["exercises"]) for one in row.records}
    missing = none if row.unreadable else "0"
    return [f"{got[lesson]:g}" if lesson in got else missing for lesson in worth]


def _title(text) -> str:
    """An assignment's header without Canvas's number."""
    return re.sub(r"\s*\(\d+\)$", "", text)


def _write(path, lines):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
