"""Runs the fault table through our launcher and its peers: which of them name the cause, leave
nothing behind and are ready for the next cell."""

import atexit
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from _bench.progress import done, say

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "faults")]
import leaks  # noqa: E402

LIMIT = 60.0  # seconds for one fault of a peer
AT_ONCE = 10  # most of them wait
MARK = "LABS_FAULT_CASE"


@dataclass
class Case:
    """A process that runs some faults through one launcher."""

    launcher: object
    faults: list
    limit: float
    directory: str = None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: object = None
    began: float = 0.0

    def start(self):
        self.directory = tempfile.mkdtemp(prefix="fault-")
        # forked, so that only the ranks need to import torch
        self.process = multiprocessing.get_context("fork").Process(target=self._run)
        self.process.start()
        self.began = time.monotonic()

    def _run(self):
        from _bench import fault_case

        os.setsid()
        os.mkdir(f"{self.directory}/tmp")
        tempfile.tempdir = os.environ["TMPDIR"] = f"{self.directory}/tmp"
        os.environ.update({MARK: self.mark, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                           "ACCELERATE_USE_CPU": "true"})
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False)
                                  for number in (1, 2))
        fault_case.run(self.launcher, self.faults, self.directory)
        atexit._run_exitfuncs()  # a notebook's process would; a forked one does not

    @property
    def over(self) -> bool:
        """Whether it ended, or took too long; when the fault is over the next launch begins."""
        limit = self.limit * (2 if os.path.exists(f"{self.directory}/ended") else 1)
        return not self.process.is_alive() or time.monotonic() - self.began > limit

    def finish(self) -> dict:
        """fault -> row; ends what still runs, as a student would by restarting the kernel."""
        hung = self.process.is_alive()
        self.process.kill()
        self.process.join()
        leaks.until(lambda: not self._orphans(), 3)
        rows, orphans = self._rows(), self._orphans()
        files = [path.name for path in Path(self.directory, "tmp").glob("*")
                 if not path.name.startswith("torchinductor_")]
        for fault in self.faults:
            row = rows.setdefault(fault.name, {
                "named": False, "in_time": False, "seconds": None if hung else 0.0, "left": [],
                "next": False})
            row["left"] += [f"{len(orphans)} orphans"] * bool(orphans)
            row["left"] += sorted(files)
            row["survived"] = row["named"] and row["in_time"] and not row["left"] and row["next"]
        for orphan in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)
        return rows

    def _rows(self) -> dict:
        written = Path(self.directory, "rows")
        lines = written.read_text().splitlines() if written.exists() else []
        return {row.pop("fault"): row for row in map(json.loads, lines)}

    def _orphans(self) -> list:
        """Processes of the case that still run: of its session, or with its mark."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes()
                ours = (f"{MARK}={self.mark}".encode() in environment
                        or os.getsid(process.pid) == self.process.pid)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found


def run(arguments) -> dict:
    """Rows by fault and launcher; survived and total by launcher."""
    from faults.table import FAULTS

    from _bench import fault_case

    faults = FAULTS[:arguments.rounds]
    shared = leaks.shared_memory()
    cases = [Case(fault_case.ours, faults, 600.0)]
    cases += [Case(peer, [fault], LIMIT) for fault in faults if fault.peers
              for peer in fault_case.PEERS]
    rows = {fault.name: {} for fault in faults}
    for case, by_fault in _all(cases):
        for name, row in by_fault.items():
            rows[name][case.launcher.__name__] = row
    names = [fault_case.ours.__name__, *(peer.__name__ for peer in fault_case.PEERS)]
    return {**{name: _score(rows, name) for name in names}, "rows": rows,
            "shared_memory_left": sorted(leaks.shared_memory() - shared)}


def _score(rows, launcher) -> dict:
    mine = [row[launcher] for row in rows.values() if launcher in row]
    counts = {key: sum(bool(row[key]) for row in mine)
              for key in ("survived", "named", "in_time", "next")}
    return {**counts, "nothing_left": sum(not row["left"] for row in mine), "total": len(mine)}


def _all(cases):
    """(case, its rows) of every case as it ends; some run at a time."""
    waiting, running, ended = list(cases), [], 0
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(waiting.pop(0))
                running[-1].start()
            for case in [case for case in running if case.over]:
                running.remove(case)
                ended += 1
                say(f"{ended} of {len(cases)}: {case.launcher.__name__}, {case.faults[0].name}")
                yield case, case.finish()
            time.sleep(0.1)
    finally:
        for case in running:
            case.finish()
        done()


def table(result) -> str:
    """The result for a terminal."""
    names = [name for name in result if isinstance(result[name], dict) and "total" in result[name]]
    lines = ["yes: the student reads the cause in time, nothing is left, the next launch works.",
             "Otherwise what was wrong: no cause; late; left: processes, files, a signal handler;",
             "no next launch; never ends: not in 60 s. -: this launcher has no such feature.",
             f"{'':40s}" + "".join(f"{name:>28s}" for name in names)]
    for fault, row in result["rows"].items():
        lines.append(f"{fault:40s}" + "".join(f"{_cell(row.get(name)):>28s}" for name in names))
    for key, title in (("named", "cause named"), ("in_time", "in time"), ("next", "next works"),
                       ("nothing_left", "nothing left"), ("survived", "all four: survived")):
        lines.append(f"{title:40s}" + "".join(
            f"{result[name][key]:>17d} of {result[name]['total']:>2d}     " for name in names))
    return "\n".join(lines)


def _cell(row) -> str:
    if row is None:
        return "-"
    if row["survived"]:
        return f"yes {row['seconds']:.1f} s"
    wrong = [word for word, is_wrong in (
        ("no cause", not row["named"]), ("late", not row["in_time"]), ("left", row["left"]),
        ("no next", not row["next"])) if is_wrong]
    if row["seconds"] is None:
        return "never ends" + ", left" * bool(row["left"])
    return f"{', '.join(wrong)}  {row['seconds']:.1f} s"
