"""How a submission is read, and what of it an exercise needs."""

import ast
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from _grade import files, look, session, static_look, submissions
from _grade.lessons import CleanCell, Exercise, Lesson
from grading import ROOT, on_the_check, students


def test_exercises_are_read_from_the_sources(lessons):
    found = {each.number: each for lesson in lessons for each in lesson.exercises}
    assert found["2.6"].arguments == ("start", "finish")
    assert {"0.5", "1.8", "2.11", "3.10", "4.12", "5.10"} <= found.keys()


def test_no_two_threads_are_in_pythons_parser(monkeypatch):
    """On Python 3.11 they end each other with a SystemError, where a collection comes between."""
    parse, inside, most = ast.parse, [], []

    def watched(source):
        inside.append(source)
        most.append(len(inside))
        time.sleep(0.01)
        inside.pop()
        return parse(source)

    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(ast, "parse", watched)
        assert all(pool.map(submissions.parse, ["a = 1"] * 12))
    assert set(most) == {1}


@pytest.fixture
def submitted(lessons, tmp_path):
    def write(answer, added=""):
        path = tmp_path / "ada.ipynb"
        path.write_text(json.dumps(students.notebook(answer, added)))
        return submissions.read("ada", path, lessons)

    return write


def needed(one, number="2.1"):
    exercise = next(each for each in one.lesson.exercises if each.number == number)
    return {part.name: [part.body[index] for index in kept] for part, kept in
            submissions.needed(one, exercise) if part.own}


def test_only_what_an_exercise_needs_is_run(submitted):
    one = submitted("def combine(g, s):\n    return share(g, s)\n",
                    "def share(g, s):\n    return HALF\nHALF = 0.5\nother = 1 / 0\nprint('x')")
    assert [len(kept) for kept in needed(one).values()] == [2, 1]


@pytest.mark.parametrize("added", [
    "from math import *", "TABLE = []\nTABLE.append(1)", "torch.manual_seed(0)",
    "@share.register(int)\ndef _(g):\n    return g"])
def test_what_changes_a_name_is_run(submitted, added):
    one = submitted("def share(g):\n    return g * sqrt(len(TABLE))\n"
                    "def combine(g, s):\n    return share(torch.zeros(1))\n", added)
    assert [len(kept) for kept in needed(one).values()] == [len(submissions.parse(added)), 2]


def test_a_scratch_line_of_a_module_is_not_run(submitted):
    one = submitted("def combine(g, s):\n    return torch.zeros(1)\n",
                    "torch.testing.assert_close(1, 2)\nlab.show_combine(combine)")
    assert [len(kept) for kept in needed(one).values()] == [1]


def test_a_cell_of_ours_is_taken_from_our_sources(submitted):
    one = submitted(students.RIGHT[0])
    changed = [submissions.Code(cell.number, cell.id, cell.source + "\ntorch = None")
               if "import torch\n" in cell.source else cell for cell in one.cells]
    read, _ = submissions.parts(submissions.Submission("ada", one.path, one.lesson, changed))
    ours = [part for part in read if "import torch" in part.source and not part.own]
    assert ours and not any("None" in part.source for part in ours)


SCRIPT = ("import torch\nfrom labs.training import data, models\n\n\ndef main():\n"
          "    raise NotImplementedError('Exercise 6.1')\n\n\nmain()")
CLEAN = [CleanCell("06-lab", "import labs.scaling as lab\nTABLE = []", False),
         CleanCell("06-train", f"%%writefile train.py\n{SCRIPT}", True),
         CleanCell("06-check", 'lab.check_train("train.py")', False)]
WITH_SCRIPT = Lesson("06_scaling", CLEAN, [Exercise("6.1", "check_train", ("'train.py'",), 2)])


def with_script(*sources, ids=("06-lab", "06-train", "06-check")):
    cells = [submissions.Code(number, name, source)
             for number, (name, source) in enumerate(zip(ids, sources, strict=True), 1)]
    return submissions.Submission("ada", None, WITH_SCRIPT, cells)


def test_a_script_is_written_whole_for_the_check_that_is_given_its_name():
    filled = SCRIPT.replace("raise NotImplementedError('Exercise 6.1')", "print(main)")
    one = with_script(CLEAN[0].source, f"%%writefile train.py\n{filled}", CLEAN[2].source)
    [(part, kept)] = submissions.needed(one, WITH_SCRIPT.exercises[0])
    assert (part.file, part.source, part.own, kept) == ("train.py", filled, True, [0, 1, 2, 3])
    assert not list(static_look.findings(part.body))


class Asked:
    def grade(self, work):
        return work


def graded(one):
    """What comes of its only exercise, or what its sandbox is given."""
    data = json.dumps({"cells": [{"cell_type": "code", "id": cell.id, "source": cell.source}
                                 for cell in one.cells]}).encode()
    found = look.look_through(data, look.Known([one.lesson], static_look.notebooks_imports()))
    return session.grade_exercise(Asked(), one.lesson, one.lesson.exercises[0], found)


def test_a_script_goes_to_the_sandbox_as_a_file():
    one = with_script(CLEAN[0].source, "%%writefile train.py\nprint(1)", CLEAN[2].source)
    work = graded(one)
    assert work["cells"] == [{"name": "cell 2", "source": "print(1)", "keep": [0],
                              "file": "train.py"}]


@pytest.mark.parametrize(("source", "outcome", "words"), [
    (f"%%writefile train.py\n{SCRIPT}", "waiting", "is waiting for your code"),
    (f"%%writefile  train.py \n{SCRIPT}\n", "waiting", "is waiting for your code"),
    ("%%writefile other.py\nprint(1)", "waiting", "is waiting for your answer"),
    ("%%writefile train.py\nprint(1", "wrong", "cell 2 is not Python: line 1")])
