"""Run the workbook's tests in stages and add up their results: scripts/test."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import _test_durations
import _test_reach
import psutil
from _test_options import ALL_MINUTES, FAST_MINUTES, GATE_MINUTES, check

ROOT = Path(__file__).resolve().parent.parent
# Solutions; tests/untouched.py runs the untouched ones, by nbclient.
NBVAL = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=300",
         "--nbval-sanitize-with=tests/nbval_sanitize.cfg", "-p", "untouched"]
NOTEBOOK_FOLDERS = ["notebooks", "solutions"]
NOTHING_SELECTED = 5  # pytest's exit code
TWICE = 3  # tests that may fail at first; more are no accident
# Tests wait for ranks, kernels and hangs, too: three at a time keep two cores busy.
AT_ONCE = str(max(3, min(8, (os.cpu_count() or 2) // 2)))


@dataclass
class Result:
    """What one stage counted, and how long it took."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""
    recovered: dict = field(default_factory=dict)  # what passed the second time: why not at once
    durations: dict = field(default_factory=dict)  # seconds of each test

    def counts(self):
        """Return the line that all stages and the summary share."""
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def is_notebook(path):
    """Return whether a path goes to the runners of notebooks: one, or a folder of them."""
    file = Path(path.split("::")[0]).resolve()
    return file.suffix == ".ipynb" or file in [ROOT / name for name in NOTEBOOK_FOLDERS]


def timed(name, run, *arguments):
    """Announce a stage, run it, and return its Result with the time it took."""
    print(f"\n=== {name}", flush=True)
    start = time.monotonic()
    result = run(name, *arguments)
    result.seconds = time.monotonic() - start
    print(f"=== {name}: {result.counts()} in {result.seconds:.0f} s", flush=True)
    return result


def end_descendants():
    """End all processes that were started from here: kernels and ranks are no children of pytest's
    group, so a signal to that group would miss them."""
    below = psutil.Process().children(recursive=True)
    for ask in (psutil.Process.terminate, psutil.Process.kill):
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                ask(process)
        _, below = psutil.wait_procs(below, timeout=3)


def on_end_signal(number, _):
    """Take the tests along when this process is asked to end; a shell reports 128 + the signal."""
    end_descendants()
    print(f"\nThe tests were ended by {signal.Signals(number).name}.", flush=True)
    os._exit(128 + number)


def command_stage(name, command):
    """Run a command that counts as one test."""
    code = subprocess.run(command).returncode
    return Result(name, passed=int(code == 0), failed=int(code != 0))


def pytest_stage(name, paths, options, arguments):
    """Run pytest in a process of its own and return what its report says."""
    select = ["-k", options.k] if options.k else []
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        # only the older kind of report names each test's file
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-o",
                   "junit_family=xunit1", "-c", "pyproject.toml"]
        command += [*arguments, *at_once(options, arguments), *select, *options.extra, *paths]
        code = subprocess.run(command, env=environment("untouched" in arguments)).returncode
        result = read_report(name, report)
    if code == NOTHING_SELECTED:
        result.note = nothing_selected(paths, options)
    elif code and not result.failed:
        result.note = f"{name}: pytest ended with exit code {code}; what it says is above."
    result.failed += bool(result.note)
    return result


def environment(plugins):
    """Return pytest's environment; with plugins it finds those in tests/, and no progress shows."""
    # Several run at a time: torch's further threads would only wait for each other, and computing.
    found = {**os.environ, "OMP_NUM_THREADS": "1"}
    if plugins:
        path = [str(ROOT / "tests"), str(ROOT / "tests" / "fewer"), found.get("PYTHONPATH")]
        # A line of progress, emptied, would be one more output than the solution has.
        found.update(PYTHONPATH=os.pathsep.join(filter(None, path)), WORKBOOK_PROGRESS="0")
    return found


