"""Install the third-party libraries that single sections or tests need: DeepSpeed, JAX and torchft.

scripts/test runs this after set-up, with the Python of .venv; scripts/lab does not. The lock holds
their pins under the markers extra == "third-party", extra == "jax" and extra == "ft", so that pip
and conda pass over them elsewhere. torchft has wheels for few machines: others go without it.
WORKBOOK_THIRD_PARTY=0 leaves them out; with WORKBOOK_THIRD_PARTY=1 a failure to install them stops.
"""

import hashlib
import os
import platform
import sys
import time
from pathlib import Path

import _setup
from _checkout import THIRD_PARTY, Checkout, read, write
from _pythons import dotted, rejecting_pin
from _setup_errors import SetupError, pin_rejects_python

FORMAT = "1"  # raise it when this file changes how it installs
SWITCH = "WORKBOOK_THIRD_PARTY"
# DeepSpeed compiles nothing of its own, and asks for no CUDA compiler while it is installed.
BUILD = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}


def stamp(checkout):
    """Return the path of the file that says which of these libraries .venv holds."""
    return os.path.join(checkout.venv, "setup.third_party")


def pins(checkout):
    """Return those of their pins that this machine can install."""
    found = checkout.third_party_pins()
    return found if has_torchft_wheel() else [p for p in found if p.marker != THIRD_PARTY["ft"]]


def has_torchft_wheel():
    """Return whether torchft 0.2.0 was built for this machine and Python."""
    machine = sys.platform == "linux" and platform.machine() == "x86_64"
    return machine and sys.version_info[:2] < (3, 14)


def requirements(checkout):
    """Return their pins without the marker."""
    return [pin.requirement for pin in pins(checkout)]


def digest(checkout):
    """Return a hash of everything that decides which of them .venv should hold."""
    configuration = read(os.path.join(checkout.venv, "pyvenv.cfg"))
    parts = [FORMAT, *requirements(checkout), configuration]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_current(checkout):
    """Return whether .venv holds what the lock names, without starting a process."""
    return read(stamp(checkout)) == digest(checkout)


def install(checkout, lock_fd):
    """Install the pinned libraries from their sources, every other package held as it is."""
    pin = rejecting_pin(pins(checkout), sys.version_info[:3])
    if pin:
        raise SetupError(pin_rejects_python(sys.executable, dotted(sys.version_info[:3]), pin))
    start = time.monotonic()
    print(f"installing {', '.join(requirements(checkout))}, to compare with (10 s) ...", flush=True)
    os.environ.update(BUILD)
    # --no-deps: the lock is complete, and torch, which DeepSpeed asks for, must stay untouched.
    options = ["--no-deps", "--no-build-isolation", *requirements(checkout)]
    _setup.pip(checkout, lock_fd, "DeepSpeed, JAX, torchft and what they need", *options)
    write(stamp(checkout), digest(checkout))
    print(f"done in {time.monotonic() - start:.0f} s; {SWITCH}=0 leaves them out", flush=True)


def main(root):
    """Install the libraries unless they are there or not wanted; return an exit code."""
    checkout, wanted = Checkout(root), os.environ.get(SWITCH, "")
    if wanted == "0" or is_current(checkout):
        return 0
    try:
        with _setup.exclusive(checkout) as lock_fd:
            if not is_current(checkout):
                install(checkout, lock_fd)
    except SetupError as error:
        rest = f"{SWITCH}=0 leaves them out" if wanted else "going on, their tests are skipped"
        print(f"{error} Nothing else needs them: {rest}.", file=sys.stderr)
        return 1 if wanted else 0
    return 0


if __name__ == "__main__":
    sys.exit(main(str(Path(__file__).resolve().parent.parent)))
