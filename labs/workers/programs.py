"""Programs that are started for a check, each in a process group of its own: whether they still
compute, what is left of them, and how they end."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

FAILING_RANK = 1  # where one is to fail
LIMIT = 120.0  # seconds that a program may take, on a busy machine
# A program is stopped earlier where all its processes together computed for less than STILL seconds
# in STALL seconds: ranks that wait for each other sleep. Imports of torch compute for seconds.
STALL, STILL = 8.0, 0.3
AFTERWARDS = 2.0  # seconds in which what a program has started must be gone after it
# What tells a process where to meet, or to which notebook it belongs: a program begins without.
_NOT_PASSED_ON = ("LABS_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_", "JPY_")


class StallWatch:
    """Tells when a program has run too long or only waits. groups: returns its process groups."""

    def __init__(self, groups: Callable[[], Iterable[int]], limit: float = LIMIT):
        self._groups, self._limit = groups, limit
        self._seconds, self._computed = {}, 0.0  # by process; since the last sign that it computes
        self._ready = set()  # processes that had something to compute when they were last asked
        self._began = self._computed_at = self._asked_at = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        """Whether the program's time is up, or nothing in it computes any more."""
        now = time.monotonic()
        if now > self._asked_at + 0.5:
            self._asked_at = now
            self._add(alive(self._groups()))
            # What was ready both times had no core in between, or had one all the time. A program
            # that waits is hardly ever found ready, and not twice in a row.
            before, self._ready = self._ready, set(filter(_is_ready, self._seconds))
            # A process that gets a core only now and then computes little, and yet does not wait.
            if self._computed > STILL or before & self._ready:
                self._computed, self._computed_at = 0.0, now
        return now > self._began + self._limit or now > self._computed_at + STALL

    def _add(self, seconds):
        """Adds up process by process: what one that has ended computed must not be missing in what
        the others do."""
        self._computed += sum(max(0.0, found - self._seconds.get(number, 0.0))
                              for number, found in seconds.items())
        self._seconds = seconds

    def restart(self) -> None:
        """Begins the wait again: somebody has let the program continue."""
        self._computed_at = time.monotonic()


def alive(groups: Iterable[int]) -> dict[int, float]:
    """Number of each process of these groups that has not ended -> seconds that it computed, or
    waited for a core. The process for which a group is named counts too while it has not made the
    group yet: on a busy machine a rank imports for seconds before it does."""
    import psutil

    found, wanted = {}, set(groups)
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if (wanted & {process.pid, os.getpgid(process.pid)}
                    and process.status() != psutil.STATUS_ZOMBIE):
                found[process.pid] = sum(process.cpu_times()[:2]) + _waited_for_core(process.pid)
    return found


def _is_ready(number) -> bool:
    """Whether a thread of a process computes, or would if it had a core."""
    for path in Path(f"/proc/{number}/task").glob("*/stat"):
        with contextlib.suppress(OSError, IndexError):  # the thread has ended
            if path.read_text().rpartition(") ")[2][0] == "R":
                return True
    return False


def _waited_for_core(number) -> float:
    """Seconds that the threads of a process were ready to run and did not, up to when they last had
    a core; 0 where the system does not tell. Without them one that gets little of a core looks
    as if it waited."""
    waited = 0
    for path in Path(f"/proc/{number}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
            waited += int(path.read_text().split()[1])  # of computed, waited, number of turns
    return waited / 1e9


def count_left(groups: Iterable[int]) -> int:
    """How many processes are still there some time after the program's end."""
    until = time.monotonic() + AFTERWARDS  # multiprocessing's own helper ends a moment later
    while (left := alive(groups)) and time.monotonic() < until:
        time.sleep(0.02)
    return len(left)


def end(groups: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Sends all processes of the groups a signal."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def environment() -> dict[str, str]:
    """The variables of this process that a program of its own may have."""
    return {name: value for name, value in os.environ.items()
            if not name.startswith(_NOT_PASSED_ON)}


def note(folder: str, what: str, who: object, value: object) -> None:
    """In a program's process: writes down something for the process that started it."""
    with open(os.path.join(folder, f"{what}-{os.getpid()}"), "a") as file:
        file.write(f"{who} {value}\n")


def noted(folder: Path, what: str) -> list[tuple[str, str]]:
    """(who, value) of all that the program's processes have noted so far."""
    return [tuple(line.split(" ", 1)) for path in sorted(folder.glob(f"{what}-*"))
            for line in path.read_text().splitlines() if " " in line]
