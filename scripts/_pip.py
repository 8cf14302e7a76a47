"""Install into .venv by uv or pip, report the steps, explain a failure. Readable by Python 3.6."""

import contextlib
import csv
import glob
import os
import shutil
import subprocess
import sys
import time

import _uv
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


def call(command, lock_fd, log, environment=None):
    """Run a command to its end, shown on a terminal, logged elsewhere; return its exit code.

    environment: all of its variables; None: those of this process.
    """
    shown = sys.stdout.isatty()
    with open(log, "a") as file:
        out, err = (None, None) if shown else (subprocess.DEVNULL, file)
        # The child holds the set-up's lock too: it stays taken even if this process is killed.
        child = subprocess.Popen(command, stdout=out, stderr=err, pass_fds=(lock_fd,),
                                 env=environment)
        try:
            return child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise


def pip(checkout, lock_fd, what, *arguments):
    """Install what these arguments of `pip install` name into .venv, by uv or, where that cannot,
    by pip; on pip's failure raise the sentence that fits its log."""
    if _uv.install(checkout, lock_fd, call, arguments):
        return
    drop_half_installed(checkout)
    start = os.path.getsize(checkout.log) if os.path.exists(checkout.log) else 0
    command = [checkout.python, "-P", "-m", "pip", "install", "--disable-pip-version-check"]
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
            [checkout.python, "-P", "-m"] + module,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if done.returncode == 0 and module[0] == "pip":
            return True
    return False


def drop_half_installed(checkout):
    """Forget the packages that an interrupted installation left, so that they are installed again.

    pip writes a package's RECORD last. uv writes it with the others: what it lists must be there.
    """
    stopped = os.path.exists(_uv.unfinished(checkout))
    pattern = os.path.join(checkout.venv, "lib", "python*", "site-packages", "*.dist-info")
    for folder in glob.glob(pattern):
        record = os.path.join(folder, "RECORD")
        if not os.path.exists(record) or stopped and not is_complete(record):
            shutil.rmtree(folder)
    if stopped:
        os.remove(_uv.unfinished(checkout))


def is_complete(record):
    """Return whether all files that a RECORD lists are there, with the sizes that it lists."""
    packages = os.path.dirname(os.path.dirname(record))
    with open(record, encoding="utf-8", newline="") as file:
        for row in csv.reader(file):
            # Byte code is made when a module is imported first, and may be of another size.
            if not row or row[0].endswith(".pyc"):
                continue
            path, size = os.path.join(packages, row[0]), row[2] if len(row) > 2 else ""
            if not os.path.exists(path) or size not in ("", str(os.path.getsize(path))):
                return False
    return True
