"""Runs each row in a process of its own, for so many seconds at most, and prints the table."""

import json
import shutil
import subprocess
import sys
import textwrap
import time
from collections import namedtuple

from _unattended import runner

from _preflight.found import Found, stop
from _preflight.row import DRIVER

# name: what is printed. function: "module.function" of this package. seconds: after which the row
# is ended. full: only with --full.
Row = namedtuple("Row", "name function seconds full advice", defaults=(False, ""))

_LOADING = "Loading torch took too long: look whether the disk, or what else runs here, is slow."

ROWS = (
    Row("Python", "software.python", 20),
    Row("packages", "software.packages", 30),
    Row("torch", "software.torch_build", 120, advice=_LOADING),
    Row("driver and NCCL", "software.driver", 60, advice=DRIVER),
    Row("GPUs", "gpus.cards", 60, advice=DRIVER),
    Row("use of GPUs", "gpus.users", 60, advice=DRIVER),
    Row("links", "gpus.links", 120, advice=DRIVER),
    Row("memory", "host.memory", 20),
    Row("/dev/shm", "host.shared_memory", 20),
    Row("disk", "host.disk", 20),
    Row("limits", "host.limits", 20),
    Row("busy", "students.load", 60, advice=DRIVER),
    Row("students", "students.at_once", 60, advice=DRIVER),
    Row("container", "host.container", 20),
    Row("grading", "host.grading", 20),
    Row("ports", "network.ports", 20),
    Row("ranks", "ranks.all_reduce", 180),
    Row("notebooks", "notebooks.running", 60, advice=DRIVER),
    Row("speed", "speed.kernels", 120, full=True),
    Row("bandwidth", "ranks.bandwidth", 240, full=True),
    Row("open sockets", "network.listening", 120, full=True),
)
PROGRAM = [sys.executable, "-P", "-m", "_preflight.row"]
_WIDTH = max(len(row.name) for row in ROWS)


def run(full: bool, keep_going: bool, out) -> list[dict]:
    """Runs the rows and prints each as soon as it is known; returns them as they go into --json."""
    rows = []
    for row in ROWS:
        if row.full and not full:
            continue
        waiting = f"      {row.name} …"
        if out.isatty():
            print(waiting, end="", flush=True, file=out)
        began = time.monotonic()
        found = run_row(row)
        seconds = time.monotonic() - began
        if out.isatty():
            print("\r" + " " * len(waiting) + "\r", end="", file=out)
        print(line(row.name, found), flush=True, file=out)
        rows.append({"name": row.name, **found.as_json(), "seconds": round(seconds, 2)})
        if found.status == "STOP" and not keep_going:
            break
    return rows


def line(name: str, found: Found) -> str:
    """One row for people: the status, the name, what is there, and below it what to do."""
    width = max(60, min(100, shutil.get_terminal_size().columns))
    indent = " " * (_WIDTH + 8)
    first = f"{found.status:6s}{name:{_WIDTH}s}  "
    texts = textwrap.fill(found.value, width, initial_indent=first, subsequent_indent=indent)
    if found.advice:
        texts += "\n" + textwrap.fill(found.advice, width, initial_indent=indent + "→ ",
                                      subsequent_indent=indent + "  ")
    return texts


def run_row(row: Row) -> Found:
    """Runs one row in a process of its own; a row that is late, or fails, says so itself."""
    process = subprocess.Popen([*PROGRAM, row.function], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    try:
        printed, errors = process.communicate(timeout=row.seconds)
    except subprocess.TimeoutExpired:
        return stop(f"no answer within {row.seconds} s", row.advice or
                    "Run it again; if it comes back, something on this machine hangs.")
    finally:
        runner.kill(process)
    return _read(printed, errors)


def _read(printed, errors) -> Found:
    lines = printed.strip().splitlines()
    try:
        return Found(**json.loads(lines[-1]))
    except (IndexError, ValueError, TypeError):
        last = (errors.strip().splitlines() or ["it printed nothing"])[-1]
        return stop(f"failed: {last}", "This row of the table is broken: please report it with the "
                                       "output of scripts/preflight.")

