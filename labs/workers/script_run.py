"""`python solutions/02_manual_ddp.py`: what a reader of a notebook sees around its results. Prints
how long it will take, the headings, and at the end what passed. `labs.lazy_exports` begins it."""

import atexit
import json
import re
import sys
import threading
import time
from pathlib import Path

from labs.words import counted, listed
from labs.workers import progress
from labs.workers.other_load import name_load

_ROOT = Path(__file__).resolve().parents[2]
_SOLUTION = re.compile(r"\d\d[a-z]?_\w+\.py")
_HEADING = re.compile(r"# (#{1,3} .+)")
_SIGNS = {True: "passed", False: "failed", None: "waiting"}
_run: "ScriptRun | None" = None


def begin_if_script(main) -> None:
    """Begins, once, where `main`, the module __main__, is a solution that runs as a script."""
    path = getattr(main, "__file__", None)
    if _run or not path or "IPython" in sys.modules or not _SOLUTION.fullmatch(Path(path).name):
        return
    if Path(path).resolve().parent == _ROOT / "solutions":
        begin(Path(path))


def begin(path: Path) -> None:
    """Prints the title and what the run will take; from now on what is printed has its headings."""
    global _run
    _run = ScriptRun(path)
    print(_run.announcement(), flush=True)
    name_load(measured=False)
    sys.stdout = _Headed(sys.stdout, _run)
    progress.before.append(_run.print_headings)
    atexit.register(_run.end)


def note(check: str, exercise: str, passed: bool | None) -> None:
    """Keeps what a check said last."""
    if _run:
        _run.verdicts[check] = exercise, passed


def reference_seconds(name: str, root: Path = _ROOT) -> dict[str, float]:
    """Machine -> seconds of all cells of a notebook in its committed reference run."""
    found = {}
    for path in sorted((root / "experiments" / "reference").glob("*/results.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        for one in run.get("notebooks", ()):
            if one["name"] == name and one["outcome"] == "passed":
                found[run["machine"]["title"]] = one["seconds"]
    return found


class ScriptRun:
    """One run of a solution. verdicts: name of a check -> (exercise, whether it passed)."""

    def __init__(self, path: Path):
        self.path, self.verdicts, self._began = path, {}, time.monotonic()
        # not sys.stdout: a check replaces it while it runs, and cuts what is written
        self.stream = sys.stdout
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        self._headings = [(line, found[1]) for line, text in lines
                          if (found := _HEADING.match(text))]
        self._printed = 0  # headings that are behind us

    def announcement(self) -> str:
        """The title, and the minutes that reference runs took."""
        title = self._headings[0][1].lstrip("# ") if self._headings else self.path.stem
        self._printed = 1
        took = [f"{seconds / 60:.1f} minutes on {machine}" for machine, seconds
                in reference_seconds(self.path.stem).items()]
        return (f"{title}: " + (f"the reference run took {listed(took)}" if took else
                                "how long it takes is not yet measured"))

    def print_headings(self) -> None:
        """Prints the section's heading and the exercise's, where they have not been printed."""
        line = self._line()
        behind = [text for at, text in self._headings[self._printed:] if at <= line]
        self._printed += len(behind)
        # of sections that print nothing, no headings
        section = max((i for i, text in enumerate(behind) if text.startswith("## ")), default=0)
        exercise = [text for text in behind[section + 1:] if text.startswith("### ")][-1:]
        for text in [*behind[section:section + 1], *exercise]:
            self.stream.write(f"\n{text}\n")

    def _line(self) -> int:
        """The line of the script that runs now; 0 where it has ended."""
        frame = sys._current_frames().get(threading.main_thread().ident)
        while frame and frame.f_code.co_filename != str(self.path):
            frame = frame.f_back
        while frame and frame.f_back and frame.f_back.f_code.co_filename == str(self.path):
            frame = frame.f_back
        return frame.f_lineno if frame else 0

    def end(self) -> None:
        """Prints what passed, how long it took, and where it ended too early."""
        lines = [f"\n## Summary of {self.path.name}"]
        for passed, word in _SIGNS.items():
            of = [exercise for exercise, found in self.verdicts.values() if found is passed]
            if of:
                exercises = sorted(set(of), key=_by_number)
                lines.append(f"{counted(len(of), 'check')} {word}: {listed(exercises)}")
        if error := getattr(sys, "last_value", None):  # which Python has printed
            lines.append(f"It ended too early, with {type(error).__name__}.")
        lines.append(f"{(time.monotonic() - self._began) / 60:.1f} minutes")
        print("\n".join(lines), file=self.stream, flush=True)


def _by_number(exercise) -> list:
    return [int(part) if part.isdigit() else part for part in re.findall(r"\d+|\D+", exercise)]


class _Headed:
    """Standard output that prints the headings of what is printed."""

    def __init__(self, stream, run):
        self._stream, self._run = stream, run

    def write(self, text: str) -> int:
        if text.strip():
            self._run.print_headings()
        return self._stream.write(text)

    def __getattr__(self, name):
        return getattr(self._stream, name)
