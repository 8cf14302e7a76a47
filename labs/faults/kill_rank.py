"""Jobs of several ranks of which one is killed with SIGKILL at a moment that nobody knows."""

import os
import signal
import time
from collections.abc import Callable

import torch.distributed as dist

from labs.workers.failures import RankFailed
from labs.workers.launcher import launch
from labs.workers.outcomes import Kind

_clock = None  # of the rank that is to be killed: the pipe to the process that kills it
_LOOK = 0.005  # seconds between two looks whether the rank is still there


def kill_rank(fn: Callable, *args, ranks: int, victim: int, after: float,
              note: str | os.PathLike = os.devnull, waits: bool = False) -> bool:
    """Runs fn(*args) on ranks and kills one of them `after` seconds after it has begun; with
    `waits`, after it has called `start_clock`. Returns whether it was killed: False where fn had
    returned before. Raises what else ended the job.

    note: a file that gets the time of the kill, by `time.monotonic`, which is the same in all
    processes.
    """
    try:
        launch(_with_killer, fn, victim, after, note, waits, *args, ranks=ranks, quiet=True)
    except RankFailed as error:
        if error.outcomes[victim].kind is not Kind.KILLED:
            raise
        return True
    return False


def start_clock() -> None:
    """On a rank that is to be killed: its time begins now. Elsewhere, and later, nothing."""
    global _clock
    if _clock is not None:
        os.write(_clock, b"!")
        os.close(_clock)
        _clock = None


def _with_killer(fn, victim, after, note, waits, *args):
    global _clock
    dist.barrier()  # so that all ranks are at work when the time begins
    if dist.get_rank() == victim:
        _clock = _start_killer(after, note)
        if not waits:
            start_clock()
    return fn(*args)


def _start_killer(after, note) -> int:
    """Forks a process that kills this one, and returns the pipe that tells it to begin. A process
    of its own, because a thread of this one would have to wait for Python's lock, and so never come
    in the middle of some calls."""
    rank = os.getpid()
    reading, writing = os.pipe()
    if os.fork():
        os.close(reading)
        return writing
    try:
        os.close(writing)
        _kill_later(rank, reading, after, note)
    finally:  # after an error, too: this process must not go on as a second rank
        os._exit(0)


def _kill_later(rank, reading, after, note):
    begun = os.read(reading, 1)  # nothing where the rank has ended
    until = time.monotonic() + after
    while begun and time.monotonic() < until and os.getppid() == rank:
        time.sleep(min(_LOOK, max(0.0, until - time.monotonic())))
    # getppid() changes when the rank has ended: its number may belong to another process by then.
    if begun and os.getppid() == rank:
        with open(note, "w") as file:
            file.write(f"{time.monotonic()}")
        os.kill(rank, signal.SIGKILL)
