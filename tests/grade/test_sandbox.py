"""What a submission sees in its sandbox, what survives a killed grader, and who may grade."""

import json
import os
import shutil
import signal
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
from _grade import bubblewrap, cgroups, inside, judged_apart, look, namespaces
from _grade import sandbox as sandboxes
from _grade.files import Unreadable
from _grade.sandbox import BROKEN, NOT_ALLOWED, PASSED, Sandbox
from grading import (
    ROOT,
    grade,
    grade_one,
    looked_at,
    needs_namespaces,
    on_the_check,
    on_the_machine,
    students,
)


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
    def end(_, process):
        os.kill(process, signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(cgroups.Group, "take", end)
        found = grade(sandbox, lessons, students.RIGHT[0], tmp_path / "ada.ipynb")
    assert found.outcome == BROKEN
    assert grade(sandbox, lessons, students.RIGHT[0], tmp_path / "ada.ipynb").outcome == PASSED


@needs_namespaces
def test_an_interrupt_while_it_starts_leaves_nothing_behind(monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    before = psutil.Process().children()
    monkeypatch.setattr(Sandbox, "_line", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Sandbox([])
    assert psutil.Process().children() == before


@needs_namespaces
def test_what_takes_too_long_to_look_through_ends(lessons, monkeypatch):
    known = look.Known(lessons, frozenset()).as_json()
    data = json.dumps(students.notebook(students.RIGHT[0])).encode()
    found = Sandbox([])
    try:
        assert found.look(data, known)["lesson"] == "02_manual_ddp"
        monkeypatch.setattr(sandboxes, "LOOK_SECONDS", 0.001)
        with pytest.raises(Unreadable, match="takes more than 0.001 s to look through"):
            found.look(data, known)
        monkeypatch.setattr(sandboxes, "LOOK_SECONDS", 30)
        monkeypatch.setattr(sandboxes, "LOOK_MEMORY", 10**6)
        with pytest.raises(Unreadable, match="cannot be looked through|MemoryError"):
            found.look(data, known)
    finally:
        found.close()


@pytest.mark.slow
@needs_namespaces
def test_what_ipython_alone_understands_is_left_out(sandbox, lessons, tmp_path):
    source = "%%time\n!pip list\n" + students.RIGHT[0]
    assert grade(sandbox, lessons, source, tmp_path / "ada.ipynb").outcome == PASSED


@pytest.mark.slow
@needs_namespaces
def test_the_guard_cannot_be_found(sandbox, lessons, tmp_path, under_guard):
    """Not from the classes that there are, nor from the modules, nor from what it put into labs."""
    source = on_the_check.combine(
        "kinds = getattr(object, '__sub' + 'classes__')()",
        "functions = [f for kind in kinds for f in list(vars(kind).values())]",
        "functions += [LOADED['labs.workers.pickling'].pack_result]",
        "spaces = [getattr(f, '__glo' + 'bals__', {}) for f in functions]",
        "spaces += [vars(module) for module in list(LOADED.values())]",
        "raise ValueError(len(functions) > 1000, sorted({name for space in spaces for name in space"
        " if name in ('guard', 'integrity', 'objection', 'on_stack', 'baseline', '_libc')}))")
    found = grade(sandbox, lessons, source, tmp_path / "ada.ipynb")
    assert "ValueError: (True, [])" in found.sentence, found


GRADER = """
import json, sys
from pathlib import Path
from _grade import session
from _grade.lessons import read_lessons
from _grade.sandbox import Sandbox
from grading import grade_one, looked_at
one = looked_at(Path(sys.argv[2]), read_lessons(Path(sys.argv[1])))
sandbox = Sandbox(["labs.manual_ddp"], sys.argv[3] == "True", seconds=60)
grade_one(sandbox, one, one.lesson.exercises[0])
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
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}:{ROOT / 'tests'}",
             "TMPDIR": str(temporary)})
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
    cgroups.remove_left_behind()
    assert [*Path("/sys/fs/cgroup").glob(f"**/workbook-{grader.pid}-*")] == []


def running_of(grader: int) -> list[psutil.Process]:
    """The processes below a grader, once the exercise has begun: then one that is below the zygote
    has computed for a while."""
    try:
        all_of_them = psutil.Process(grader).children(recursive=True)
        zygotes = [one for one in all_of_them if "_grade.zygote" in one.cmdline()
                   and not one.name().startswith("bwrap")]
        below = [each for one in zygotes[:1] for each in one.children(recursive=True)]
        busy = [one for one in below if sum(one.cpu_times()[:2]) > 1]
    except psutil.NoSuchProcess:  # one has just ended: nothing has begun yet
        return []
    return all_of_them if busy else []


# Both walls, and behind them an expression's value. The first argument is a folder to see.
WALLS = """
import os, subprocess, sys
from _grade import bubblewrap, namespaces
code, folder, said = sys.argv[1:]
info, told = os.pipe()
around, files = bubblewrap.around_zygote(["/usr", folder, sys.path[1]], told)
if "inside" not in os.environ:
    os.environ["inside"] = ""
    command = [*around, sys.executable, "-c", code, code, folder, said]
    raise SystemExit(subprocess.run(command, pass_fds=files).returncode)
if os.geteuid() == 0:
    namespaces.become(60_001)
namespaces.run_isolated([folder], namespaces.Limits(),
                        lambda: print(eval(said), flush=True))
"""


def said_behind_walls(python, grader, folder, expression, **options) -> str:
    """grader: the folder that has _grade/."""
    done = subprocess.run([python, "-c", WALLS, WALLS, folder, expression], text=True,
                          capture_output=True, env={"PYTHONPATH": str(grader),
                                                    "PATH": os.environ["PATH"]}, **options)
    return done.stdout or done.stderr


@pytest.mark.slow
@needs_namespaces
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(not os.access("/usr/bin/python3", os.X_OK), reason="nobody needs a Python")
def test_an_ordinary_user_can_grade():
    """As nobody, from a copy: the namespaces are those that an ordinary user may make."""
    folder = Path("/var/tmp") / f"grade-test-{os.getpid()}"
    shutil.copytree(ROOT / "scripts" / "_grade", folder / "grader" / "_grade")
    (folder / "labs").mkdir()
    subprocess.run(["chown", "-R", "nobody", folder], check=True)
    try:
        said = said_behind_walls(
            "/usr/bin/python3", folder / "grader", folder / "labs",
            "os.getuid(), os.getpid(), sorted(os.listdir('/')), os.listdir('/var/tmp')",
            user="nobody", cwd=folder)
    finally:
        shutil.rmtree(folder)
    assert said.startswith("(1000, 3, ['bin', 'dev', 'etc', 'lib'"), said
    assert said.endswith(f"['{folder.name}'])\n")


@pytest.mark.slow
@needs_namespaces
@pytest.mark.skipif(not os.access("/home", os.W_OK), reason="needs a folder below /home")
def test_a_checkout_below_a_closed_home_is_seen():
    """As root; the user of the sandbox could not go there by itself."""
    home = Path("/home") / f"grade-test-{os.getpid()}"
    (home / "book" / "labs").mkdir(parents=True)
    (home / "book" / "labs" / "here.py").touch()
    (home / "book" / "solutions").mkdir()
    home.chmod(0o700)
    try:
        said = said_behind_walls(
            "/usr/bin/python3", ROOT / "scripts", home / "book" / "labs",
            f"os.listdir('{home}/book'), os.listdir('{home}/book/labs'), os.getcwd()")
    finally:
        shutil.rmtree(home)
    assert said == "(['labs'], ['here.py'], '/student')\n"


@pytest.mark.slow
@needs_namespaces
def test_what_it_may_write_it_may_not_run():
    """bubblewrap's own tmpfs would let it."""
    said = said_behind_walls(
        "/usr/bin/python3", ROOT / "scripts", ROOT / "labs",
        "[open(p + '/x', 'w').write('#!/bin/sh') and os.chmod(p + '/x', 0o755) or "
        "subprocess.run(['sh', '-c', p + '/x'], stderr=subprocess.DEVNULL).returncode "
        "for p in bubblewrap.OWN_FOLDERS], "
        "[line.split()[3][:2] for line in open('/proc/mounts') if line.split()[1] in ('/', '/usr')]"
        ", subprocess.run(['unshare', '-U', 'true'], stderr=subprocess.DEVNULL).returncode, "
        "[line for line in open('/proc/self/status') if line.startswith(('CapEff', 'NoNew'))]")
    assert said == ("([126, 126, 126], ['ro', 'ro'], 1, ['CapEff:\\t0000000000000000\\n', "
                    "'NoNewPrivs:\\t1\\n'])\n")


@pytest.mark.parametrize(("shown", "hidden"), [
    (["/usr", "/home/ada/workbook/labs"], ""), (["/tmp/workbook/labs"], "/tmp/workbook/labs"),
    (["/dev/shm/labs"], "/dev/shm/labs"), (["/tmpfoo/labs"], "")])
def test_what_an_empty_folder_hides_is_known_before(shown, hidden):
    assert bubblewrap.hidden(shown) == hidden


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


@pytest.mark.slow
def test_unsafe_grades_too(lessons, tmp_path, monkeypatch):
    before = sorted(Path(bubblewrap.HOME).rglob("*"))
    found = Sandbox(["labs.manual_ddp"], isolated=False, seconds=60)
    try:
        right = grade(found, lessons, students.RIGHT[0], tmp_path / "a.ipynb")
        # the same, checked beside the answer, and not by a judge of its own
        monkeypatch.setattr(judged_apart, "EXERCISES", frozenset())
        beside = grade(found, lessons, students.RIGHT[0], tmp_path / "a.ipynb")
        source, _ = on_the_check.FOUND["walks_the_stack"]
        walks = grade(found, lessons, source, tmp_path / "b.ipynb")
    finally:
        found.close()
    assert (right.outcome, beside.outcome, walks.outcome) == (PASSED, PASSED, NOT_ALLOWED)
    assert sorted(Path(bubblewrap.HOME).rglob("*")) == before


# A formula, a class, an optimizer, sharding, a checkpoint, a trace.
KINDS = ("1.3", "2.4", "3.2", "4.1", "4.7", "5.9")


@pytest.mark.slow
@needs_namespaces
def test_the_solutions_pass(lessons):
    """One exercise of each kind; all of them, by hand: scripts/grade solutions --out all.csv."""
    work = [(one, exercise) for lesson in lessons
            for one in [looked_at(ROOT / "solutions" / f"{lesson.name}.ipynb", lessons)]
            for exercise in lesson.exercises
            if exercise.number in KINDS]
    found = Sandbox([lesson.package for lesson in lessons], seconds=120)
    try:
        with ThreadPoolExecutor(2) as pool:
            graded = [*pool.map(lambda each: grade_one(found, *each), work)]
    finally:
        found.close()
    assert [exercise.number for _, exercise in work] == [*KINDS]
    assert [one for one in graded if one.outcome != PASSED] == []


def test_the_hostile_set_is_large_enough():
    names = [*on_the_check.SEEN, *on_the_check.FOUND, *on_the_machine.ATTACKS]
    assert len(names) == len(set(names)) >= 25
    assert namespaces.Limits().processes < 1000
