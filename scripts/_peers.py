"""Install the libraries that the workbook compares itself with: the extra `peers`, DeepSpeed.

scripts/test runs this after set-up, with the Python of .venv; scripts/lab does not. The lock holds
their pins under the marker extra == "peers", so that pip and conda pass over them elsewhere.
WORKBOOK_PEERS=0 leaves them out; with WORKBOOK_PEERS=1 a failure to install them stops.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import _setup
from _checkout import Checkout, read, write
from _trouble import Trouble

FORMAT = "1"  # raise it when this file changes how it installs
# DeepSpeed compiles nothing of its own, and asks for no CUDA compiler while it is installed.
BUILD = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}


def stamp(place):
    """Return the path of the file that says which peers .venv holds."""
    return os.path.join(place.venv, "setup.peers")


def digest(place):
    """Return a hash of everything that decides which peers .venv should hold."""
    parts = [FORMAT, *place.peers(), read(os.path.join(place.venv, "pyvenv.cfg"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def is_current(place):
    """Return whether .venv holds the peers that the lock names, without starting a process."""
    return read(stamp(place)) == digest(place)


def install(place, held):
    """Install the pinned peers from their sources, holding every other package as it is."""
    wanted = place.peers()
    start = time.monotonic()
    print(f"installing {', '.join(wanted)}, to compare with ...", flush=True)
    os.environ.update(BUILD)
    # --no-deps: the lock is complete, and torch, which DeepSpeed asks for, must stay untouched.
    options = ["--no-deps", "--no-build-isolation", *wanted]
    _setup.pip(place, held, "the peers (DeepSpeed and what it needs)", *options)
    write(stamp(place), digest(place))
    print(f"done in {time.monotonic() - start:.0f} s; WORKBOOK_PEERS=0 leaves them out", flush=True)


def main(root):
    """Install the peers unless they are there or not wanted; return an exit code."""
    place, wanted = Checkout(root), os.environ.get("WORKBOOK_PEERS", "")
    if wanted == "0" or is_current(place):
        return 0
    try:
        with _setup.alone(place) as held:
            if not is_current(place):
                install(place, held)
    except Trouble as trouble:
        rest = "WORKBOOK_PEERS=0 leaves them out" if wanted else "going on, their tests are skipped"
        print(f"{trouble} Nothing else needs them: {rest}.", file=sys.stderr)
        return 1 if wanted else 0
    return 0


if __name__ == "__main__":
    sys.exit(main(str(Path(__file__).resolve().parent.parent)))
