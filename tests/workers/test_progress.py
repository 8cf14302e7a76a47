"""Progress in a live kernel, on a terminal and in a file."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios
import time

import pytest
from notebook_kernel import Kernel

from labs.workers import progress

SLEEP = """
import time
from labs.workers.progress import notice, progress_bar, status
"""
SHOWN = ("display_data", "update_display_data")


@pytest.fixture(scope="module")
def kernel():
    kernel = Kernel(WORKBOOK_PROGRESS="")
    kernel.run(SLEEP)
    yield kernel
    kernel.close()


def lines(kernel, code):
    """The texts that the cell displayed, one after the other; raises what it raised."""
    kernel.start(code)
    found, deadline = [], time.monotonic() + 60  # a first launch waits for imports
    while time.monotonic() < deadline:
        message = kernel.client.get_iopub_msg(timeout=30)
        content = message["content"]
        if message["msg_type"] in SHOWN:
            assert set(content["data"]) == {"text/plain", "text/html"}  # no widget
            found.append(content["data"]["text/plain"])
        assert message["msg_type"] != "error", content
        if content.get("execution_state") == "idle":
            return found
    raise TimeoutError(found)


def test_a_line_says_what_is_done_and_disappears(kernel):
    found = lines(kernel, "with status('turn 3 of 12'), status('4 ranks at work'):\n"
                          "    time.sleep(3.5)")
    assert found[0] == "turn 3 of 12 · 4 ranks at work · 2 s" and found[-1] == ""


def test_a_cell_that_nothing_else_speaks_for_says_that_it_runs(kernel):
    """The kernel has labs.missing_names, which set-up loads."""
    assert lines(kernel, "time.sleep(2.5)") == ["this cell is running · 2 s", ""]
    assert lines(kernel, "import math\ntime.sleep(2.5)")[0].startswith("importing, which takes")
    assert lines(kernel, "time.sleep(0.1)") == []
    found = lines(kernel, "time.sleep(1)\nwith status('turn 3 of 12'):\n    time.sleep(2.5)")
    assert found[0] == "turn 3 of 12 · 1 s" and found[-1] == ""


def test_what_is_quick_shows_nothing(kernel):
    assert lines(kernel, "with status('quick'):\n    time.sleep(0.1)") == []


def test_a_notice_is_shown_once_and_disappears_with_its_block(kernel):
    slow = "with notice(0.1, lambda: {!r}):\n    time.sleep({})"
    assert lines(kernel, slow.format("still in your code", 0.6)) == ["still in your code", ""]
    assert lines(kernel, slow.format("still in your code", 0)) == []
    assert lines(kernel, slow.format("", 0.6)) == []


def test_outputs_that_are_kept_have_no_notice():
    kernel = Kernel(WORKBOOK_PROGRESS="0")
    kernel.run(SLEEP)
    assert lines(kernel, "with notice(0.1, lambda: 'slow'):\n    time.sleep(0.5)") == []
    kernel.close()


def test_a_script_prints_the_notice(capsys):
    with progress.notice(0.05, lambda: "still in your code"):
        time.sleep(0.5)
    assert capsys.readouterr().out == "still in your code\n"


def test_a_bar_disappears_also_when_it_did_not_get_to_its_end(kernel):
    found = lines(kernel, "bar = progress_bar(total=8, desc='rank 0')\nbar.update()\nbar.close()")
    assert "rank 0" in found[0] and "0/8" in found[0] and found[-1] == ""


def test_the_line_makes_way_for_a_bar(kernel):
    found = lines(kernel, "with status('measuring'):\n"
                          "    for _ in progress_bar(range(3), desc='rounds'): time.sleep(1.1)")
    assert not [line for line in found if "measuring" in line] and found[-1] == ""


@pytest.mark.slow
def test_a_launch_that_takes_long_says_how_many_ranks_work(kernel):
    found = lines(kernel, "from labs import launch\n"
                          "_ = launch(lambda: __import__('time').sleep(4), ranks=2, quiet=True)")
    # the import of torch, before it, may take long enough for a line of its own
    assert any(line.startswith("2 ranks at work") for line in found) and found[-1] == ""


STEPS = """
from labs import launch, report
import torch, torch.distributed as dist
from labs.workers import hang_rules

