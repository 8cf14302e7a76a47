"""scripts/turn: turns on one node wait for each other in order of arrival, end in time, leave
nothing behind, and hand back what there was. Real processes, on GPUs that only nvidia-smi has."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
import psutil
import pytest
from _turn import guard, queue, session, shares
from _turn.__main__ import check
from leaks import until

ROOT = Path(__file__).resolve().parents[1]
# What labs/checks/records.py would write, without the seconds that importing labs takes.
RECORD = """\
import json, os
def record(passed, exercise, text, kind="Verdict"):
    with open(os.environ["WORKBOOK_RECORDS"], "a") as file:
        file.write(json.dumps({"exercise": exercise, "kind": kind, "text": text, "passed": passed,
                               "seconds": 0.1, "metrics": []}) + "\\n")
"""
# A cell that starts what a launch may leave when it is killed: a process in a session of its own.
NEVER_ENDS = """\
import os, pathlib, subprocess, time
print("before it hangs", flush=True)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path({pids!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""


class Node:
    """A node with so many GPUs, its queue, and students with one notebook each."""

    def __init__(self, folder: Path, gpus: int):
        self.folder, self.queue = folder, folder / "queue"
        program = folder / "bin" / "nvidia-smi"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\ncase $1 in *index,memory.used*) "
                           f"for i in $(seq 0 {gpus - 1}); do echo $i, 100$i; done;; "
                           f"*) seq 0 {gpus - 1};; esac\n")
        program.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        self.environment = kept | {"PATH": f"{program.parent}:{os.environ['PATH']}",
                                   "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}",
                                   "WORKBOOK_QUEUE": str(self.queue),
                                   "TMPDIR": str(folder / "temporary")}
        (folder / "temporary").mkdir()

    def notebook(self, student: str, *cells: str) -> Path:
        path = self.folder / student / "lesson.ipynb"
        path.parent.mkdir()
        nbformat.write(nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)]),
                       path)
        return path

    def turn(self, *arguments) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-m", "_turn", *map(str, arguments)], text=True,
                                env=self.environment, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)

    def said(self, *arguments) -> str:
        return self.turn(*arguments).communicate(timeout=60)[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[0-9]*"))


@pytest.mark.slow
def test_two_turns_on_one_gpu_wait_for_each_other(tmp_path):
    node = Node(tmp_path, 1)
    note = ("import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
            f"open({str(tmp_path / 'times')!r}, 'a').write(f'{{time.time()}} ')")
    cells = [note, "time.sleep(2)", note]
    with node.turn(node.notebook("ada", *cells)) as first:
        assert until(lambda: names(node.queue) == ["000001.running"], 30)
        with node.turn(node.notebook("bob", *cells)) as second:
            assert until(lambda: names(node.queue) == ["000001.running", "000002.waiting"], 30)
            said = node.said("--status")
            assert "1 GPU: 1 in use. 1 notebook waiting." in said and "gpu-0, 0." in said
            assert "waits   1" in said and "for 1 GPU, 0." in said
            printed = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], printed
    times = [float(word) for word in (tmp_path / "times").read_text().split()]
    assert len(times) == 4 and times == sorted(times)  # the second began after the first's end
    assert "Next in the queue, until 1 GPU is free" in printed[1] and "Place" not in printed[0]
    report = json.loads((tmp_path / "bob" / "lesson.report.json").read_text())
    assert report["outcome"] == "ran to its end" and report["ran_on"] == ["gpu-0"]
    assert report["minutes_waited"] > 0 and report["peak_gpu_bytes"] == 1000 << 20
    executed = nbformat.read(tmp_path / "bob" / "lesson.executed.ipynb", 4)
    assert executed.cells[0].outputs[0].text == "0\n"
    assert names(node.queue) == [] and "0 in use" in node.said("--status")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 130)])
