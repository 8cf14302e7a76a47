"""Find a Python that can carry the workbook. Like _setup.py, readable by Python 3.6."""

import json
import re
import shutil
import subprocess

from _trouble import Trouble, no_recent_python, no_venv

OLDEST = (3, 11)
OLDEST_TORCH = (2, 11)
NAMES = ["python3.14", "python3.13", "python3.12", "python3.11", "python3"]

# Runs under any Python, also 2.7.
PROBE = """
import json, sys
def has(name):
    try:
        __import__(name)
    except Exception:
        return False
    return True
torch = None
try:
    from importlib.metadata import version
    torch = version("torch")
except Exception:
    pass
print(json.dumps({
    "path": sys.executable,
    "version": sys.version_info[:3],
    "venv": has("venv") and has("ensurepip"),
    "in_venv": sys.prefix != getattr(sys, "base_prefix", sys.prefix),
    "torch": torch,
}))
"""


def spell(version):
    """Return (3, 11, 2) as '3.11'."""
    return ".".join(str(part) for part in tuple(version)[:2])


def public(version):
    """Return '2.13.0+cpu' as '2.13.0': the part that a lock can name everywhere."""
    return (version or "").split("+")[0]


def fits(torch):
    """Return whether a version of torch is one that the workbook supports."""
    numbers = re.match(r"(\d+)\.(\d+)", torch or "")
    return bool(numbers) and tuple(int(n) for n in numbers.groups()) >= OLDEST_TORCH


def probe(python):
    """Ask a Python for its version, venv and torch; None if it does not run."""
    path = shutil.which(python)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, "-c", PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=120
        )
        return json.loads(done.stdout.decode())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def choose_base(environ):
    """Return what `probe` says of the Python to make .venv with.

    $PYTHON if set; else the first on PATH that has a fitting torch; else the newest.
    """
    wanted = environ.get("PYTHON")
    found = [probe(name) for name in ([wanted] if wanted else NAMES)]
    found = [python for python in found if python]
    recent = [python for python in found if tuple(python["version"]) >= OLDEST]
    if not recent:
        seen = sorted({spell(python["version"]) for python in found})
        raise Trouble(no_recent_python(spell(OLDEST), seen, wanted))
    usable = [python for python in recent if python["venv"]]
    if not usable:
        raise Trouble(no_venv(recent[0]["path"], spell(recent[0]["version"])))
    with_torch = [python for python in usable if fits(python["torch"]) and not python["in_venv"]]
    return (with_torch or usable)[0]
