"""Ranks of a program that a check has started report in files where they wait for each other: no
pipe leads from them to the check."""

import contextlib
import json
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from labs.workers.heartbeat import INTERVAL, Heartbeat

# Seconds that all ranks wait at the same time, and nothing moves, until they are stuck; and those
# that they may take to connect.
QUIET, CONNECT = 6.0, 60.0
FRESH = 3.0  # seconds for which a report holds: one that comes later tells that C++ blocks the rank
THREAD = "labs-report"  # the system's name for the thread; it keeps 15 characters


@dataclass(frozen=True)
class Report:
    """Where one of so many `ranks` is. process: its number. sent: when it said so, and quiet_since:
    since when it has waited and nothing has moved, in monotonic seconds. collective: what it waits
    in for other ranks, "" where it computes, sleeps, reads or writes. place: the script's line, ""
    before the script begins and after its end.
    is_connecting: the ranks may just be connecting, so the wait may be work."""

    rank: int
    ranks: int
    process: int
    sent: float
    place: str
    collective: str = ""
    quiet_since: float | None = None
    is_connecting: bool = False

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self.sent < FRESH

    @property
    def sentence(self) -> str:
        """Where it is, as the rest of a sentence; "" where it is not in the script."""
        if self.collective:
            return f"waited in {self.collective}" + f" at {self.place}" * bool(self.place)
        return f"was at {self.place}, in no collective" if self.place else ""


class Reporter(Heartbeat):
    """On a rank: writes a Report into a folder twice a second."""

    def __init__(self, folder: str, rank: int, ranks: int, backend: str = ""):
        super().__init__(None, backend)
        self._folder, self._rank, self._ranks = folder, rank, ranks
        self._process = os.getpid()

    def run(self):
        with contextlib.suppress(OSError), open("/proc/thread-self/comm", "w") as file:
            file.write(THREAD)
        while True:
            # The main thread changes what is looked at meanwhile: one report is left out.
            with contextlib.suppress(Exception):
                self.activity.update()
                self._write(self.progress())
            time.sleep(INTERVAL)

    def _write(self, progress):
        place = str(progress.place) if progress.place.is_students else ""
        report = Report(self._rank, self._ranks, self._process, progress.sent, place,
                        progress.collective or "", progress.quiet_since, progress.connecting)
        path = os.path.join(self._folder, f"report-{self._process}")
        with open(f"{path}.new", "w") as file:
            json.dump(asdict(report), file)
        os.replace(f"{path}.new", path)


def read(folder: Path) -> list[Report]:
    """The last report of each rank."""
    found = []
    for path in folder.glob("report-*"):
        if not path.suffix:
            with contextlib.suppress(OSError, ValueError, TypeError):  # not ours
                found.append(Report(**json.loads(path.read_text())))
    return found


def are_stuck(reports: list[Report], processes: Collection[int]) -> bool:
    """Whether all ranks that have not ended have waited for others for a time in which nothing has
    moved. False where a rank has not reported yet."""
    running = [report for report in reports if report.process in processes]
    if not running or {report.rank for report in reports} != set(range(running[0].ranks)):
        return False
    if not all(report.is_fresh and report.collective and report.quiet_since for report in running):
        return False
    # All at the same time: what one said may be old by now.
    since = max(report.quiet_since for report in running)
    return all(report.sent - since > (CONNECT if report.is_connecting else QUIET)
               for report in running)
