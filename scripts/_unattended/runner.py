"""Runs one part in processes of its own until it ends or its time is over, and ends all of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED, TIMED_OUT, SKIPPED, INTERRUPTED = (
    "passed", "failed", "timed out", "skipped", "interrupted")
GRACE = 15.0  # seconds that a part has after an interrupt, before it is killed


@dataclass
class Result:
    """How a part ended. outcome: one of the words above. why: one line, where it did not pass.
    left: MiB on the GPUs more than before it; None where nothing tells."""

    name: str
    outcome: str
    seconds: float = 0.0
    why: str = ""
    exit_code: int | None = None
    left: float | None = None


def run(name: str, command: list[str], log: Path, seconds: float, cwd: Path,
        tick: Callable[[float], None] = lambda elapsed: None) -> Result:
    """Runs a command for `seconds` at most; all that it prints goes to `log`. tick(elapsed) is
    called twice a second. After a KeyboardInterrupt nothing of it is left either."""
    began = time.monotonic()
    with open(log, "wb") as output:
        # a session of its own: an interrupt of the terminal reaches us alone
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True)
        try:
            code = _wait(process, began + seconds, began, tick)
        finally:
            _end(process)
    took = time.monotonic() - began
    if code is None:
        return Result(name, TIMED_OUT, took, f"not done after {seconds:.0f} s")
    return Result(name, FAILED if code else PASSED, took, _why(code, log) if code else "", code)


def _wait(process, deadline, began, tick) -> int | None:
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(0.5, max(0.01, deadline - time.monotonic())))
        tick(time.monotonic() - began)
    return None


def _end(process):
    """Ends what still runs of it: first as Ctrl-C would, so that it can tidy up, then by force.
    Ranks have sessions of their own, so a signal to one group does not reach all."""
    below = _below(process.pid)
    try:
        if process.poll() is None:
            _signal(process, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    finally:  # also when somebody interrupts a second time
        kill(process, below)
        _signal(process, signal.SIGKILL)  # what is left of its group


def kill(process: subprocess.Popen, below: Sequence = ()) -> None:
    """Ends by force a process, what it has started, and `below`, found before."""
    children = _below(process.pid)  # while it is there: later nothing tells whose they were
    for one in (process, *children, *below):
        with contextlib.suppress(Exception):  # psutil's: it has gone
            one.kill()
    process.wait()


def _signal(process, number):
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _below(pid) -> list:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _why(code, log) -> str:
    """The last line that says something, of what it printed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code < 0:
        return f"ended by signal {-code} ({signal.Signals(-code).name})"
    return lines[-1][:120] if lines else f"exit code {code}"


class Progress:
    """Says on stdout which part runs, in one line that is renewed where stdout is a terminal."""

    def __init__(self, parts: int):
        self.parts, self.number = parts, 0

    def begin(self, part, seconds: float) -> None:
        """A part begins; it has so many seconds."""
        self.number += 1
        self.title = f"[{self.number:2d} of {self.parts}] {part.name}: {part.what}"
        self.seconds = seconds
        if not sys.stdout.isatty():
            print(self.title, flush=True)

    def tick(self, elapsed: float) -> None:
        """It still runs."""
        if sys.stdout.isatty():
            line = f"{self.title}  {elapsed:.0f} s of at most {self.seconds:.0f}"
            print(f"\r\x1b[K{line[:110]}", end="", flush=True)

    def end(self, result: Result) -> None:
        """It has ended."""
        clear = "\r\x1b[K" if sys.stdout.isatty() else ""
        why = f": {result.why}" if result.why else ""
        print(f"{clear}        {result.outcome:11s} {result.name}  {result.seconds:.0f} s{why}",
              flush=True)
