"""Exports as the importers read them: rules of Canvas's lib/gradebook_importer.rb, and of Moodle's
grade/import/csv/classes/load_data.php and lib/csvlib.class.php, whose lines were read for this."""

import csv
import re
from pathlib import Path

import pytest
from _grade import exports, lessons, roster
from _grade.handed_in import Row

ROOT = Path(__file__).resolve().parents[2]
# Canvas: columns of an export that are no assignments.
NO_ASSIGNMENT = "(Current|Final) (Score|Points|Grade)|Override (Score|Grade|Status)"
NUMBER = re.compile(r"\d+(\.\d+)?$")
NAMES = {"ada": "Lovelace, Ada", "zoe": "van Dijk, Zoë; Maria", "bob": 'O"Neil, Bob',
         "eve": "=cmd, Eve", "taro": "日本, 太郎"}


def record(lesson: str, points: list[float], of: list[float]) -> dict:
    numbers = [f"{lesson[:2].lstrip('0')}.{number}" for number in range(1, len(of) + 1)]
    return {"lesson": lesson, "exercises": [
        {"number": number, "points": got, "of": most}
        for number, got, most in zip(numbers, points, of, strict=True)]}


@pytest.fixture
def graded(tmp_path):
    """(roster of a gradebook that Canvas exported, its rows): 02 has a number there, 03 has none;
    every second student has handed in 03, and one file of Eve's could not be read."""
    lines = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "02 Manual DDP (9001)"],
             ["    Points Possible", "", "", "", "", "5"]]
    lines += [[name, 101 + number, f"-00{number}", login, "S1, S2", ""]
              for number, (login, name) in enumerate(NAMES.items())]
    path = tmp_path / "class.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    found = roster.read(path)
    rows = [Row(one.label, one, [record("02_manual_ddp", [1.5, number / 4], [2, 3])]
                + [record("03_zero_stages", [1 / 3], [1])] * (number % 2))
            for number, one in enumerate(found.students)]
    rows[3].records.pop()
    rows[3].unreadable = [("eve/03_zero_stages.ipynb", "is no notebook")]
    rows.append(Row("stranger", None, [record("02_manual_ddp", [2, 3], [2, 3])]))
    return found, rows


def written(path: Path) -> list[list[str]]:
    data = path.read_bytes()
    assert not data.startswith(b"\xef\xbb\xbf")  # Canvas would take the mark for part of a name
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert len({len(row) for row in rows}) == 1  # else Moodle says "csvweirdcolumns"
    return rows


def test_canvas_finds_the_header_the_maxima_and_each_student(graded, tmp_path):
    found, rows = graded
    exports.canvas(tmp_path / "canvas.csv", rows, found)
    header, maxima, *lines = written(tmp_path / "canvas.csv")
    # row_has_student_headers?, update_column_count and last_student_info_column
    assert "Student" in header[0] and "ID" in header[1] and "Section" in header[4]
    assert re.search(r"SIS\s+User\s+ID", header[2]) and re.search(r"SIS\s+Login\s+ID", header[3])
    assert header[5:] == ["02 Manual DDP (9001)", "03 ZeRO stages"]  # title_and_id
    assert "Points Possible" in maxima[0] and maxima[5:] == ["5", "1"]
    assert [line[1:4] for line in lines] == [[str(101 + number), f"-00{number}", login]
                                             for number, login in enumerate(NAMES)]
    assert not any("Points Possible" in line[0] or not any(line) for line in lines)
    grades = [cell for line in lines for cell in line[5:]]
    assert grades.count("") == 1 and all(NUMBER.match(cell) for cell in grades if cell)
    # identify_delimiter: of the first three lines, in which the separator splits all alike
    first = (tmp_path / "canvas.csv").read_text(encoding="utf-8").splitlines()[:3]
    counts = {mark: {len(next(csv.reader([line], delimiter=mark))) for line in first}
              for mark in ",;"}
    consistent = {mark: max(found) if len(found) == 1 else 0 for mark, found in counts.items()}
    assert consistent[";"] <= consistent[","] == 7


def test_moodle_finds_each_student_and_no_grade_is_a_hyphen(graded, tmp_path):
    exports.moodle(tmp_path / "moodle.csv", graded[1])
    header, *lines = written(tmp_path / "moodle.csv")
    assert header == ["Username", "ID number", "02 Manual DDP", "03 ZeRO stages"]
    # get_record asks for exactly this text: a sign before it would stop the import
    assert [line[:2] for line in lines] == [[login, f"-00{number}"]
                                            for number, login in enumerate(NAMES)]
    grades = [cell for line in lines for cell in line[2:]]
    assert grades.count("-") == 1
    assert all(NUMBER.match(cell) and float(cell) <= 100 for cell in grades if cell != "-")


def test_moodle_goes_by_no_column_that_php_takes_for_empty():
    """The points of the user "0" would be those of the student above."""
    students = [roster.Student("Ada", "17", "a@x", "ada"), roster.Student("Jo", "0", "j@x", "jo")]
    assert list(exports.moodle_columns(students)) == ["Username", "Email address"]


def test_the_notebooks_titles_are_assignments_to_canvas():
    titles = lessons.titles(ROOT).values()
    assert len(titles) == len(set(titles)) == 13
    for title in titles:
        assert not re.search(NO_ASSIGNMENT, title) and not re.search(r"\(\d+\)$", title)
        assert title == title.strip() and len(title) < 255
