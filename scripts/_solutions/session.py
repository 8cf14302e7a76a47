"""Runs the notebooks one after the other within minutes and dollars, and keeps what was found."""

import json
import math
import os
import sys
import time
from pathlib import Path

import _notebooks
from _preflight import table
from _unattended import machine, reference, runner
from _unattended.folder import results_folder
from _unattended.host_memory import Growth
from _unattended.runner import INTERRUPTED, PASSED, SKIPPED

from _solutions import reference_run, report, results
from labs.words import counted

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # that a notebook takes, where no earlier run tells
LAST_SECONDS = 20  # kept for the report


def run(options, root: Path = ROOT) -> int:
    """Runs what was asked for; returns the exit code."""
    notebooks = chosen(options.only, root)
    if isinstance(notebooks, str):
        print(notebooks, file=sys.stderr)
        return 2
    rows = [] if options.no_preflight else table.run(False, False, sys.stdout)
    if any(row["status"] == "STOP" for row in rows):
        return 1
    found = machine.asked()
    out = results_folder(options.resume or options.out, found, root)
    session = Session(options, notebooks, out, results.header(found, root, rows, options), root)
    _choose_sizes(options)
    print(f"\n{counted(len(notebooks), 'notebook')}. Results: {out}", flush=True)
    interrupted = session.run()
    session.write()
    print(f"\n{results.in_words(session.data)}\n{out / 'report.html'}", flush=True)
    bad = any(one["outcome"] != PASSED for one in session.data["notebooks"])
    if options.reference:
        print(reference_run.keep(session.data, out, root))
    return 130 if interrupted else int(bad)


def _choose_sizes(options):
    """For the kernels, which inherit this process's variables."""
    for name, value in (("WORKBOOK_PRESET", options.preset), ("WORKBOOK_RANKS", options.ranks)):
        if value:
            os.environ[name] = str(value)


def chosen(only: list[str] | None, root: Path) -> list[Path] | str:
    """The notebooks with these numbers, or a sentence that names one that there is not."""
    found = {path.stem: path for path in _notebooks.paths(root / "solutions", ".ipynb")}
    names = [] if only else list(found)
    for number in only or ():
        names += (matching := _notebooks.chosen(number, found))
        if not matching:
            return (f"There is no notebook {number}: choose from "
                    f"{', '.join(map(_notebooks.number, found))}.")
    return [found[name] for name in dict.fromkeys(names)]


class Session:
    """One run. data: what results.json holds."""

    def __init__(self, options, notebooks, out, header, root=ROOT):
        self._options, self._notebooks, self._out, self._root = options, notebooks, out, root
        self._began = time.monotonic()
        earlier = results.read(out / "results.json") if options.resume else {}
        header = results.resumed(header, earlier)
        self._spent = results.dollars_of_runs(header["runs"])
        self._last = results.last_seconds(root, header["machine"])
        self._reference = reference.of_run(header, root)
        self.data = header | {"notebooks": [self._before(path, earlier) for path in notebooks]}

    def _before(self, path, earlier) -> dict:
        kept = [one for one in earlier.get("notebooks", ())
                if one["name"] == path.stem and one["outcome"] == PASSED]
        return kept[0] if kept else {"name": path.stem, "outcome": SKIPPED, "seconds": 0.0,
                                     "why": "not begun"}

    def run(self) -> bool:
        """Runs all that has not passed before; returns whether it was interrupted. The report is
        written after each, so that a machine that is taken back leaves what there was."""
        for number, path in enumerate(self._notebooks):
            if self.data["notebooks"][number]["outcome"] == PASSED:
                print(f"kept      {path.stem}: passed before", flush=True)
                continue
            try:
                found = self._one(number, path)
            except KeyboardInterrupt:
                self.data["notebooks"][number] = self._ended(path, runner.Result(
                    path.stem, INTERRUPTED, why="interrupted"))
                return True
            self.data["notebooks"][number] = found
            why = f": {found['why']}" if found["why"] else ""
            clear = "\r\x1b[K" * sys.stdout.isatty()
            print(f"{clear}{found['outcome']:10s}{path.stem}  {found['seconds']:.0f} s{why}",
                  flush=True)
            self.write()
        return False

    def _one(self, number, path) -> dict:
        usual, left = self._last.get(path.stem, SECONDS), self._seconds_left()
        if left < usual:
            limit = "dollars" if self._by_budget() else "minutes"
            return self._ended(path, runner.Result(
                path.stem, SKIPPED, why=f"takes about {usual / 60:.1f} minutes, for which the "
                                        f"{limit} that are left are not enough"))
        command = [sys.executable, "-P", "-m", "_solutions.execute", str(path), str(self._out),
                   str(60 * self._options.cell_minutes)]
        for name in (f"{path.stem}.json", f"{path.stem}.records.jsonl"):
            (self._out / name).unlink(missing_ok=True)  # of an earlier run
        growth, show = Growth(), self._tick(number, path)

        def tick(elapsed):
            growth.look()
            show(elapsed)

        result = runner.run(path.stem, command, self._out / f"{path.stem}.log", min(left, 1e6),
                            self._root, tick)
        return self._ended(path, result) | {"host_bytes": growth.most}

    def _tick(self, number, path):
        """Shows the cell that runs, and what is left by last time's measure."""
        after = sum(self._last.get(later.stem, SECONDS) for later in self._notebooks[number + 1:])
        usual = self._last.get(path.stem, SECONDS)

        def tick(elapsed):
            if sys.stdout.isatty():
                state = results.read(self._out / f"{path.stem}.json")
                left = max(0, usual - elapsed) + after
                print(f"\r\x1b[K[{number + 1} of {len(self._notebooks)}] {path.stem}: cell "
                      f"{state.get('running', 0)} of {state.get('cells', '?')}, {elapsed:.0f} s; "
                      f"about {left / 60:.0f} minutes left", end="", flush=True)

        if not sys.stdout.isatty():
            print(f"[{number + 1} of {len(self._notebooks)}] {path.stem}", flush=True)
        return tick

    def _ended(self, path, result) -> dict:
        return results.of_notebook(path.stem, result, self._out)

    def _seconds_left(self) -> float:
        return self._began + self._allowed() - time.monotonic() - LAST_SECONDS

    def _allowed(self) -> float:
        return min(60 * (self._options.minutes or math.inf), self._paid())

    def _paid(self) -> float:
        """Seconds of this run that the budget pays for, after the runs before."""
        if not self._options.budget:
            return math.inf
        return 3600 * (self._options.budget - self._spent) / self._options.dollars_per_hour

    def _by_budget(self) -> bool:
        return self._paid() == self._allowed()

    def write(self) -> None:
        """Writes results.json and report.html."""
        self.data["seconds"] = round(time.monotonic() - self._began, 1)
        (self._out / "results.json").write_text(json.dumps(self.data, indent=1,
                                                           ensure_ascii=False) + "\n")
        page = report.page(self.data, self._out, self._reference)
        (self._out / "report.html").write_text(page)