def test_a_holder_that_is_killed_frees_its_gpu_and_leaves_no_process(tmp_path, number, code):
    node, pids = Node(tmp_path, 1), tmp_path / "pids"
    with node.turn(node.notebook("ada", NEVER_ENDS.format(pids=str(pids)))) as first:
        assert until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 60)
        started = [*map(int, pids.read_text().split())]
        with node.turn(node.notebook("bob", "print('mine')")) as second:
            assert until(lambda: len(names(node.queue)) == 2, 30)
            first.send_signal(number)
            assert first.wait(60) == code
            printed = second.communicate(timeout=60)[0]
    assert second.returncode == 0, printed
    assert not [pid for pid in started if is_there(pid)]
    assert not [*(tmp_path / "temporary").glob("turn-*")]
    if number == signal.SIGTERM:  # what there was is handed back
        assert "before it hangs" in (tmp_path / "ada" / "lesson.executed.ipynb").read_text()


def is_there(pid) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_notebook_that_never_ends_is_ended_in_time_with_its_outputs(tmp_path):
    node, pids = Node(tmp_path, 2), tmp_path / "pids"
    cells = [RECORD + "record(True, '9.1', '✓ Exercise 9.1  it is 1')\n"
                      "record(False, '9.2', '✗ Exercise 9.2  rank 1 is wrong\\n  Hint: look')\n"
                      "record(None, '9.3', '· Exercise 9.3  is waiting')\n"
                      "record(None, 'a picture', 'peak: 1 MB', 'Picture')",
             NEVER_ENDS.format(pids=str(pids)), "print('never')"]
    turn = node.turn(node.notebook("ada", *cells), "--gpus", 2, "--minutes", 0.4,
                     "--out", tmp_path / "results")
    printed = turn.communicate(timeout=90)[0]
    assert turn.returncode == 124
    assert ("lesson was ended in cell 2 of 3, because its 0.4 minutes were over; of 3 exercises "
            "that were checked, 1 passed, 1 failed, 1 not filled in.") in printed
    assert "  ✗ 9.2  rank 1 is wrong\n" in printed and "gpu-0, gpu-1" in printed
    assert not [pid for pid in map(int, pids.read_text().split()) if is_there(pid)]
    executed = nbformat.read(tmp_path / "results" / "lesson.executed.ipynb", 4)
    assert executed.cells[1].outputs[0].text == "before it hangs\n"
    page = (tmp_path / "results" / "lesson.report.html").read_text()
    assert "rank 1 is wrong" in page and "was ended in cell 2 of 3" in page
    assert names(node.queue) == [] and [*(tmp_path / "ada").iterdir()] == [
        tmp_path / "ada" / "lesson.ipynb"]


@pytest.mark.slow
def test_a_notebook_that_fails_runs_on_and_keeps_its_outputs(tmp_path):
    node = Node(tmp_path, 1)
    (tmp_path / "bob").mkdir()
    path = node.notebook("ada", "print('first'); 1 / 0", "print(open('earlier.txt').read())",
                         "open('earlier.txt', 'w').write('changed')", "import os; os._exit(1)")
    (path.parent / "earlier.txt").write_text("of an earlier lesson")
    turn = node.turn(path)
    printed = turn.communicate(timeout=90)[0]
    assert turn.returncode == 1
    assert "! cell 1: ZeroDivisionError" in printed and "! cell 4: its kernel died" in printed
    executed = (path.parent / "lesson.executed.ipynb").read_text()
    assert "first" in executed and "of an earlier lesson" in executed
    assert (path.parent / "earlier.txt").read_text() == "of an earlier lesson"  # it was a copy


# ---- the queue


def ticket(waiting, count, name="lesson"):
    return queue.Ticket(waiting, name, count, 10)


