"""A class with a roster: whose a submission is, late marks, and what gradebooks import."""

import csv
import json
import os
import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from _grade import course, files, handed_in, roster, session
from _grade.__main__ import check
from grading import ROOT, students
from test_grading import Said

CLASS = """\
Full Name;Student-ID;E-Mail
Ada Lovelace;0017;ada@x.edu
Zoë van Dijk;18;zvd@x.edu
Grace Hopper;19;grace.hopper@x.edu
=Emmy;20;emmy@x.edu
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*arguments) grades in/ with the roster; (exit code, rows of the table). run.write(name,
    answer) hands a notebook in."""
    monkeypatch.setattr(session, "Sandbox", Said)
    monkeypatch.setattr(Said, "graded", [])
    (tmp_path / "in").mkdir()
    (tmp_path / "class.csv").write_text(CLASS, encoding="utf-8")

    def called(*arguments):
        out = tmp_path / "grades.csv"
        options = check([str(tmp_path / "in"), "--out", str(out), "--only", "2.1,2.10",
                         "--at-once", "1", "--roster", str(tmp_path / "class.csv"), *arguments])
        code = course.run(options, [tmp_path / "in"], out)
        return code, rows_of(out) if out.exists() else []

    def write(name, answer=students.RIGHT[0]):
        path = tmp_path / "in" / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(students.notebook(answer)))
        return path

    called.write, called.folder = write, tmp_path
    return called