hang_rules.STALL_NOTICE = 4.0
def train(reports):
    for step in range(20):
        time.sleep(0.4 * (dist.get_rank() == 1))
        dist.all_reduce(torch.ones(1))
        if reports: report(step=step)
"""


@pytest.fixture(scope="module")
def steps_known(kernel):
    kernel.run(STEPS)


@pytest.mark.slow
def test_a_launch_that_progresses_slowly_says_what_each_rank_does(kernel, steps_known):
    found = lines(kernel, "_ = launch(train, False, ranks=2, device='cpu')")
    detailed = [line for line in found if "rank 1" in line]
    assert detailed and found[-1] == ""
    assert all(int(re.search(r"(\d+) s", line)[1]) >= 4 for line in detailed), found
    assert all(line.startswith("2 ranks at work · ") for line in detailed), found
    assert any(re.search(r" s · rank 1 sleeps at In \[\d+\] line 8"
                         r" · rank 0 waits in all_reduce at In \[\d+\] line 9$", line)
               for line in detailed), found


@pytest.mark.slow
def test_short_waits_inside_the_backward_of_ddp_are_waits_too(kernel, steps_known):
    kernel.run("""
def train_ddp():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    for step in range(14):
        time.sleep(0.6 * (dist.get_rank() == 1))
        model(torch.ones(2, 4)).sum().backward()
""")
    found = lines(kernel, "_ = launch(train_ddp, ranks=2, device='cpu')")
    detailed = [line for line in found if "rank 1 sleeps" in line]
    # a step is short beside the sleep, but a look may fall into it
    waits = [line for line in detailed if "rank 0 waits in all_reduce at In [" in line]
    assert detailed and len(waits) > len(detailed) / 2, found


@pytest.mark.slow
def test_below_a_bar_it_says_what_each_rank_does(kernel, steps_known):
    found = lines(kernel, "_ = launch(train, True, ranks=2, device='cpu')")
    assert any("rank 0:" in line for line in found), found
    assert any(line.startswith("rank 1 sleeps at In [") for line in found), found


def test_a_line_with_details(kernel):
    found = lines(kernel, "with status('4 ranks at work', details=lambda: 'they compute'):\n"
                          "    time.sleep(2.3)")
    assert found == ["4 ranks at work · 2 s · they compute", ""]


PROGRAM = SLEEP + """
with status('measuring'):
    time.sleep(2.3)
for _ in progress_bar(range(2), desc='rounds'): pass
print('end')
"""


def run(stderr, **environment):
    return subprocess.run([sys.executable, "-c", PROGRAM], stderr=stderr, text=True, timeout=60,
                          stdout=subprocess.PIPE, env=os.environ | environment)


def test_a_terminal_is_left_empty():
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 80))  # without a width tqdm draws nothing
    assert run(its, WORKBOOK_PROGRESS="").stdout == "end\n"
    os.close(its)
    shown = ""
    with contextlib.suppress(OSError):  # the end of what was written
        while part := os.read(ours, 65536).decode():
            shown += part
    assert "measuring · 2 s" in shown and "rounds" in shown
    assert shown.rsplit("\r", 1)[1].strip() == ""


def test_a_line_is_not_wider_than_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    line = progress._TerminalLine()
    line.write("4 ranks at work · 12 s")
    assert capsys.readouterr().err.rsplit("\r", 1)[1] == "4 ranks at work · …"


def test_a_file_gets_nothing():
    assert run(subprocess.PIPE, WORKBOOK_PROGRESS="").stderr == ""


def test_a_bar_may_outlive_its_module(monkeypatch):
    """At the interpreter's end modules' names are None, and tqdm closes what is still there."""
    bar = progress.progress_bar(range(3))
    monkeypatch.setattr(progress, "_bars", None)
    bar.__del__()
