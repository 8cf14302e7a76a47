"""scripts/grade: a class with hostile submissions among honest ones, what a sandbox shows, and how
a submission is read."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from _grade import feedback, inside, namespaces, session, static_look, submissions, table
from _grade import sandbox as sandboxes
from _grade.__main__ import check
from _grade.lessons import read_lessons
from _grade.sandbox import (
    BROKEN,
    FLAGGED,
    PASSED,
    TIMED_OUT,
    WAITING,
    WRONG,
    Graded,
    Sandbox,
    Unavailable,
)

from labs.exercises.dice import new_dice

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "hostile"))
import class_of_students as students  # noqa: E402
import on_the_check  # noqa: E402
import on_the_machine  # noqa: E402


@pytest.fixture(scope="module")
def lessons():
    return read_lessons(ROOT)


def namespaces_work() -> bool:
    if not shutil.which("unshare"):
        return False
    done = subprocess.run(["unshare", "-Urnmpf", "--mount-proc", "true"], capture_output=True)
    return done.returncode == 0


needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="namespaces are forbidden here")


# the class: one run, many assertions


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """The class, graded: folder, out, kinds of submissions and records by student."""
    folder = tmp_path_factory.mktemp("class")
    (folder / "in").mkdir()
    beside = folder / "in" / "somebody_elses.txt"
    beside.write_text("private")
    kinds = students.hand_in(folder / "in")
    out = folder / "grades.csv"
    options = check([str(folder / "in"), "--out", str(out), "--only", "0.1,2.1", "--at-once", "2",
                     "--seconds", "15"])
    before = set(psutil.pids())
    code = session.run(options, [folder / "in"], out)
    if any(records(out)[name]["exercises"][0]["outcome"] == TIMED_OUT for name in kinds["right"]):
        options.seconds = 60  # the machine is busy; what is done stays
        code = session.run(options, [folder / "in"], out)
    # all of a sandbox is below the zygote, which has a session of its own
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])
            if "_grade.zygote" in (process.info["cmdline"] or []) and process.pid not in before]
    return SimpleNamespace(folder=folder, out=out, kinds=kinds, code=code, beside=beside, left=left,
                           options=options, records=records(out))


def records(out) -> dict[str, dict]:
    lines = (out.with_suffix("") / "results.jsonl").read_text().splitlines()
    return {one["student"]: one for one in map(json.loads, lines)}


@pytest.mark.slow
@needs_namespaces
class TestClass:
    def test_forty_honest_ones_get_their_point(self, graded):
        assert len(graded.kinds["right"]) == 40
        found = {name: graded.records[name]["exercises"][0] for name in graded.kinds["right"]}
        assert {name: one for name, one in found.items() if one["points"] != 1} == {}
        assert not any(graded.records[name]["flagged"] for name in graded.kinds["right"])

    def test_an_honest_mistake_is_no_attack(self, graded):
        for name in graded.kinds["wrong"]:
            one = graded.records[name]
            assert (one["exercises"][0]["points"], one["flagged"]) == (0, []), one
        assert "plain mean" in graded.records["plain_mean"]["exercises"][0]["sentence"]

    def test_no_hostile_one_gains_a_point_and_each_is_flagged(self, graded):
        assert len(graded.kinds["hostile"]) >= 25
        for name, words in graded.kinds["hostile"].items():
            one = graded.records[name]
            sentence = one["exercises"][0]["sentence"]
            print(f"{name:32s} {one['exercises'][0]['outcome']:10s} {sentence[:100]!r}")
            assert one["exercises"][0]["points"] == 0, name
            assert re.search(words, "\n".join([sentence, *one["flagged"]])), (name, one)

    def test_nothing_outlives_its_grading(self, graded):
        assert graded.left == []
        assert not [p for p in psutil.process_iter(["cmdline"])
                    if on_the_machine.SECONDS in (p.info["cmdline"] or [])]

    def test_nothing_outside_is_touched(self, graded):
        assert graded.beside.read_text() == "private"
        assert {path.name for path in graded.folder.iterdir()} == {"in", "grades", "grades.csv"}

    def test_exit_code_says_that_some_were_flagged(self, graded):
        assert graded.code == 1

    def test_one_row_a_student(self, graded):
        rows = rows_of(graded.out)
        assert len(rows) == sum(map(len, graded.kinds.values()))
        row = next(row for row in rows if row["student"] == "honest_00")
        assert (row["points"], row["of"], row["2.1"]) == ("1", "1", "1")
        assert row["2.1 says"].startswith("the shards' gradients give")

    def test_pages(self, graded):
        pages = graded.out.with_suffix("")
        page = (pages / "sum.html").read_text()
        assert "Hint" in page and "0 of 1 points" in page and "honest_00" not in page
        whole = (pages / "class.html").read_text()
        assert "the result is the plain mean of the gradients" in whole
        assert "<svg" in whole and (pages / "class.svg").stat().st_size > 500

    def test_a_second_run_grades_nothing_again_and_gives_the_same(self, graded, capsys):
        kept = {name for name, one in graded.records.items()
                if one["exercises"][0]["outcome"] not in (TIMED_OUT, BROKEN)}
        before = {row["student"]: row for row in rows_of(graded.out)}
        files = [graded.folder / "in" / f"{name}.ipynb" for name in kept]
        assert len(kept) > 80 and session.run(graded.options, files, graded.out) == 1
        assert f"{len(kept)} graded before, and unchanged" in capsys.readouterr().out
        assert rows_of(graded.out) == [before[name] for name in sorted(kept)]


def rows_of(out) -> list[dict[str, str]]:
    with open(out, newline="") as file:
        return list(csv.DictReader(file))


# the sandbox


@pytest.fixture(scope="module")
def sandbox():
    """As root often has it: with a mask that opens nothing to others."""
    before = os.umask(0o077)
    try:
        found = Sandbox(["labs.manual_ddp"], seconds=60)
    finally:
        os.umask(before)
    yield found
    found.close()


def grade(sandbox, lessons, source, path, only="2.1"):
    path.write_text(json.dumps(students.notebook(source)))
    one = submissions.read("ada", path, lessons)
    exercise = next(each for each in one.lesson.exercises if each.number == only)
    return session.grade_exercise(sandbox, one, exercise)


@pytest.mark.slow
@needs_namespaces
def test_what_a_submission_sees(sandbox, lessons, tmp_path):
    source = on_the_check.combine(
        "seen = [os.path.exists(p) for p in (PRIVATE, SOLUTIONS, TESTS, '/root/.ssh', '/sys')]",
        "seen += [os.getuid(), sorted(os.environ), os.getcwd(), os.access('/usr', os.W_OK)]",
        "net = list(open('/pr' + 'oc/net/dev'))[2:]",
        "seen += [[line.split(':')[0].strip() for line in net]]",
        "raise ValueError(seen)", head=on_the_check.HEAD + f"PRIVATE = {str(tmp_path)!r}\n"
        f"SOLUTIONS = {str(ROOT)!r} + '/solu' + 'tions'\nTESTS = {str(ROOT / 'tests')!r}\n")
    found = grade(sandbox, lessons, source, tmp_path / "ada.ipynb")
    assert "[False, False, False, False, False, 1000, [" in found.sentence
    assert "'/student', False, ['lo']]" in found.sentence and "KEY" not in found.sentence


@pytest.mark.slow
@needs_namespaces
def test_a_process_that_ends_at_once_has_no_verdict(sandbox, lessons, tmp_path, monkeypatch):
    """And what follows it is graded."""
    group = SimpleNamespace(members=["/nowhere/cgroup.procs"], remove=lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(sandboxes.cgroups, "Group", lambda *_: group)
        found = grade(sandbox, lessons, students.RIGHT[0], tmp_path / "ada.ipynb")
    assert found.outcome == BROKEN
    assert grade(sandbox, lessons, students.RIGHT[0], tmp_path / "ada.ipynb").outcome == PASSED


@pytest.mark.slow
@needs_namespaces
def test_what_ipython_alone_understands_is_left_out(sandbox, lessons, tmp_path):
    source = "%%time\n!pip list\n" + students.RIGHT[0]
    assert grade(sandbox, lessons, source, tmp_path / "ada.ipynb").outcome == PASSED


@pytest.mark.slow
@needs_namespaces
def test_the_guard_cannot_be_found(sandbox, lessons, tmp_path):
    """Not from the classes that there are, nor from the modules, nor from what it put into labs."""
    source = on_the_check.combine(
        "kinds = getattr(object, '__sub' + 'classes__')()",
        "functions = [f for kind in kinds for f in list(vars(kind).values())]",
        "functions += [LOADED['labs.workers.pickling'].pack_result]",
        "spaces = [getattr(f, '__glo' + 'bals__', {}) for f in functions]",
        "spaces += [vars(module) for module in list(LOADED.values())]",
        "raise ValueError(len(functions) > 1000, sorted({name for space in spaces for name in space"
        " if name in ('guard', 'integrity', '_judge_of', 'baseline', '_libc')}))")
    found = grade(sandbox, lessons, source, tmp_path / "ada.ipynb")
    assert "ValueError: (True, [])" in found.sentence, found


GRADER = """
import json, sys
from pathlib import Path
from _grade import session, submissions
from _grade.lessons import read_lessons
from _grade.sandbox import Sandbox
lessons = read_lessons(Path(sys.argv[1]))
one = submissions.read("ada", Path(sys.argv[2]), lessons)
sandbox = Sandbox(["labs.manual_ddp"], sys.argv[3] == "True", seconds=60)
session.grade_exercise(sandbox, one, one.lesson.exercises[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [pytest.param(True, marks=needs_namespaces), False])
def test_nothing_outlives_a_grader_that_is_killed(tmp_path, isolated):
    source, _ = on_the_machine.ATTACKS["endless_loop"]
    (tmp_path / "a.ipynb").write_text(json.dumps(students.notebook(source)))
    temporary = Path(tempfile.mkdtemp(prefix="killed-"))  # what is killed does not clear up
    temporary.chmod(0o711)
    grader = subprocess.Popen(
        [sys.executable, "-c", GRADER, ROOT, tmp_path / "a.ipynb", str(isolated)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}", "TMPDIR": str(temporary)})
    try:
        deadline = time.monotonic() + 90
        while not (below := running_of(grader.pid)) and time.monotonic() < deadline:
            assert grader.poll() is None
            time.sleep(0.1)
    finally:
        grader.kill()
        grader.wait()
    _, alive = psutil.wait_procs(below, timeout=10)
    shutil.rmtree(temporary)
    assert below and not alive


def running_of(grader: int) -> list[psutil.Process]:
    """The processes below a grader, once the exercise has begun: then one that is not the zygote
    has computed for a while."""
    zygotes = psutil.Process(grader).children()
    below = [each for zygote in zygotes for each in zygote.children(recursive=True)]
    busy = [one for one in below if one.is_running() and sum(one.cpu_times()[:2]) > 1]
    return [*zygotes, *below] if busy else []


@pytest.mark.slow
@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="nobody needs a Python")
def test_an_ordinary_user_can_grade(tmp_path):
    """As nobody, from a copy: the namespaces are those that an ordinary user may make."""
    code = ("import os, sys; from _grade import namespaces; "
            "namespaces.run_isolated(sys.argv[1], ['/usr'], ['/student', '/tmp'], "
            "namespaces.Limits(), lambda: print(os.getuid(), os.getpid(), "
            "sorted(os.listdir('/')), flush=True))")
    copy = tmp_path / "_grade"
    shutil.copytree(ROOT / "scripts" / "_grade", copy)
    folder = Path("/var/tmp") / f"grade-test-{os.getpid()}"
    shutil.copytree(tmp_path, folder)
    (folder / "stage").mkdir()
    subprocess.run(["chown", "-R", "nobody", folder], check=True)
    python = "/usr/bin/python3"
    try:
        done = subprocess.run([python, "-c", code, str(folder / "stage")], user="nobody",
                              capture_output=True, text=True, cwd=folder)
    finally:
        shutil.rmtree(folder)
    assert done.stdout.startswith("1000 1 ['bin'"), done.stderr


@pytest.mark.slow
@needs_namespaces
@pytest.mark.skipif(not os.access("/home", os.W_OK), reason="needs a folder below /home")
def test_a_checkout_below_home_is_seen():
    code = ("import os, sys; from _grade import namespaces; folder = sys.argv[2]; "
            "namespaces.run_isolated(sys.argv[1], ['/usr', folder + '/labs'], "
            "list(namespaces.OWN_FOLDERS), namespaces.Limits(), lambda: print("
            "os.listdir(folder), os.listdir(folder + '/labs'), os.getcwd(), flush=True))")
    folder = Path("/home") / f"grade-test-{os.getpid()}"
    (folder / "labs").mkdir(parents=True)
    (folder / "labs" / "here.py").touch()
    (folder / "stage").mkdir()
    try:
        done = subprocess.run([sys.executable, "-c", code, folder / "stage", folder], text=True,
                              capture_output=True, env={"PYTHONPATH": str(ROOT / "scripts")})
    finally:
        shutil.rmtree(folder)
    assert done.stdout == "['labs'] ['here.py'] /student\n", done.stderr


@pytest.mark.parametrize(("shown", "hidden"), [
    (["/usr", "/home/ada/workbook/labs"], ""), (["/tmp/workbook/labs"], "/tmp/workbook/labs"),
    (["/dev/shm/labs"], "/dev/shm/labs"), (["/tmpfoo/labs"], "")])
def test_what_an_empty_folder_hides_is_known_before(shown, hidden):
    assert namespaces.hidden(shown) == hidden


def test_a_checkout_that_would_be_hidden_has_a_sentence_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(namespaces, "shown_paths", lambda _: ["/tmp/workbook/labs"])
    path = tmp_path / "ada.ipynb"
    path.write_text(json.dumps(students.notebook(students.RIGHT[0])))
    options = check([str(path), "--out", str(tmp_path / "g.csv")])
    assert session.run(options, [path], tmp_path / "g.csv") == 3
    assert "/tmp/workbook/labs is needed to grade, but /tmp is" in capsys.readouterr().err


def test_without_linux_there_is_a_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    options = check([str(tmp_path), "--out", str(tmp_path / "g.csv")])
    assert session.run(options, [tmp_path], tmp_path / "g.csv") == 3
    assert "needs Linux" in (said := capsys.readouterr().err) and "--unsafe" not in said


def test_a_class_that_is_called_says_when_it_returned(monkeypatch):
    events = []
    monkeypatch.setattr(inside, "sys", SimpleNamespace(audit=lambda *event: events.append(event)))

    class Twice(torch.nn.Module):
        def forward(self, x):
            return 2 * x

        def helps(self):
            return 1

    Twice.__module__ = "__main__"
    inside._watch_classes([Twice, 3])
    assert Twice()(2) == 4 and Twice().helps() == 1
    assert events == [("workbook.returned", 4)]


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


@pytest.mark.slow
def test_unsafe_grades_too(lessons, tmp_path):
    found = Sandbox(["labs.manual_ddp"], isolated=False, seconds=60)
    try:
        right = grade(found, lessons, students.RIGHT[0], tmp_path / "a.ipynb")
        source, _ = on_the_check.FOUND["walks_the_stack"]
        walks = grade(found, lessons, source, tmp_path / "b.ipynb")
    finally:
        found.close()
    assert (right.outcome, walks.outcome) == (PASSED, FLAGGED)


# A formula, a class, an optimizer, sharding, a checkpoint, a trace.
KINDS = ("1.3", "2.4", "3.2", "4.1", "4.7", "5.9")


@pytest.mark.slow
@needs_namespaces
def test_the_solutions_pass(lessons):
    """One exercise of each kind; all of them, by hand: scripts/grade solutions --out all.csv."""
    work = [(submissions.read("solution", ROOT / "solutions" / f"{lesson.name}.ipynb", lessons),
             exercise) for lesson in lessons for exercise in lesson.exercises
            if exercise.number in KINDS]
    found = Sandbox([lesson.package for lesson in lessons], seconds=120)
    try:
        with ThreadPoolExecutor(2) as pool:
            graded = [*pool.map(lambda each: session.grade_exercise(found, *each), work)]
    finally:
        found.close()
    assert [exercise.number for _, exercise in work] == [*KINDS]
    assert [one for one in graded if one.outcome != PASSED] == []


# a run, without processes


class Said:
    """A sandbox in which every exercise passes but those of `wrong`, and `ends` interrupts."""

    wrong, ends, graded = (), (), []

    def __init__(self, *_):
        pass

    def probe(self):
        pass

    def grade(self, work):
        source = work["cells"][-1]["source"]
        if any(name in source for name in self.ends):
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
    monkeypatch.setattr(Said, "ends", ["zeros_like"])
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
    assert code == 1 and "is no notebook" in rows["bob"]["flagged"] and rows["ada"]["points"] == "1"


# reading submissions


def test_exercises_are_read_from_the_sources(lessons):
    found = {each.number: each for lesson in lessons for each in lesson.exercises}
    assert found["2.6"].arguments == ("start", "finish")
    assert {"0.5", "1.8", "2.11", "3.10", "4.11", "5.10"} <= found.keys()


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
    assert not any("None" in part.source for part in submissions.parts(
        submissions.Submission("ada", one.path, one.lesson, changed))[0] if "import torch" in
        part.source)


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
    with pytest.raises(submissions.Unreadable):
        submissions.read("ada", path, lessons)


@pytest.mark.parametrize("source", ["(" * 50_000, "x = " + "-" * 50_000 + "1", "a.b" * 10_000,
                                    "\0", "def f(:\n", "%%bash\nrm -rf /"])
def test_code_that_is_hard_to_parse_is_left_out(source):
    submissions.parse(source)


def test_each_file_has_a_student(tmp_path):
    for name in ("ada/02_manual_ddp", "bob/02_manual_ddp", "week1/eve", "week2/eve", "zoe"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.ipynb").touch()
    found = [student for student, _ in submissions.files_of([tmp_path])]
    assert found == ["ada", "bob", "week1/eve", "week2/eve", "zoe"]


@pytest.mark.parametrize("name", ["02_manual_ddp", "eve"])
def test_weeks_below_each_student(tmp_path, name):
    paths = [f"{student}/{week}/{name}" for student in ("ada", "bob") for week in ("w1", "w2")]
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{path}.ipynb").touch()
    assert [student for student, _ in submissions.files_of([tmp_path])] == paths


def test_two_files_of_one_notebook_are_two_rows(run):
    run.write("ada/02_manual_ddp", students.RIGHT[0])
    run.write("ada/03_zero_stages", students.RIGHT[0])
    assert len(run()[1]) == 2


@pytest.mark.parametrize("name", on_the_check.SEEN)
def test_what_is_seen_in_the_source(name):
    source, words = on_the_check.SEEN[name]
    assert re.search(words, "\n".join(static_look.findings(submissions.parse(source))))


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "solutions").glob("0*.py")))
def test_nothing_is_seen_in_the_worked_answers(name):
    text = (ROOT / "solutions" / f"{name}.py").read_text()
    found = list(static_look.findings(submissions.parse(text)))
    assert [why for why in found if "subprocess" not in why] == []


