"""Install the libraries that only single sections, tests or commands need, beside those of set-up.

With the Python of .venv, after set-up: scripts/test installs DeepSpeed, JAX, torchft and
spmd-types, to compare with, and Sphinx, which builds the book; scripts/book installs Sphinx alone;
scripts/lab installs none. The lock holds their pins under markers like extra == "jax", so that pip
and conda pass over them. torchft has wheels for few machines: others go without it.
WORKBOOK_THIRD_PARTY=0 leaves all of them out; with WORKBOOK_THIRD_PARTY=1 a failure to install them
stops.

Usage: _third_party.py [comparisons] [book]; both if none is named.
"""

import hashlib
import os
import platform
import sys
import time
from collections import namedtuple
from pathlib import Path

import _setup
from _checkout import THIRD_PARTY, Checkout, read, write
from _pythons import dotted, rejecting_pin
from _setup_errors import SetupError, pin_rejects_python

FORMAT = "2"  # raise it when this file changes how it installs
SWITCH = "WORKBOOK_THIRD_PARTY"
# DeepSpeed compiles nothing of its own, and asks for no CUDA compiler while it is installed.
BUILD = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}


class Group(namedtuple("Group", "extras what purpose")):
    """Libraries that are installed together. extras: under whose markers the lock has them. what:
    their names, in a message. purpose: what for, and about how long it takes."""


GROUPS = {
    "comparisons": Group(("third-party", "jax", "ft", "types"),
                         "DeepSpeed, JAX, torchft, spmd-types and what they need",
                         "to compare with (10 s)"),
    "book": Group(("book",), "Sphinx and what it needs", "to build the book (10 s)"),
}


def stamp(checkout, name):
    """Return the path of the file that says which libraries of a group .venv holds."""
    return os.path.join(checkout.venv, "setup." + name)


def pins(checkout, name):
    """Return those of a group's pins that this machine can install."""
    markers = [THIRD_PARTY[extra] for extra in GROUPS[name].extras]
    found = [pin for pin in checkout.third_party_pins() if pin.marker in markers]
    return found if has_torchft_wheel() else [p for p in found if p.marker != THIRD_PARTY["ft"]]


def has_torchft_wheel():
    """Return whether torchft 0.2.0 was built for this machine and Python."""
    machine = sys.platform == "linux" and platform.machine() == "x86_64"
    return machine and sys.version_info[:2] < (3, 14)


def requirements(checkout, name):
    """Return a group's pins without the marker."""
    return [pin.requirement for pin in pins(checkout, name)]


def digest(checkout, name):
    """Return a hash of everything that decides which of them .venv should hold."""
    configuration = read(os.path.join(checkout.venv, "pyvenv.cfg"))
    parts = [FORMAT, *requirements(checkout, name), configuration]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_current(checkout, name):
    """Return whether .venv holds what the lock names, without starting a process."""
    return read(stamp(checkout, name)) == digest(checkout, name)


def install(checkout, name, lock_fd):
    """Install a group's pinned libraries, every other package held as it is."""
    group, chosen = GROUPS[name], requirements(checkout, name)
    pin = rejecting_pin(pins(checkout, name), sys.version_info[:3])
    if pin:
        raise SetupError(pin_rejects_python(sys.executable, dotted(sys.version_info[:3]), pin))
    start = time.monotonic()
    print(f"installing {group.what}, {group.purpose} ...", flush=True)
    os.environ.update(BUILD)
    # --no-deps: the lock is complete, and torch, which DeepSpeed asks for, must stay untouched.
    options = ["--no-deps", "--no-build-isolation", *chosen]
    _setup.pip(checkout, lock_fd, group.what, *options)
    write(stamp(checkout, name), digest(checkout, name))
    print(f"done in {time.monotonic() - start:.0f} s; {SWITCH}=0 leaves them out", flush=True)


def main(root, *names):
    """Install the groups, all if none is named, unless they are there or not wanted; return an exit
    code."""
    checkout, wanted = Checkout(root), os.environ.get(SWITCH, "")
    if wanted == "0":
        return 0
    return max([_install_missing(checkout, name, wanted) for name in names or GROUPS])


def _install_missing(checkout, name, wanted):
    if is_current(checkout, name):
        return 0
    try:
        with _setup.exclusive(checkout) as lock_fd:
            if not is_current(checkout, name):
                install(checkout, name, lock_fd)
    except SetupError as error:
        rest = f"{SWITCH}=0 leaves them out" if wanted else "going on, their tests are skipped"
        print(f"{error} Nothing else needs them: {rest}.", file=sys.stderr)
        return 1 if wanted else 0
    return 0


if __name__ == "__main__":
    sys.exit(main(str(Path(__file__).resolve().parent.parent), *sys.argv[1:]))
