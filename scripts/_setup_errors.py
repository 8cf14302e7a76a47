"""What can stop set-up, each in one sentence with the way out. Readable by Python 3.6."""

import re

# In this order: without a network pip goes on to report conflicts, or no matching version.
FAILURES = [
    (
        ("No space left on device", "Disk quota exceeded"),
        "The disk filled up while installing {what}: free some space (a CUDA build of torch needs "
        "about 8 GB; TMPDIR can name a roomier temporary folder) and run this again",
    ),
    (
        (
            "NewConnectionError",
            "NameResolutionError",
            "ConnectTimeout",
            "ReadTimeout",
            "Max retries exceeded",
            "connection broken",
            "connection error:",
            "Connection refused",
            "Network is unreachable",
            "Temporary failure in name resolution",
            "ProxyError",
            "CERTIFICATE_VERIFY_FAILED",
            "SSLError",
        ),
        "No network: pip could not reach its package index for {what}; check the connection or "
        "the proxy and run this again, it goes on where it stopped",
    ),
    (
        ("ERROR: ResolutionImpossible", "conflicting dependencies"),
        "pip found no set of versions that fits both {what} and the lock: undo local changes to "
        "requirements.lock and to pip's constraints, and run this again",
    ),
    (
        ("No matching distribution found", "Could not find a version that satisfies"),
        "The package index has no build of {what} for this machine and Python {python}: try "
        "another Python (3.11 to 3.14) with PYTHON=python3.12 after removing .venv",
    ),
    (("",), "Installing {what} failed: see what pip says, and run this again"),
]
ERROR_LINE = re.compile(r"\bERROR: (.+)")  # pip's log puts a time before it
# Dozens of versions, and before the line that says the same in short.
NO_REASON = re.compile(r"(Could not find a version|Ignored the following versions)")
QUOTED = 2  # the last errors of pip that a sentence quotes
LONGEST_QUOTE = 200  # characters


class SetupError(Exception):
    """One sentence for the user: what is in the way of set-up, and the way out."""


def why_pip_failed(log, what, python):
    """Return the sentence, without its full stop, on a pip that failed to install `what`.

    It ends with the last errors that pip itself wrote into `log`, where there are any.
    """
    sentence = next(text for signs, text in FAILURES if any(sign in log for sign in signs))
    quotes = pip_errors(log)
    said = "; pip says: " + "; ".join(f'"{quote}"' for quote in quotes) if quotes else ""
    return sentence.format(what=what, python=python) + said


def pip_errors(log):
    """Return the last different ERROR lines of pip's log, shortened, without their full stops."""
    errors = []
    for line in ERROR_LINE.findall(log):
        line = with_required_python(line.strip().rstrip("."), log)
        if len(line) > LONGEST_QUOTE:
            line = line[:LONGEST_QUOTE] + " ..."
        if not NO_REASON.match(line) and line not in errors:  # pip may print what it logs, too
            errors.append(line)
    return errors[-QUOTED:]


def with_required_python(line, log):
    """Return an error line on a missing version with the Python that this version needs, if known.

    pip lists all versions for other Pythons in a line of its own: '4.1.1 Requires-Python >=3.11.5'.
    """
    pin = re.match(r"No matching distribution found for \S+==(\S+)$", line)
    needs = pin and re.search(rf"[:;] {re.escape(pin[1])} Requires-Python ([^;\n]+)", log)
    return f"{line} (Requires-Python {needs[1].strip()})" if needs else line


def venv_failed(python, last_line):
    """Return the sentence for a Python whose venv module fails; `last_line` is its output's."""
    return (
        f"'{python} -m venv' failed ({last_line}): fix that Python, or set PYTHON to another one, "
        "and run this again."
    )


def no_recent_python(oldest, seen, wanted=None):
    """Return the sentence for a machine whose Pythons, of the versions `seen`, are too old."""
    way_out = f"install Python {oldest} or newer, or set PYTHON to one, and run this again."
    if wanted and not seen:
        return f"PYTHON={wanted} does not run: {way_out}"
    where = f"PYTHON={wanted} is" if wanted else "this machine has"
    versions = ", ".join(seen) or "none"
    return f"The workbook needs Python {oldest} or newer, and {where} {versions}: {way_out}"


def no_venv(python, version):
    """Return the sentence for a Python that cannot make virtual environments."""
    return (
        f"{python} cannot make virtual environments: on Debian or Ubuntu run "
        f"'apt install python{version}-venv', elsewhere install a complete Python or set PYTHON "
        "to one, and run this again."
    )


def pin_rejects_python(python, version, pin, venv=None):
    """Return the sentence for a Python that a pin of the lock does not run on.

    python: its path. version: all of its numbers, as text. venv: its folder, where the Python is
    that of a virtual environment, which has to be removed first.
    """
    remove = f"remove {venv}, " if venv else ""
    return (
        f"{python} is Python {version}, and {pin.requirement} in requirements.lock needs Python "
        f"{pin.python}: {remove}install such a Python, or set PYTHON to one that is here, and run "
        "this again; nothing has been downloaded."
    )