def test_a_grader_repeats_the_numbers_of_checks(monkeypatch):
    assert new_dice().random() != new_dice().random()
    monkeypatch.setenv("WORKBOOK_SEED", "2.1")
    assert new_dice().random() == new_dice().random()


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
    ("from labs.manual_ddp.checks import combine",
     ["imports labs.manual_ddp.checks.combine, which checks are made of"])])
def test_of_what_is_not_run_only_a_forgery_is_seen(source, words):
    assert list(static_look.forgeries(submissions.parse(source))) == words


# what is written


def record(student="ada", **changes):
    one = {"number": "2.1", "outcome": WRONG, "points": 0.0, "of": 1.0, "sentence": "it is 3 times",
           "hint": "Divide.", "seconds": 1.0} | changes
    return {"student": student, "lesson": "02_manual_ddp", "flagged": [], "exercises": [one]}


def test_a_spreadsheet_runs_nothing(tmp_path):
    table.write(tmp_path / "g.csv", [record("=1+1", sentence="@SUM(1)", outcome=PASSED),
                                     record("\r=1")], [("=2+2", "-1")])
    text = (tmp_path / "g.csv").read_bytes()
    assert b"\n'=2+2,0,,'-1," in text and b"'\r=1" in text
    assert "\n'=1+1," in (tmp_path / "g.csv").read_text()
    assert "'@SUM(1)" in (tmp_path / "g.csv").read_text()


