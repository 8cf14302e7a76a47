"""Ends all that a turn has started, after it is over or was killed; then releases its locks.

Run as a process of its own: it has the turn's locks too, so that GPUs count as free only when
nothing of the turn runs on them any more. Its stdin is a pipe that closes when the turn ends.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

MARK = "WORKBOOK_TURN"  # the variable that every process of a turn inherits
OVER = "over"
SECONDS = 30  # for processes to go after SIGKILL; a driver that hangs can keep them for ever


def start(identity: str, descriptors: list[int], folder: Path) -> subprocess.Popen:
    """Starts the guard of the turn with this identity and temporary folder. It begins when its
    stdin closes, and removes the folder unless it has read OVER there."""
    # A session of its own: an interrupt or a hang-up of the terminal must not end it.
    return subprocess.Popen([sys.executable, "-P", "-m", "_turn.guard", identity, str(folder)],
                            pass_fds=descriptors, stdin=subprocess.PIPE, start_new_session=True,
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)


def end(guard: subprocess.Popen) -> None:
    """Tells the guard that the turn is over, and waits until nothing of it is left."""
    guard.communicate(OVER)


def clear(identity: str) -> None:
    """Kills the turn's processes until there are none. Ranks have sessions of their own and may
    have lost their parents, so they are known by what they inherited."""
    import psutil

    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if (one.status() != psutil.STATUS_ZOMBIE
                        and one.environ().get(MARK) == identity and one.pid != os.getpid()):
                    found.append(one)
        if not found:
            return
        for one in found:
            with contextlib.suppress(psutil.Error):
                one.kill()
        time.sleep(0.05)


if __name__ == "__main__":
    said = sys.stdin.read()
    clear(sys.argv[1])
    if said != OVER:  # the turn was killed, and can remove nothing itself
        shutil.rmtree(sys.argv[2], ignore_errors=True)
