"""What becomes of a process whose start is disturbed."""

import os
import signal
import time
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess

import pytest

from labs.workers import processes
from labs.workers.launch_error import LaunchError

SLEEPS = time.sleep, (60,)


def test_a_process_that_started_before_an_interrupt_is_ended(monkeypatch, nothing_left):
    started, start = [], BaseProcess.start

    def interrupted_after(process):
        start(process)
        started.append(process.sentinel)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(BaseProcess, "start", interrupted_after)
    with pytest.raises(KeyboardInterrupt):
        processes.start(*SLEEPS)
    assert wait(started, 5)


def test_a_start_leaves_other_processes_to_their_threads():
    ended = processes.start(time.sleep, (0,))
    assert wait([ended.sentinel], 60)
    processes.start(time.sleep, (0,)).join(60)
    assert ended._popen.returncode is None  # nobody has read it, or closed what it is read from
    ended.join(60)
    assert ended.exitcode == 0


@pytest.mark.slow
def test_a_fork_server_that_does_not_answer_is_replaced(monkeypatch, nothing_left):
    processes.start(time.sleep, (0,)).join(60)  # it has imported torch
    server = forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    with monkeypatch.context() as patch, pytest.raises(LaunchError, match="has not answered for"):
        patch.setattr(processes, "ANSWERS_AFTER", 0.5)
        processes.start(*SLEEPS)
    process = processes.start(time.sleep, (0,))
    process.join(120)
    assert process.exitcode == 0 and forkserver._forkserver._forkserver_pid != server
