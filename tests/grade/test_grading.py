"""A run of scripts/grade without processes: what is graded again, kept and said."""

import csv
import json
import os
import re
import shutil
import sys

import pytest
from _grade import bubblewrap, look, session
from _grade.__main__ import check
from _grade.files import Unreadable
from _grade.sandbox import BROKEN, PASSED, TIMED_OUT, WRONG, Graded, Unavailable
from grading import ROOT, students

from labs.checks.generator import new_generator


class Said:
    """A sandbox in which every exercise passes but those of `wrong`, and `ends` interrupts."""

    wrong, ends, graded = (), (), []

    def __init__(self, *_):
        pass

    def probe(self):
        pass

    def look(self, data, known):
        found = look.look_through(data, look.Known.of_json(known))
        if "unreadable" in found:
            raise Unreadable(found["unreadable"])
        return found

    def grade(self, work):
        source = work["cells"][-1]["source"]
        if any(name in source for name in self.ends):
            Said.ends = [""]  # the next one, which waits for this thread, must not be graded either
            raise KeyboardInterrupt
        self.graded.append(work["check"])
        wrong = any(name in source for name in self.wrong)
        return Graded(WRONG if wrong else PASSED, "it is not" if wrong else "it is", "", 0.1)

    close = probe


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*arguments) grades what write(name, answer) has handed in; (exit code, rows by student).
    """
    monkeypatch.setattr(session, "Sandbox", Said)
    monkeypatch.setattr(Said, "graded", [])
    (tmp_path / "in").mkdir()

    def called(*arguments):
        out = tmp_path / "grades.csv"
        options = check([str(tmp_path / "in"), "--out", str(out), "--only", "2.1,2.2,2.11",
                         "--at-once", "1", *arguments])
        code = session.run(options, [tmp_path / "in"], out)
        with open(out, newline="") as file:
            return code, {row["student"]: row for row in csv.DictReader(file)}

    def write(name, answer):
        path = tmp_path / "in" / f"{name}.ipynb"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(students.notebook(answer)))

    called.write = write
    return called


def test_points_are_the_notebooks_or_those_that_were_asked_for(run):
    run.write("ada", students.RIGHT[0])
    assert run()[1]["ada"]["of"] == "2"  # 2.11 is optional
    code, rows = run("--points", "2.1=3,2.11=0.5")
    assert (code, rows["ada"]["points"], rows["ada"]["of"]) == (0, "3", "4.5")


def test_only_what_has_changed_is_graded_again(run):
    run.write("ada", students.RIGHT[0])
    run.write("bob", students.RIGHT[0])
    run()
    assert Said.graded == ["check_combine"] * 2
    run.write("bob", students.RIGHT[1])
    run()
    assert Said.graded == ["check_combine"] * 3
    run("--again")
    assert Said.graded == ["check_combine"] * 5


@pytest.mark.parametrize("outcome", [TIMED_OUT, BROKEN])
def test_what_another_run_may_find_otherwise_is_graded_again(run, monkeypatch, outcome):
    run.write("ada", students.RIGHT[0])
    with monkeypatch.context() as patched:
        patched.setattr(Said, "grade", lambda *_: Graded(outcome, "not done"))
        assert run()[1]["ada"]["2.1"] == "0"
    assert run()[1]["ada"]["2.1"] == "1"


def test_other_exercises_into_the_same_file_lose_nothing(run):
    run.write("ada", students.RIGHT[0])
    run("--only", "2.1")
    run("--only", "2.2")
    run("--only", "2.1")
    assert Said.graded == ["check_combine"]


def test_what_fails_on_this_machine_is_one_exercises_alone(run, monkeypatch):
    run.write("ada", students.RIGHT[0])

    def fail(*_):
        raise OSError("no descriptors left")

    monkeypatch.setattr(Said, "grade", fail)
    code, rows = run()
    assert code == 0 and "no descriptors left" in rows["ada"]["2.1 says"]


def test_an_exercise_that_does_not_exist(run, capsys, tmp_path):
    for arguments in (["--only", "2.1,9.9"], ["--points", "9.9=3"]):
        options = check([str(tmp_path), "--out", str(tmp_path / "g.csv"), *arguments])
        assert session.run(options, [tmp_path], tmp_path / "g.csv") == 2
        assert "There is no exercise 9.9." in capsys.readouterr().err


def test_an_interrupt_leaves_what_was_done(run, monkeypatch):
    run.write("ada", students.RIGHT[0])
    run.write("bob", students.RIGHT[1])
    run.write("eve", students.RIGHT[2])
    monkeypatch.setattr(Said, "ends", ["result = 0"])
    code, rows = run()
    assert code == 130 and set(rows) == {"ada"} and rows["ada"]["points"] == "1"
    monkeypatch.setattr(Said, "ends", [])
    code, rows = run()
    assert code == 0 and set(rows) == {"ada", "bob", "eve"}
    assert Said.graded.count("check_combine") == 3


def test_two_notebooks_of_a_student_are_one_row(run):
    run.write("ada/02_manual_ddp", students.RIGHT[0])
    run.write("ada/00_start_here", students.ON_RANKS)
    _, rows = run("--only", "0.1,2.1")
    assert (rows["ada"]["points"], rows["ada"]["0.1"], rows["ada"]["2.1"]) == ("2", "1", "1")


def test_two_files_of_one_notebook_are_two_rows(run):
    run.write("ada/02_manual_ddp", students.RIGHT[0])
    run.write("ada/03_zero_stages", students.RIGHT[0])
    assert len(run()[1]) == 2


def test_an_untouched_notebook_waits_and_starts_nothing(run, tmp_path):
    shutil.copy(ROOT / "notebooks" / "02_manual_ddp.ipynb", tmp_path / "in" / "ada.ipynb")
    code, rows = run()
    assert (code, rows["ada"]["points"], Said.graded) == (0, "0", [])
    assert rows["ada"]["2.1 says"] == "waiting: is waiting for your code"


def test_what_is_no_python_is_said(run):
    run.write("ada", students.WRONG["no_python"])
    _, rows = run()
    assert re.search(r"cell \d+ is not Python: line 1", rows["ada"]["2.1 says"])


def test_a_file_that_cannot_be_read_has_a_row(run, tmp_path):
    run.write("ada", students.RIGHT[0])
    (tmp_path / "in" / "bob.ipynb").write_text("no")
    code, rows = run()
    assert code == 1 and "is no notebook" in rows["bob"]["unreadable"]
    assert rows["ada"]["points"] == "1"


def test_a_checkout_that_would_be_hidden_has_a_sentence_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bubblewrap, "shown_paths", lambda _: ["/tmp/workbook/labs"])
    path = tmp_path / "ada.ipynb"
    path.write_text(json.dumps(students.notebook(students.RIGHT[0])))
    options = check([str(path), "--out", str(tmp_path / "g.csv")])
    assert session.run(options, [path], tmp_path / "g.csv") == 3
    assert "/tmp/workbook/labs is needed to grade, but /tmp is" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user stays who it is")
def test_a_checkout_that_is_roots_alone_has_a_sentence_of_its_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "labs").mkdir(mode=0o700)
    monkeypatch.setattr(bubblewrap, "program", lambda: "bwrap")
    monkeypatch.setattr(bubblewrap, "hidden", lambda _: "")
    monkeypatch.setattr(bubblewrap, "shown_paths", lambda _: [str(tmp_path / "labs")])
    options = check([str(tmp_path), "--out", str(tmp_path / "g.csv")])
    (tmp_path / "ada.ipynb").write_text("{}")
    assert session.run(options, [tmp_path], tmp_path / "g.csv") == 3
    assert f"chmod -R go+rX {tmp_path}/labs" in capsys.readouterr().err


def test_without_linux_there_is_a_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    options = check([str(tmp_path), "--out", str(tmp_path / "g.csv")])
    assert session.run(options, [tmp_path], tmp_path / "g.csv") == 3
    assert "needs Linux" in (said := capsys.readouterr().err) and "--unsafe" not in said


def test_without_namespaces_it_says_what_cannot_be_guaranteed(tmp_path, monkeypatch, capsys):
    class Forbidden:
        def __init__(self, *_):
            pass

        def probe(self):
            raise Unavailable("unshare: Operation not permitted")

        close = print

    monkeypatch.setattr(session, "Sandbox", Forbidden)
    path = tmp_path / "ada.ipynb"
    path.write_text(json.dumps(students.notebook(students.RIGHT[0])))
    options = check([str(path), "--out", str(tmp_path / "g.csv")])
    assert session.run(options, [path], tmp_path / "g.csv") == 3
    said = capsys.readouterr().err
    assert "unshare: Operation not permitted" in said and "--unsafe" in said
    assert not (tmp_path / "g.csv").exists()


def test_without_bubblewrap_it_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bubblewrap, "program", str)
    path = tmp_path / "ada.ipynb"
    path.write_text(json.dumps(students.notebook(students.RIGHT[0])))
    options = check([str(path), "--out", str(tmp_path / "g.csv")])
    assert session.run(options, [path], tmp_path / "g.csv") == 3
    said = capsys.readouterr().err
    assert "apt-get install bubblewrap" in said and "--unsafe" in said
    assert not (tmp_path / "g.csv").exists()


def test_what_the_reader_cannot_do_is_one_submissions_alone(run, monkeypatch):
    look_at, asked = Said.look, []

    def fail_once(self, data, known):
        asked.append(data)
        if len(asked) == 1:
            raise OSError("no descriptors left")
        return look_at(self, data, known)

    monkeypatch.setattr(Said, "look", fail_once)
    run.write("ada", students.RIGHT[0])
    run.write("bob", students.RIGHT[0])
    code, rows = run()
    assert code == 1 and "no descriptors left" in rows["ada"]["unreadable"]
    assert rows["bob"]["points"] == "1"


def test_a_grader_repeats_the_numbers_of_checks(monkeypatch):
    assert new_generator().random() != new_generator().random()
    monkeypatch.setenv("WORKBOOK_SEED", "2.1")
    assert new_generator().random() == new_generator().random()


@pytest.mark.parametrize(("arguments", "words"), [
    (["nothing_here", "--out", "g.csv"], "there is no nothing_here"),
    ([".", "--out", "grades"], "ends in .csv"), (["."], "--out"),
    ([".", "--out", "g.csv", "--points", "2.1"], "is not like 2.4=3"),
    ([".", "--out", "g.csv", "--at-once", "0"], "not above 0")])
def test_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        check(arguments)
    assert exit_.value.code == 2 and words in capsys.readouterr().err
