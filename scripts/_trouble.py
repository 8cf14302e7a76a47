"""What can stand in the way of set-up, each in one sentence with the way out (Python 3.6)."""

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


class Trouble(Exception):
    """One sentence for the student: what is in the way, and the way out."""


def why_pip_failed(log, what, python):
    """Return the sentence that fits the log of a failed pip, without its full stop."""
    sentence = next(text for signs, text in FAILURES if any(sign in log for sign in signs))
    return sentence.format(what=what, python=python)


def venv_failed(python, said):
    """Return the sentence for a Python whose venv module fails; `said` is its last line."""
    return (
        f"'{python} -m venv' failed ({said}): mend that Python, or set PYTHON to another one, "
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