def read_report(name, report):
    """Read pytest's own report; errors count as failures, what was tried again as one test."""
    result = Result(name)
    if not os.path.exists(report):
        return result
    outcomes, again = {}, {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        outcomes[test] = "failed" if has(case, "failure", "error") else (
            "skipped" if has(case, "skipped") else "passed")  # the last attempt's
        # tests/conftest.py notes it, for scripts/test to name it
        again.update({f"{case.get('file')}::{case.get('name')}": (test, each.get("value"))
                      for each in case.iter("property") if each.get("name") == "first failure"})
    totals = Counter(outcomes.values())
    result.passed, result.failed, result.skipped = (
        totals[outcome] for outcome in ("passed", "failed", "skipped"))
    result.recovered = {shown: why for shown, (test, why) in again.items()
                        if outcomes[test] == "passed"}
    result.durations = _test_durations.of_report(report)
    return result


def has(case, *outcomes):
    """Return whether a report says one of these of a test."""
    return any(case.find(outcome) is not None for outcome in outcomes)


def all_notebooks():
    """Return all notebooks, solutions and untouched ones, the longest first."""
    paths = [path for name in NOTEBOOK_FOLDERS for path in sorted((ROOT / name).glob("*.ipynb"))]
    names, seconds = [path.relative_to(ROOT).as_posix() for path in paths], _test_durations.read()
    return sorted(names, key=lambda name: -seconds.get(_test_durations.whole(name), 0.0))


def nothing_selected(paths, options):
    """Return the sentence for a selection that no test matches."""
    what = " ".join([*paths, *(["-k", options.k] if options.k else [])])
    hint = " (slow and browser tests are left out by --fast)" if options.fast else ""
    return f"No test is selected by {what}{hint}: check the path and the expression."


def is_whole(options):
    """Return whether no part was asked for: then several tests run at a time."""
    return not (options.paths or options.k or options.extra)


def is_gate(options):
    """Return whether tests are chosen by tests/gate.py."""
    return not (options.paths or options.k or options.all or options.fast)


def at_once(options, arguments):
    """Return the options of a parallel run, none for a part; a file's tests run in one process."""
    if not is_whole(options):
        return []
    if "untouched" in arguments:  # a notebook is one scope, and a cell needs those above it
        return ["-n", AT_ONCE, "--dist", "loadscope", "--no-loadscope-reorder", "--durations=12"]
    return ["-n", AT_ONCE, "--dist", "loadfile", "--durations=12",
            "--reruns=1", f"--max-suite-reruns={TWICE}"]


def chosen(options):
    """Return the options for tests/conftest.py that choose among all tests."""
    marks = ["-m", "not slow and not browser"] if options.fast else []
    gate = ["--gate"] if is_gate(options) else []
    reached = _test_reach.tests_reached(options.since) if options.since else []
    return [*marks, *gate, *(f"--whole={path}" for path in reached)]


def stages(options):
    """Yield the results of the stages that were asked for, one after the other."""
    everything = not options.paths and not options.k
    if everything:
        lint = [sys.executable, "-m", "ruff", "check", "labs", "scripts", "solutions", "tests"]
        yield timed("lint (ruff)", command_stage, lint)
        build = ["scripts/build", "--check"]
        yield timed("generated notebooks are current", command_stage, build)
    tests = [path for path in options.paths if not is_notebook(path)]
    if tests or not options.paths:
        where = tests or ["tests"]
        yield timed("Python tests (pytest)", pytest_stage, where, options,
                    # tests/conftest.py says which files come first
                    # each of pytest's processes would import nbval, and Jupyter's client with it
                    [*chosen(options), "--no-loadscope-reorder", "-p", "no:nbval"])
    notebooks = [path for path in options.paths if is_notebook(path)]
    if everything and not options.fast:
        notebooks = all_notebooks()
    if notebooks:
        yield timed("notebooks (solutions by nbval, untouched ones by nbclient)", pytest_stage,
                    notebooks, options, NBVAL)


def summarize(results):
    """Print one line per stage and the totals; return the exit code."""
    print("\n=== summary")
    for result in results:
        print(f"{result.seconds:6.0f} s  {result.name}: {result.counts()}")
    for note in [result.note for result in results if result.note]:
        print(note)
    for test, why in sorted(pair for result in results for pair in result.recovered.items()):
        print(f"passed only the second time: {test}: {why}")
    total = Result("all")
    for word in ("passed", "failed", "skipped", "seconds"):
        setattr(total, word, sum(getattr(result, word) for result in results))
    print(f"{total.seconds:6.0f} s  in all")
    print(total.counts(), flush=True)
    return 1 if total.failed else 0


def announce(options):
    """Print how long a whole run takes; of a part nothing is known."""
    if is_whole(options):
        minutes = (FAST_MINUTES if options.fast else ALL_MINUTES if options.all else GATE_MINUTES)
        print(f"All stages together take about {minutes} minutes on 2 cores.", flush=True)


def main(arguments):
    """Run what the command line asks for; return the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_end_signal)
    # A job that a script's `&` started ignores Ctrl-C, and so would all that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = check(arguments)
    options.paths = [os.path.relpath(path, ROOT) for path in options.paths]
    os.chdir(ROOT)
    announce(options)
    results = list(stages(options))
    if options.all and is_whole(options):
        _test_durations.write({k: v for result in results for k, v in result.durations.items()})
    return summarize(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