def test_a_name_leads_nowhere_else(tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    feedback.write(folder, [record("../../etc"), record("class"), record("a<b>"), record("A-b")])
    assert {path.name for path in tmp_path.iterdir()} == {"pages"}
    assert len(list(folder.iterdir())) == 6


def test_wrong_answers_that_differ_in_numbers_are_one_kind():
    done = [record(sentence="it is 3 times"), record(sentence="it is 4 times"),
            record(sentence="it raises"), record(outcome=WAITING)]
    assert feedback.wrong_answers(done, "2.1") == [(2, "it is 3 times"), (1, "it raises")]


def test_what_a_page_says_is_no_markup():
    page = feedback.page_of("<script>", [record(sentence="<img src=x>")])
    assert "<script>" not in page and "<img" not in page


@pytest.mark.parametrize(("arguments", "words"), [
    (["nothing_here", "--out", "g.csv"], "there is no nothing_here"),
    ([".", "--out", "grades"], "ends in .csv"), (["."], "--out"),
    ([".", "--out", "g.csv", "--points", "2.1"], "is not like 2.4=3"),
    ([".", "--out", "g.csv", "--at-once", "0"], "not above 0")])
def test_arguments(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        check(arguments)
    assert exit_.value.code == 2 and words in capsys.readouterr().err


def test_the_hostile_set_is_large_enough():
    names = [*on_the_check.SEEN, *on_the_check.FOUND, *on_the_machine.ATTACKS]
    assert len(names) == len(set(names)) >= 25
    assert namespaces.Limits().processes < 1000
