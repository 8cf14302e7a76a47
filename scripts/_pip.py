"""Run pip in .venv, report the steps, and explain a failure. Readable by Python 3.6."""

import contextlib
import os
import subprocess
import sys
import time

from _pythons import minor_version, probe
from _setup_errors import SetupError, why_pip_failed


def report(text, end="\n"):
    """Print at once: set-up is watched while it works."""
    print(text, end=end, flush=True)


@contextlib.contextmanager
def step(number, what):
    """Announce one of the four steps and report how long it took."""
    start = time.monotonic()
    on_terminal = sys.stdout.isatty()
    report(f"{number}/4 {what} ...", end="\n" if on_terminal else " ")
    try:
        yield
    except BaseException:
        report("" if on_terminal else "failed")
        raise
    report(f"{'    done in ' if on_terminal else ''}{time.monotonic() - start:.0f} s")


def call(command, lock_fd, log):
    """Run a command to its end, shown on a terminal, logged elsewhere; return its exit code."""
    shown = sys.stdout.isatty()
    with open(log, "a") as file:
        out, err = (None, None) if shown else (subprocess.DEVNULL, file)
        # The child holds the set-up's lock too: it stays taken even if this process is killed.
        child = subprocess.Popen(command, stdout=out, stderr=err, pass_fds=(lock_fd,))
        try:
            return child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise


def pip(checkout, lock_fd, what, *arguments):
    """Run pip install in .venv; on failure raise the sentence that fits its log."""
    start = os.path.getsize(checkout.log) if os.path.exists(checkout.log) else 0
    command = [checkout.python, "-m", "pip", "install", "--disable-pip-version-check"]
    if call(command + ["--log", checkout.log] + list(arguments), lock_fd, checkout.log):
        raise SetupError(explain(checkout, what, start))


def explain(checkout, what, start=0):
    """Return one sentence on why pip failed, judged by its log from byte `start` on."""
    with open(checkout.log, encoding="utf-8", errors="replace") as file:
        file.seek(start)
        text = file.read()
    version = minor_version((probe(checkout.python) or {"version": sys.version_info})["version"])
    return f"{why_pip_failed(text, what, version)} (pip's log: {checkout.log})."


def ensure_pip(checkout):
    """Return whether .venv has pip, and give it one if it has not (uv makes it without)."""
    for module in (["pip", "--version"], ["ensurepip"], ["pip", "--version"]):
        done = subprocess.run(
            [checkout.python, "-m"] + module, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        if done.returncode == 0 and module[0] == "pip":
            return True
    return False
