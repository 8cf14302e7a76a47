"""What the check of exercise 0.5 must reject, with the words that must say why; and what it must
accept. Fresh Pythons import torch for seconds, so all answers but one are run in forks of the fork
server, where `mp.spawn` forks, too. The notebook runs its solution in Pythons of its own."""

import ast
import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.multiprocessing
from answers import assert_rejected, with_changes

import labs.start_here as lab
from labs.start_here import scripts
from labs.workers import processes

pytestmark = pytest.mark.usefixtures("warm_launcher")
SOURCE = Path(__file__).parents[2] / "solutions" / "00_start_here.py"


def _texts():
    """HEAD, hello_script and script, as the solution assigns them."""
    found = {}
    for node in ast.parse(SOURCE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id in (
                "HEAD", "hello_script", "script"):
            exec(compile(ast.Module([node], []), str(SOURCE), "exec"), found)
    return found


TEXTS = _texts()
HEAD, RIGHT = TEXTS["HEAD"], TEXTS["script"]


class Forked:
    """A process of the fork server, as a subprocess.Popen is used."""

    def __init__(self, arguments, folder, environment):
        self._process = processes.start(_run, (arguments, str(folder), environment))
        self.pid = self._process.pid

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout):
        self._process.join(timeout)


def _run(arguments, folder, environment):
    """In a fork: what Python does with these arguments."""
    os.setsid()
    for name, stream in (("output", sys.stdout), ("errors", sys.stderr)):
        os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY), stream.fileno())
    sys.stdout = open(sys.stdout.fileno(), "w", closefd=False)  # flushed at the end, as in a file
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = arguments
    fork = multiprocessing.get_context("fork")
    with (mock.patch.object(multiprocessing, "get_context", lambda method=None: fork),
          mock.patch.object(torch.multiprocessing, "get_context", lambda method=None: fork)):
        runpy.run_path(arguments[0], run_name="__main__")


@pytest.fixture
def forked(monkeypatch):
    def start(arguments, folder, environment):
        for name in ("output", "errors"):
            (folder / name).touch()
        return Forked(arguments, folder, environment)

    monkeypatch.setattr(scripts, "start", start)
    monkeypatch.setattr(scripts.programs, "STALL", 3.0)
    monkeypatch.setattr(scripts.programs, "AFTERWARDS", 0.5)


def changed(*pairs):
    return with_changes(RIGHT, *pairs)


SPAWN = "mp.spawn(work, args=(folder,), nprocs=N)"
SUM = "dist.all_reduce(drawn)"
PROCESSES = """ranks = [mp.get_context("spawn").Process(target=work, args=(r, folder))
                 for r in range(N)]
        for rank in ranks: rank.start()
"""
BY_PORT = changed(('place = f"file://{folder}/meet"', 'place = "tcp://127.0.0.1:29511"'))