def test_first_come_first_served_whatever_the_number_of_gpus(tmp_path):
    waiting, gpus = queue.Queue(tmp_path / "queue"), ["gpu-0", "gpu-1"]
    small, large, late = (ticket(waiting, count) for count in (1, 2, 1))
    assert large.place() == 2 and late.place() == 3
    assert large.take(gpus) is None and late.take(gpus) is None  # before the first has its own
    assert small.take(gpus) == ["gpu-0"]
    assert large.take(gpus) is None  # and keeps no part of what it waits for
    assert late.take(gpus) is None  # does not overtake, although GPU 1 is free
    assert [one["state"] for one in waiting.living()] == ["running", "waiting", "waiting"]
    small.give_back()
    assert late.take(gpus) is None and large.take(gpus) == gpus and late.take(gpus) is None
    large.give_back()
    assert late.take(gpus) == ["gpu-0"]
    late.give_back()
    assert names(waiting.folder) == []


def test_a_ticket_of_a_process_that_has_gone_is_passed_over(tmp_path):
    waiting = queue.Queue(tmp_path / "queue")
    gone, mine = ticket(waiting, 1), ticket(waiting, 1)
    os.close(gone.descriptors[0])  # as the kernel does when a process ends
    assert mine.place() == 1 and mine.take(["gpu-0"]) == ["gpu-0"]
    assert names(waiting.folder) == ["000002.running"]


def test_every_account_may_use_the_queue(tmp_path):
    before = os.umask(0o077)
    try:
        waiting = queue.Queue(tmp_path / "queue")
        ticket(waiting, 1).take(["gpu-0"])
    finally:
        os.umask(before)
    assert waiting.folder.stat().st_mode & 0o7777 == 0o777
    assert {path.stat().st_mode & 0o777 for path in waiting.folder.iterdir()} == {0o666}


# Python may lie below a home that others may not read, as in a container: reading is all they may.
READS = ["--clear-groups", "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search",
         "--bounding-set=-all,+dac_read_search"]
TAKES = """\
import sys
from pathlib import Path
from _turn import queue
ticket = queue.Ticket(queue.Queue(Path(sys.argv[1])), "lesson", 1, 10)
print(ticket.take(["gpu-0"]), flush=True)
for _ in sys.stdin:
    print(ticket.take(["gpu-0"]), flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root, setpriv")
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_two_accounts_share_the_queue(mode):
    """Also in a sticky folder, where neither may remove the other's ticket."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other accounts
        os.chmod(folder, 0o777)
        (shared := Path(folder) / "queue").mkdir()
        shared.chmod(mode)
        ada, bob = (subprocess.Popen(
            ["setpriv", "--reuid", user, *READS, sys.executable, "-c", TAKES, shared], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={
                **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}, cwd="/")
            for user in ("60001", "60002"))
        with ada, bob:
            said = {process: process.stdout.readline() for process in (ada, bob)}
            [first] = [process for process, line in said.items() if line == "['gpu-0']\n"]
            [second] = {ada, bob} - {first}
            assert said[second] == "None\n"
            first.kill()
            first.wait()
            second.stdin.write("again\n")
            second.stdin.close()
            assert second.stdout.readline() == "['gpu-0']\n"


