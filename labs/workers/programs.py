"""Programs that are started for a check, each in a process group of its own: whether they still
compute, what is left of them, and how they end."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from labs.workers import activity, reports

FAILING_RANK = 1  # where one is to fail
LIMIT = 120.0  # seconds that a program may take, on a busy machine
# A program is stopped earlier where all its processes together computed for less than STILL seconds
# in STALL seconds: ranks that wait for each other sleep. Imports of torch compute for seconds. A
# rank that says that it waits for no other may sleep for ASLEEP seconds, as on a slow disk.
STALL, STILL, ASLEEP = 8.0, 0.3, 40.0
AFTERWARDS = 2.0  # seconds in which what a program has started must be gone after it
# What tells a process where to meet, or to which notebook it belongs: a program begins without.
_NOT_PASSED_ON = ("LABS_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_", "JPY_")


class StallWatch:
    """Tells when a program has run too long or only waits. groups: returns its process groups.
    notes: the folder in which its ranks report where they wait.

    waits: rank -> the rest of a sentence on where it is."""

    def __init__(self, groups: Callable[[], Iterable[int]], limit: float = LIMIT,
                 notes: Path | None = None):
        self._groups, self._limit, self._notes = groups, limit, notes
        self._threads: dict[tuple[int, int], _Thread] = {}
        self._computed = 0.0  # seconds, since the last sign that it computes
        self._ready = set()  # threads that had something to compute when they were last asked
        self._began = self._computed_at = self._asked_at = time.monotonic()
        self._is_stuck, self._worked_at = False, self._began
        self.waits: dict[int, str] = {}

    @property
    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self._began

    def is_over(self) -> bool:
        """Whether the program's time is up, or nothing in it computes any more."""
        now = time.monotonic()
        if now > self._asked_at + 0.5:
            span, self._asked_at = now - self._asked_at, now
            processes = alive(self._groups())
            before = self._ready
            self._add(_threads(processes), span)
            # What was ready both times had no core in between, or had one all the time. A program
            # that waits is hardly ever found ready, and not twice in a row. A process that gets a
            # core only now and then computes little, and yet does not wait.
            if self._computed > STILL or before & self._ready:
                self._computed, self._computed_at = 0.0, now
            self._ask_ranks(processes)
        return (self._is_stuck or now > self._began + self._limit
                or now > self._computed_at + ASLEEP
                or now > max(self._computed_at, self._worked_at) + STALL)

    def _add(self, threads, span):
        """Adds up thread by thread: what one that has ended computed must not be missing in what
        the others do."""
        self._ready = set()
        for key, thread in threads.items():
            before = self._threads.get(key, _Thread())
            ran = thread.ran - before.ran
            # gloo's threads wake up to look for data. Those of many groups together, and what they
            # wait for a core meanwhile, would be taken for work on a busy machine.
            if thread.is_gloos and ran <= activity.RAN_SHARE * span:
                continue
            self._computed += max(0.0, ran + thread.delayed - before.delayed)
            if thread.is_ready:
                self._ready.add(key)
        self._threads = threads

    def _ask_ranks(self, processes):
        """Takes what the ranks say: they know whether they wait for each other, or for a disk."""
        found = reports.read(self._notes) if self._notes else []
        self.waits = {report.rank: report.sentence for report in found
                      if report.process in processes and report.is_fresh and report.sentence}
        self._is_stuck = reports.are_stuck(found, processes)
        if any(report.process in processes and report.is_fresh and not report.collective
               for report in found):
            self._worked_at = time.monotonic()

    def restart(self) -> None:
        """Begins the wait again: somebody has let the program continue."""
        self._computed_at = time.monotonic()


@dataclass(frozen=True)
class _Thread:
    """ran, delayed: seconds that a thread ran, and waited for a core. is_ready: whether it runs, or
    would if it had a core. is_gloos: whether it is one of those that move data."""

    ran: float = 0.0
    delayed: float = 0.0
    is_ready: bool = False
    is_gloos: bool = False


def alive(groups: Iterable[int]) -> list[int]:
    """The processes of these groups that have not ended. The one for which a group is named counts
    too while it has not made the group yet: on a busy machine a rank imports for seconds before it
    does."""
    import psutil

    found, wanted = [], set(groups)
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if (wanted & {process.pid, os.getpgid(process.pid)}
                    and process.status() != psutil.STATUS_ZOMBIE):
                found.append(process.pid)
    return found


def _threads(processes) -> dict[tuple[int, int], _Thread]:
    """(process, thread) -> what it has computed. Where the system does not tell it of threads, each
    process is one. Without the thread that reports, which is never idle for long."""
    import psutil

    found = {}
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            if not os.path.exists("/proc/self/schedstat"):
                found[process, 0] = _Thread(sum(psutil.Process(process).cpu_times()[:2]))
                continue
            for thread in map(int, os.listdir(f"/proc/{process}/task")):
                with contextlib.suppress(OSError):  # the thread has ended
                    # of the line: number (name) state ...
                    name, _, state = Path(f"/proc/{process}/task/{thread}/stat").read_text(
                        ).partition("(")[2].rpartition(") ")
                    if name != reports.THREAD:
                        found[process, thread] = _Thread(*activity.schedule(thread, process),
                                                         state[:1] == "R",
                                                         name.startswith(activity.GLOO))
    return found


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