WRONG = {
    "hello": (TEXTS["hello_script"], "wrong_world_size"),
    "computes_itself": (HEAD + """
print(sum(torch.rand(1, generator=torch.manual_seed(r)).item() for r in range(N)))
""", "wrong_world_size"),
    "draws_all_itself": (changed((SUM, "drawn = sum(torch.rand(1, generator="
                                       "torch.manual_seed(r)) for r in range(N))")),
                         "missing_collective"),
    "nothing_summed": (changed((SUM, "dist.barrier()")), "not_summed"),
    "one_seed": (changed(("manual_seed(rank)", "manual_seed(0)")), "same_seed"),
    "mean": (changed(("drawn.item()", "drawn.item() / N")), "averaged"),
    "all_print": (changed(("if rank == 0:", "if True:")), "several_printed"),
    "tensor_printed": (changed(("drawn.item()", "drawn")), "nothing_printed"),
    "two_always": (changed(("world_size=N", "world_size=2"), ("nprocs=N", "nprocs=2")),
                   "wrong_world_size"),
    "one_rank_too_many": (changed(("world_size=N", "world_size=N + 1")),
                          "ranks_never_meet"),
    "one_rank_waits": (changed((SUM, "if rank == 0:\n        dist.all_reduce(drawn)")),
                       "run_failed|never_ends|ranks_never_meet|missing_collective|hangs_after_failure"),
    "fixed_port": (BY_PORT, "same_meeting_place //127.0.0.1"),
    "fixed_address": (changed(('init_method=place, ', ''), ('    place = f"file://{folder}/meet"', (
        '    import os\n    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")'))),
        "same_meeting_place 29512"),
    "fixed_file": (changed(('{folder}/meet', '/tmp/meet-here-{N and 0}'), (
        "    with tempfile", "    if os.path.exists('/tmp/meet-here-0'): os.unlink("
        "'/tmp/meet-here-0')\n    with tempfile"), ("import sys, ", "import os, sys, ")),
        "same_meeting_place ///tmp/meet-here-0"),
    "no_place": (changed(("init_method=place, ", "")), "run_failed init_method"),
    "no_rank_argument": (changed(("def work(rank, folder)", "def work(folder)")),
                         "run_failed calls"),
    "catches_all": (changed((SPAWN, "try:\n            " + SPAWN + "\n        except Exception:"
                                    "\n            print('a rank failed')")),
                    "failure_hidden"),
    "exit_codes_not_asked": (changed((SPAWN, PROCESSES + "        for rank in ranks: rank.join()")),
                             "failure_hidden"),
    "not_waited_for": (changed((SPAWN, PROCESSES + "        import os, time\n        time.sleep(1)"
                                                   "\n        os._exit(0)"),
                               ("    dist.destroy_process_group()",
                                "    dist.destroy_process_group()\n    __import__('time').sleep(9)"
                                )),
                       "processes_left|failure_hidden"),
    "no_python": (RIGHT.replace("nprocs=N)", "nprocs=N"), "not_python"),
    "a_function": (print, "wrong_type"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_script(name, forked):
    script, words = WRONG[name]
    verdict = lab.check_script(script)
    print(f"\n→ {verdict}")
    assert_rejected(verdict, words)


@pytest.mark.slow
def test_a_script_without_a_guard():
    """With Pythons of its own: a fork does not import the script again."""
    verdict = lab.check_script(changed(('if __name__ == "__main__":', "if True:")))
    assert verdict.passed is False and "if __name__" in verdict.hint, verdict


@pytest.mark.parametrize("script", [
    RIGHT,
    changed((SPAWN, PROCESSES + "        for rank in ranks: rank.join()\n"
                                "        sys.exit(any(rank.exitcode for rank in ranks))")),
    changed((SPAWN, "mp.start_processes(work, (folder,), N, start_method='spawn')"),
            (SUM, "drawn = functional.all_reduce(drawn, 'sum', dist.group.WORLD)"),
            ("import sys", "import torch.distributed._functional_collectives as functional\n"
                           "import sys")),
    HEAD + """
import os, socket

def work(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                   "RANK": str(rank), "WORLD_SIZE": str(N)}
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    mine = torch.rand(1)
    everyone = [torch.empty(1) for _ in range(N)]
    dist.all_gather(everyone, mine)
    if dist.get_rank() == 0:
        print(float(sum(everyone)))
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(work, (port,), N)
""", changed(("dist.init_process_group(\"gloo\", init_method=place, rank=rank, world_size=N)",
             "os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': folder.strip('/'), "
             "'RANK': str(rank), 'WORLD_SIZE': str(N), 'LOCAL_RANK': str(rank)}\n"
             "    mesh = dist.init_device_mesh('cpu', (N,))"),
            ("import sys, ", "import os, socket, sys, "),
            ("with tempfile.TemporaryDirectory() as folder:",
             "with socket.socket() as probe:\n        probe.bind(('127.0.0.1', 0))\n"
             "        folder = str(probe.getsockname()[1])\n    if True:"))],
    ids=["solution", "own_processes", "functional", "free_port", "device_mesh"])
def test_right_script(script, forked):
    verdict = lab.check_script(script)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("text", [
    "\nimport os\nos.x", "import os\nos.x", '"""Says what it does."""\nimport os\nos.x',
    '"""Two\nlines."""; import os\nos.x', "from __future__ import annotations\nimport os\nos.x",
    "# a comment\nif True:\n    x = 1", "\n@f\ndef g():\n    pass",
    "# é\nmatch 1:\n    case _: pass", '"é"; x = 1'])
def test_the_probe_moves_no_line_and_no_docstring(text):
    probed = ast.parse(scripts.with_probe(text))
    before = [(type(node), node.lineno) for node in ast.parse(text).body]
    kept = [(type(node), node.lineno) for node in probed.body]
    added = [each for each in kept if each not in before or before.remove(each)]
    assert "probe" in ast.unparse(probed) and not before and len(added) in (2, 3), kept
    assert ast.get_docstring(probed) == ast.get_docstring(ast.parse(text))


@pytest.mark.parametrize("text", [
    "if True:\n    x = 1\n1 / 0", "if True: x = 1\n1 / 0", "def f():\n    pass\n1 / 0",
    "def f(): pass\nx = 1\n1 / 0", "try:\n    x = 1\nfinally:\n    pass\n1 / 0",
    "if True:\n    # é\n    if True:\n        x = 1\n1 / 0",
    "with open('/dev/null') as é: x = 1\n1 / 0"])
def test_the_probe_moves_no_line_where_nothing_stands_above(text):
    probed = scripts.with_probe(text)
    assert "probe" in probed
    with pytest.raises(ZeroDivisionError) as error:
        exec(compile(probed, "script.py", "exec"), {})
    assert error.traceback[-1].lineno == text.count("\n")  # counted from 0: the last line


def test_a_script_that_does_nothing_gets_no_probe():
    assert scripts.with_probe("# nothing") == "# nothing"