def test_a_queue_that_others_may_not_write_to(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(queue.Refused, match="has to run chmod a\\+rwx "):
        queue.Queue(tmp_path)


def test_a_queue_that_is_a_file(tmp_path):
    (tmp_path / "queue").touch()
    with pytest.raises(queue.Refused, match="is no folder"):
        queue.Queue(tmp_path / "queue")


@pytest.mark.skipif(not shutil.which("flock"), reason="there is no flock")
def test_a_gpu_can_be_kept_out_of_the_queue(tmp_path):
    waiting = queue.Queue(tmp_path / "queue")
    first, second = ticket(waiting, 1), ticket(waiting, 1)
    with subprocess.Popen(["flock", waiting.folder / "gpu-0.lock", "sleep", "60"]) as other:
        taken = waiting.folder / "gpu-0.lock"
        assert until(taken.exists) and until(lambda: psutil.Process(other.pid).children())
        assert first.take(["gpu-0", "gpu-1"]) == ["gpu-1"]
        assert second.take(["gpu-0", "gpu-1"]) is None
        for one in [*psutil.Process(other.pid).children(), other]:
            one.kill()
    assert until(lambda: second.take(["gpu-0", "gpu-1"]) == ["gpu-0"])


def test_processes_are_known_by_what_they_inherit():
    marked = {**os.environ, guard.MARK: "some"}
    with (subprocess.Popen(["sleep", "60"], env=marked, start_new_session=True) as mine,
          subprocess.Popen(["sleep", "60"], env=marked | {guard.MARK: "other"}) as other):
        guard.clear("some")
        assert mine.wait(5) == -signal.SIGKILL and other.poll() is None
        other.kill()


# ---- into what a node is divided


@pytest.mark.parametrize(("gpus", "cores", "given", "expected"), [
    ("01234567", 16, [0], {0, 8}),  # both threads of a physical core
    ("01234567", 16, [2, 3], {2, 3, 10, 11}), ("0123", 16, [3], {6, 7, 14, 15}),
    ("01234567", 2, [0], {0}), ("01234567", 2, [7], {1}), ("", 4, [3], {3})])
def test_cores_are_divided_like_gpus(monkeypatch, gpus, cores, given, expected):
    monkeypatch.setattr(shares, "_siblings", lambda core: str(core % (cores // 2)))
    node = shares.Node(tuple(gpus), tuple(range(cores)))
    assert node.cores_of([node.names[index] for index in given]) == expected


def test_only_the_gpus_that_are_visible_are_divided(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    node = shares.node()
    assert node.names == ["gpu-4", "gpu-6"]
    found = node.variables(["gpu-6"])
    assert found["CUDA_VISIBLE_DEVICES"] == "6" and found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(("job", "folder"), [("", "workbook-queue"), ("7", "workbook-queue-7")])
def test_a_job_of_slurm_has_a_queue_of_its_own(job, folder):
    """Slurm calls the first GPU of each job 0."""
    kept = {name: value for name, value in os.environ.items()
            if name not in ("SLURM_JOB_ID", "WORKBOOK_QUEUE")}
    done = subprocess.run([ROOT / "scripts" / "turn", "--help"], capture_output=True, text=True,
                          env=kept | ({"SLURM_JOB_ID": job} if job else {}), timeout=60)
    assert f"(/tmp/{folder})" in " ".join(done.stdout.split())


# ---- what is refused


@pytest.mark.parametrize(("arguments", "said"), [
    ("", "give one NOTEBOOK, or --status"), ("none.ipynb", "there is no notebook none.ipynb"),
    ("text.md", "its name does not end in .ipynb"), ("text.md --gpus 0", "0 is not above 0"),
    ("text.md --status", "give one NOTEBOOK, or --status")])
def test_bad_arguments(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text.md").touch()
    with pytest.raises(SystemExit) as exit_:
        check(arguments.split())
    assert exit_.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(("content", "gpus", "said"), [
    ("{}", 1, "is no notebook"), ("no JSON", 1, "is no notebook"),
    ('{"cells": []}', 3, "--gpus 3 is more than this node has: 2 GPUs")])
def test_what_cannot_be_run(tmp_path, monkeypatch, content, gpus, said):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (tmp_path / "a.ipynb").write_text(content)
    options = check([str(tmp_path / "a.ipynb"), "--gpus", str(gpus), "--queue",
                     str(tmp_path / "queue")])
    with pytest.raises(queue.Refused, match=said):
        session.run(options)


def test_a_folder_that_is_too_large_to_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "LARGEST", 10)
    (tmp_path / "a.ipynb").write_text('{"cells": []}')
    with pytest.raises(queue.Refused, match="put the notebook into a folder of its own"):
        session._copied(tmp_path / "a.ipynb", tmp_path / "copy")


def test_the_command_answers_help_before_set_up():
    done = subprocess.run([ROOT / "scripts" / "turn", "--help"], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("usage: scripts/turn")
    assert "exit code: 0 if the notebook ran to its end" in done.stdout