def rows_of(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_each_student_of_the_roster_has_a_row(run):
    for name in ("0017", "Zoe_van_Dijk/02_manual_ddp", "stranger"):
        run.write(name)
    code, rows = run()
    assert code == 0
    assert [(row["student"], row["id"], row["points"], row["handed in"]) for row in rows] == [
        ("Ada Lovelace", "0017", "1", "02"), ("Zoë van Dijk", "18", "1", "02"),
        ("Grace Hopper", "19", "0", "nothing"), ("'=Emmy", "20", "0", "nothing"),
        ("stranger", "", "1", "02")]
    assert {row["of"] for row in rows} == {"2"}
    assert rows[-1]["remark"] == "belongs to nobody on the roster"
    pages = sorted(path.name for path in (run.folder / "grades").glob("*.html"))
    assert pages == ["Ada-Lovelace.html", "Zoë-van-Dijk.html", "class.html", "stranger.html"]
    assert rows[0]["2.10 to read"] == "to read" and rows[2]["2.10 to read"] == ""


def test_answers_that_are_alike_are_listed(run, capsys):
    for name in ("0017", "18"):
        path = run.write(name)
        copied = (ROOT / "solutions" / "02_manual_ddp.ipynb").read_bytes()
        path.write_bytes(copied)
    run.write("19")
    assert run("--similar", "--only", "2.1,2.7")[0] == 0
    text = (run.folder / "grades" / "similar.txt").read_text()
    assert text in capsys.readouterr().out
    assert re.search("100% of .* nodes  2.7 .*: Ada Lovelace, Zoë van Dijk\n", text)
    assert "Grace" not in text


def test_what_cannot_be_read_has_a_column_of_its_own(run):
    run.write("ada@x.edu").write_text("no")
    code, rows = run()
    assert code == 1 and rows[0]["forged"] == "" and "is no notebook" in rows[0]["unreadable"]


@pytest.mark.parametrize("name", [
    "0017", "ada", "ADA@x.edu", "Ada Lovelace", "ada-lovelace", "Lovelace, Ada", "lovelace_ada",
    "lovelaceada_LATE_17_4711_02_manual_ddp", "Ada Lovelace_17_assignsubmission_file"])
def test_names_that_are_a_students(tmp_path, name):
    (tmp_path / "class.csv").write_text(CLASS, encoding="utf-8")
    found, why = roster.read(tmp_path / "class.csv").owner([name])
    assert (found.id, why) == ("0017", "")


def test_a_name_of_two_students_is_nobodys_and_an_id_decides():
    two = roster.Roster([roster.Student("Ada Byron", "1"), roster.Student("ADA BYRON", "2")])
    assert two.owner(["ada byron"]) == (
        None, "may belong to Ada Byron (1) or ADA BYRON (2): name the file by the id")
    assert two.owner(["ada byron", "2"])[0].id == "2"


def test_of_two_files_of_one_notebook_the_newer_counts(run):
    os.utime(run.write("ada", students.RIGHT[0]), (1, 1))
    run.write("0017", students.RIGHT[1])
    _, rows = run()
    assert rows[0]["points"] == "1" and len(rows) == 4
    assert rows[0]["remark"] == "ada.ipynb is not counted: 0017.ipynb is newer"


def test_what_is_late_is_marked_and_loses_nothing(run):
    due = datetime(2026, 12, 1, 23, 59)
    for name, when in (("ada", due + timedelta(hours=3)), ("18", due)):
        os.utime(run.write(name), (when.timestamp(), when.timestamp()))
    _, rows = run("--due", "2026-12-01T23:59")
    assert [(row["late"], row["points"]) for row in rows[:2]] == [("02 by 3 h", "1"), ("", "1")]


def test_nbgraders_timestamp_is_when_it_was_handed_in(tmp_path):
    path = tmp_path / "02_manual_ddp.ipynb"
    path.touch()
    (tmp_path / "timestamp.txt").write_text("2026-12-01 22:10:15.5 UTC\n")
    assert handed_in.submitted(path) == datetime(2026, 12, 1, 22, 10, 15, 500_000, UTC)
    (tmp_path / "timestamp.txt").write_text("yesterday")
    os.utime(path, (60, 60))
    assert handed_in.submitted(path) == datetime(1970, 1, 1, 0, 1, tzinfo=UTC)


@pytest.mark.parametrize(("minutes", "words"), [(-1, ""), (0, ""), (0.2, "1 min"), (59, "59 min"),
                                                (180, "3 h"), (72 * 60, "3 days")])
def test_how_late(minutes, words):
    due = datetime(2026, 12, 1, tzinfo=timezone(timedelta(hours=1)))
    assert handed_in.late_by(due + timedelta(minutes=minutes), due) == words


@pytest.mark.parametrize(("data", "words"), [
    (b"", "has no header"), (b"Ada,17\nEmmy,18\n", "has no header"),
    (b"name,id\nAda,17\nEmmy,17\n", r"has the id 17 twice: in lines 2 and 3\."),
    (b"name,email\nAda,a@x\nEmmy,A@x\n", "has the email a@x twice"),
    (b"name\nAda\nada\n", "has the name ada twice"),
    (b"name,id\n", "no students below it"), (b"name,student\nA,B\n", "two columns for the name"),
    ("name,id\nZoë,1\n".encode("latin-1"), r"is not UTF-8 \(line 2\): save it as \"CSV UTF-8\"")])
def test_what_is_wrong_with_a_roster_is_one_sentence(run, capsys, data, words):
    (run.folder / "class.csv").write_bytes(data)
    code, rows = run()
    said = capsys.readouterr().err
    assert code == 2 and rows == [] and re.search(words, said) and said.count("\n") == 1


@pytest.mark.parametrize("data", [
    "name,id,email\nAda,17,a@x\n".encode("utf-8-sig"), b"email\tname\tid\na@x\tAda\t17\n",
    "name;id;email\r\n\r\nAda;17;a@x\r\n".encode("utf-16"),
    b'First name,Surname,ID number,Email address\nAda,,17,a@x\n',
    b"Student,ID,SIS User ID,SIS Login ID,Section,02 (9)\n    Points Possible,,,,,9\n"
    b"Ada,4711,17,a,S1,\n\"Student, Test\",1,,t,S1,\n"])
def test_rosters_as_programs_write_them(tmp_path, data):
    (tmp_path / "class.csv").write_bytes(data)
    [one] = roster.read(tmp_path / "class.csv").students
    assert (one.name, one.id) == ("Ada", "17")


def test_canvas_gets_the_columns_of_its_own_export(run):
    """As gradebook_importer.rb reads them: Student, ID, ..., Section, then assignments."""
    (run.folder / "class.csv").write_text(
        "Student,ID,SIS User ID,SIS Login ID,Section,02 Manual DDP (12345),Final Score\n"
        "    Points Possible,,,,,9,\n\"Lovelace, Ada\",4711,0017,ada,S1,,\n@Bob,4712,18,bob,S1,,\n"
        "Eve,4713,19,eve,S1,,\n")
    run.write("0017")
    run.write("stranger")
    run.write("eve").write_text("no")
    path = run.folder / "canvas.csv"
    run("--canvas", str(path))
    with open(path, newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["Student", "ID", "SIS User ID", "SIS Login ID", "Section", "02 Manual DDP (12345)"],
        ["    Points Possible", "", "", "", "", "2"],
        ["Ada Lovelace", "4711", "0017", "ada", "S1", "1"],
        ["'@Bob", "4712", "18", "bob", "S1", "0"], ["Eve", "4713", "19", "eve", "S1", ""]]


def test_moodle_gets_columns_in_which_each_student_has_an_entry(run, capsys):
    run.write("0017")
    path = run.folder / "moodle.csv"
    run("--moodle", str(path))
    assert rows_of(path)[0] == {"ID number": "0017", "Email address": "ada@x.edu",
                                "02 Manual DDP": "1"}
    assert [row["02 Manual DDP"] for row in rows_of(path)] == ["1", "0", "0", "0"]
    (run.folder / "class.csv").write_text("name,id\nAda,17\nBob,\n")
    assert run("--moodle", str(path))[0] == 2
    assert "no id, email or username of each student" in capsys.readouterr().err


def test_copies_that_scripts_work_keeps_are_no_hand_in(tmp_path):
    for name in ("work/02_manual_ddp", "work/.originals/02_manual_ddp",
                 "work/02_manual_ddp.old-1"):
        path = tmp_path / "ada" / "workbook" / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    [(student, path)] = files.files_of([tmp_path])
    assert student == "ada" and path.parent.name == "work"


@pytest.mark.parametrize(("arguments", "words"), [
    (["--canvas", "c.csv"], "need a --roster"), (["--moodle", "m.csv"], "need a --roster"),
    (["--due", "tomorrow"], "is not like 2026-12-01T23:59")])
def test_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit):
        check([".", "--out", "g.csv", *arguments])
    assert words in capsys.readouterr().err
