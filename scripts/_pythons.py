"""Find a Python that can run the workbook. Like _setup.py, readable by Python 3.6."""

import json
import os
import re
import shutil
import subprocess

from _setup_errors import SetupError, no_recent_python, no_venv, pin_rejects_python

OLDEST = (3, 11)
OLDEST_TORCH = (2, 11)
NAMES = ["python3.14", "python3.13", "python3.12", "python3.11", "python3"]
CLAUSE = re.compile(r"(~=|==|!=|<=|>=|<|>)\s*(\d+(?:\.\d+)*)(\.\*)?$")

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


def minor_version(version):
    """Return (3, 11, 2) as '3.11'."""
    return dotted(tuple(version)[:2])


def dotted(version):
    """Return (3, 11, 2) as '3.11.2'."""
    return ".".join(str(part) for part in version)


def public_version(version):
    """Return '2.13.0+cpu' as '2.13.0': the part that a lock can name everywhere."""
    return (version or "").split("+")[0]


def is_supported_torch(torch):
    """Return whether a version of torch is one that the workbook supports."""
    numbers = re.match(r"(\d+)\.(\d+)", torch or "")
    return bool(numbers) and tuple(int(n) for n in numbers.groups()) >= OLDEST_TORCH


def accepts(requires_python, version):
    """Return whether a package's Requires-Python, such as '>=3.11.5,<4', allows a version.

    A clause that is not understood is passed over: pip looks at it again. Here instead of the
    library `packaging`, because nothing is installed yet.
    """
    return all(_holds(clause.strip(), version) for clause in requires_python.split(","))


def _holds(clause, version):
    match = CLAUSE.match(clause)
    if not match:
        return True
    operator, numbers, wildcard = match.groups()
    bound = tuple(int(number) for number in numbers.split("."))
    prefix = tuple(version)[: len(bound)]
    mine, theirs = _padded(version), _padded(bound)
    if operator == "~=":
        return mine >= theirs and prefix[:-1] == bound[:-1]
    if wildcard:
        return (prefix == bound) == (operator == "==")
    return {
        "==": mine == theirs,
        "!=": mine != theirs,
        "<=": mine <= theirs,
        ">=": mine >= theirs,
        "<": mine < theirs,
        ">": mine > theirs,
    }[operator]


def _padded(version):
    return (tuple(version) + (0, 0, 0))[:3]


def rejecting_pin(pins, version):
    """Return the first pin that does not run on this version of Python, or None."""
    return next((pin for pin in pins if not accepts(pin.python, version)), None)


def probe(python):
    """Ask a Python for its version, venv and torch; None if it does not run."""
    path = shutil.which(python)
    if path is None:
        return None
    try:
        # -c puts the working folder first on sys.path; -P, which does not, is new in Python 3.11
        done = subprocess.run(
            [os.path.abspath(path), "-c", PROBE],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=120,
            cwd="/",
        )
        return json.loads(done.stdout.decode())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def choose_base(environ, pins=()):
    """Return what `probe` says of the Python to make .venv with; each of the `pins` runs on it.

    $PYTHON if set; else the first on PATH that has a supported torch; else the newest.
    """
    wanted = environ.get("PYTHON")
    found = [probe(name) for name in ([wanted] if wanted else NAMES)]
    found = [python for python in found if python]
    recent = [python for python in found if tuple(python["version"]) >= OLDEST]
    if not recent:
        seen = sorted({minor_version(python["version"]) for python in found})
        raise SetupError(no_recent_python(minor_version(OLDEST), seen, wanted))
    accepted = [python for python in recent if not rejecting_pin(pins, python["version"])]
    if not accepted:
        path, version = recent[0]["path"], recent[0]["version"]
        pin = rejecting_pin(pins, version)
        raise SetupError(pin_rejects_python(path, dotted(version), pin))
    usable = [python for python in accepted if python["venv"]]
    if not usable:
        raise SetupError(no_venv(accepted[0]["path"], minor_version(accepted[0]["version"])))
    with_torch = [p for p in usable if is_supported_torch(p["torch"]) and not p["in_venv"]]
    return (with_torch or usable)[0]