def test_what_is_said_of_a_script_that_does_not_run(source, outcome, words):
    one = with_script(CLEAN[0].source, source, CLEAN[2].source)
    found = graded(one)
    assert found.outcome == outcome and words in found.sentence


def test_a_scripts_names_are_not_the_notebooks():
    lesson = Lesson("06_scaling", CLEAN, [Exercise("6.2", "check_main", ("main",), 2)])
    one = with_script(CLEAN[0].source, "%%writefile train.py\ndef main():\n    pass",
                      CLEAN[2].source)
    assert submissions.needed(one, lesson.exercises[0]) == []


def test_an_editor_that_renames_cells_loses_nothing(submitted):
    one = submitted(students.RIGHT[0])
    renamed = [submissions.Code(cell.number, "", cell.source) for cell in one.cells]
    one = submissions.Submission("ada", one.path, one.lesson, renamed)
    assert any("combine" in str(getattr(node, "name", "")) for body in needed(one).values()
               for node in body)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"cells": [1]}', "[" * 100_000,
                                  '{"cells": [{"cell_type": "code", "source": 1}]}',
                                  '{"cells": []}'])
def test_a_file_that_is_no_notebook(lessons, tmp_path, text):
    path = tmp_path / "ada.ipynb"
    path.write_text(text)
    with pytest.raises(files.Unreadable):
        submissions.read("ada", path, lessons)


@pytest.mark.parametrize("source", ["(" * 50_000, "x = " + "-" * 50_000 + "1", "a.b" * 10_000,
                                    "\0", "def f(:\n", "%%bash\nrm -rf /"])
def test_code_that_is_hard_to_parse_is_left_out(source):
    submissions.parse(source)


def test_each_file_has_a_student(tmp_path):
    for name in ("ada/02_manual_ddp", "bob/02_manual_ddp", "week1/eve", "week2/eve", "zoe"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.ipynb").touch()
    found = [student for student, _ in files.files_of([tmp_path])]
    assert found == ["ada", "bob", "week1/eve", "week2/eve", "zoe"]


@pytest.mark.parametrize(("name", "displayed"), [
    ("ada", "ada"), ("\x1b[2J", "\\x1b[2J"), ("\\x1b", "\\\\x1b"), ("\udcff", "\\xff"),
    ("\x85", "\\u0085"), ("a\nb", "a\\x0ab"), ("\u202e\ud800", "\\u202e\\ud800"),
    ("\U000e0001", "\\U000e0001"), ("\u597d\u00fc \U0001f600", "\u597d\u00fc \U0001f600")])
def test_a_name_is_shown_without_what_moves_a_cursor(name, displayed):
    assert files.shown(name) == displayed


def test_links_and_closed_folders_are_named_and_not_followed(tmp_path):
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "eve.ipynb").touch()
    for link, target in (("ada/up", ".."), ("ada/notes", "eve.ipynb"), ("bob.ipynb", "bob.ipynb")):
        (tmp_path / link).symlink_to(target)
    found = files.files_of([tmp_path, tmp_path / "bob.ipynb"])
    assert [student for student, _ in found] == ["bob", "eve", "up"]
    for student, path in found:
        if student == "eve":
            assert files.read(path) == b""
        else:
            with pytest.raises(files.Unreadable, match="a link, which is not followed"):
                files.read(path)


def test_two_notebooks_of_a_student_that_share_their_digits(tmp_path):
    (tmp_path / "ada").mkdir()
    for name in ("07a_tensor_parallel", "07b_pipeline_parallel"):
        (tmp_path / "ada" / f"{name}.ipynb").touch()
    assert [student for student, _ in files.files_of([tmp_path])] == ["ada", "ada"]


@pytest.mark.parametrize("name", ["02_manual_ddp", "eve"])
def test_weeks_below_each_student(tmp_path, name):
    paths = [f"{student}/{week}/{name}" for student in ("ada", "bob") for week in ("w1", "w2")]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{path}.ipynb").touch()
    assert [student for student, _ in files.files_of([tmp_path])] == paths


@pytest.mark.parametrize("name", on_the_check.SEEN)
def test_what_is_seen_in_the_source(name):
    source, words = on_the_check.SEEN[name]
    assert re.search(words, "\n".join(static_look.findings(submissions.parse(source))))


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "solutions").glob("0*.py")))
def test_nothing_is_seen_in_the_worked_answers(name):
    text = (ROOT / "solutions" / f"{name}.py").read_text()
    found = list(static_look.findings(submissions.parse(text)))
    assert [why for why in found if "subprocess" not in why] == []


@pytest.mark.parametrize("source", [
    "import gc, inspect, traceback\ngc.collect()\nprint(inspect.signature(len))",
    "from gc import collect", "from labs import launch, device", "import labs.manual_ddp as lab",
    "notes = 'See solutions/ideas of the group.'", "sizes = lab.MODELS['x'].parameters",
    "getattr(module, 'training')", "import labs\nresult = labs.launch(work)\nresult.memory"])
def test_nothing_is_seen_in_an_honest_line(source):
    assert list(static_look.findings(submissions.parse(source))) == []


@pytest.mark.parametrize(("source", "words"), [
    ("import ctypes, psutil\nos.kill(1, 9)", []),
    ("print('✓ Exercise 2.1  right')", ["prints what a check prints"]),
    ("from labs.manual_ddp import combine",
     ["imports labs.manual_ddp.combine, which checks are made of"]),
    ("from labs.checks.verdicts import Verdict",
     ["imports labs.checks.verdicts.Verdict, which checks are made of"])])
def test_of_what_is_not_run_only_a_forgery_is_seen(source, words):
    assert list(static_look.forgeries(submissions.parse(source))) == words
