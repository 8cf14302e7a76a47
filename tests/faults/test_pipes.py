"""Ranks that do not read what they are to run, or send half of what they have to say: the caller
never waits for one of them inside a read or a write."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import labs
from labs import launch
from labs.workers import hang_rules, processes

LARGE = 20_000_000  # float32, 80 MB: far more than a pipe takes at once


@pytest.fixture
def signal_to_rank_1(monkeypatch):
    """Returns a function: rank 1 of each launch gets this signal as soon as it has been started."""
    start, numbers, started = processes.start, [], []

    def start_and_signal(target, args):
        process = start(target, args)
        started.append(process.pid)
        if numbers and len(started) == 2:
            os.kill(process.pid, numbers[0])
        return process

    monkeypatch.setattr(processes, "start", start_and_signal)
    yield numbers.append
    numbers.clear()


def with_large_closure():
    table = torch.ones(LARGE)

    def work():
        dist.barrier()
        return table[-1].item()

    return work


@pytest.mark.filterwarnings("ignore:80 MB are sent")
def test_a_rank_that_is_suspended_before_it_reads(next_launch_works, signal_to_rank_1, monkeypatch):
    monkeypatch.setattr(hang_rules, "START_TIMEOUT", 3.0)
    signal_to_rank_1(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(labs.RanksStuck) as caught:
        launch(with_large_closure(), ranks=2, device="cpu", quiet=True, hang_after=2)
    assert "rank 1 is suspended" in str(caught.value), caught.value
    assert time.monotonic() - began < 20


def test_a_rank_that_never_says_anything(next_launch_works, signal_to_rank_1, monkeypatch):
    monkeypatch.setattr(hang_rules, "FIRST_SIGN", 1.0)
    signal_to_rank_1(signal.SIGSTOP)
    with pytest.raises(labs.RanksStuck, match="rank 1 has said nothing since it was started 1 s"):
        launch(dist.barrier, ranks=2, device="cpu", quiet=True)


@pytest.mark.filterwarnings("ignore:80 MB are sent")
def test_a_rank_that_is_killed_before_it_has_read_all(next_launch_works, signal_to_rank_1):
    signal_to_rank_1(signal.SIGKILL)
    with pytest.raises(labs.RankFailed, match=r"rank 1 was killed by signal 9 \(SIGKILL\)"):
        launch(with_large_closure(), ranks=2, device="cpu", quiet=True)
