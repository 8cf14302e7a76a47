"""Run the workbook's tests in stages and add up their results: scripts/test."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from _test_options import ALL_MINUTES, FAST_MINUTES, check

ROOT = Path(__file__).resolve().parent.parent
NBVAL = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=120",
         "--nbval-sanitize-with=tests/nbval_sanitize.cfg", "-p", "untouched"]
NOTEBOOK_FOLDERS = ["notebooks", "solutions"]
NOTHING_SELECTED = 5  # pytest's exit code
FEW_FILES = 5  # more are no accident
# Tests wait for ranks, kernels and hangs, too: three at a time keep two cores busy.
AT_ONCE = str(max(3, min(8, (os.cpu_count() or 2) // 2)))
COUNTED = ("tests", "failures", "errors", "skipped")
# The browser test that runs a student notebook untouched, and judges each cell as nbval's plugin.
IN_BROWSER = re.compile(r"test_an_untouched_notebook_runs_and_is_shown_well\[(\w+)\]")


@dataclass
class Result:
    """What one stage counted, and how long it took."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""
    in_browser: set = field(default_factory=set)  # names of notebooks
    failures: set = field(default_factory=set)  # file::name of the tests that failed at first
    recovered: set = field(default_factory=set)  # those that passed alone

    def counts(self):
        """Return the line that all stages and the summary share."""
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def is_notebook(path):
    """Return whether a path goes to nbval: a notebook, or a folder of them."""
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
    """Run pytest in a process of its own and count what its report says. In a whole run, tests of a
    few files that fail are run once more when the others have ended: of files, because one launch
    may serve many tests of a file."""
    result = pytest_once(name, paths, options, [*arguments, *at_once(options, arguments)])
    files = {test.split("::")[0] for test in result.failures}
    named = len(result.failures) == result.failed and all(map(os.path.exists, files))
    if is_whole(options) and named and 0 < len(files) <= FEW_FILES:
        return second_attempt(result, name, options, arguments)
    return result


def second_attempt(result, name, options, arguments):
    """Run alone what failed; what passes then is named in the summary, and counts as passed.

    Tests beside each other take memory and processor time away from each other, and a crash of
    torch's or gloo's own comes once in thousands of runs. What is wrong fails twice.
    """
    print(f"\n=== {name}, once more and alone: {', '.join(sorted(result.failures))}", flush=True)
    files = sorted({test.split("::")[0] for test in result.failures})
    cells = is_notebook(files[0])  # a cell needs those above it
    again = pytest_once(name, files, options, arguments + ([] if cells else ["--last-failed"]))
    recovered = set() if again.note else result.failures - again.failures
    result.passed, result.failed = result.passed + len(recovered), result.failed - len(recovered)
    result.recovered = recovered
    result.in_browser |= again.in_browser
    result.note = result.note or again.note
    return result


def pytest_once(name, paths, options, arguments):
    """Run pytest and return what its report says."""
    select = ["-k", options.k] if options.k else []
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        # only the older kind of report names each test's file
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "-o",
                   "junit_family=xunit1", "-c", "pyproject.toml"]
        command += [*arguments, *select, *options.extra, *paths]
        code = subprocess.run(command, env=environment("untouched" in arguments)).returncode
        result = count(name, report)
        result.in_browser = passed_in_browser(report)
        result.failures = failures(report)
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


def count(name, report):
    """Read pytest's own report; errors count as failures."""
    if not os.path.exists(report):
        return Result(name)
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    totals = [{key: int(suite.get(key, 0)) for key in COUNTED} for suite in suites]
    tests, failures, errors, skipped = (sum(total[key] for total in totals) for key in COUNTED)
    failed = failures + errors
    return Result(name, passed=max(tests - failed - skipped, 0), failed=failed, skipped=skipped)


def cases(report):
    """Return the elements of a report that stand for tests."""
    if not os.path.exists(report):
        return []
    return list(ElementTree.parse(report).getroot().iter("testcase"))


def failures(report):
    """Return file::name of the tests that failed."""
    failed = [case for case in cases(report)
              if case.find("failure") is not None or case.find("error") is not None]
    return {f"{case.get('file') or case.get('classname')}::{case.get('name')}" for case in failed}


def passed_in_browser(report):
    """Return the names of the student notebooks that the browser test has run, without a fault."""
    # what else happened to a test is an element inside its own
    passed = [case.get("name") for case in cases(report) if not len(case)]
    return {found[1] for found in map(IN_BROWSER.fullmatch, passed) if found}


def notebooks_for_nbval(in_browser):
    """Return what nbval runs in a whole run: all notebooks but those untouched ones that have run
    in the browser. To run one of them again would take half a minute of a core, and show no more.
    """
    students = sorted((ROOT / NOTEBOOK_FOLDERS[0]).glob("*.ipynb"))
    rest = [path for path in students if path.stem not in in_browser]
    return [*(os.path.relpath(path, ROOT) for path in rest), *NOTEBOOK_FOLDERS[1:]]


def nothing_selected(paths, options):
    """Return the sentence for a selection that no test matches."""
    what = " ".join([*paths, *(["-k", options.k] if options.k else [])])
    hint = " (slow and browser tests are left out by --fast)" if options.fast else ""
    return f"No test is selected by {what}{hint}: check the path and the expression."


def is_whole(options):
    """Return whether everything runs, or everything that is fast: several at a time."""
    return not (options.paths or options.k or options.extra)


def at_once(options, arguments):
    """Return the options of a parallel run, none for a part; a file's tests run in one process."""
    scope = "loadscope" if "untouched" in arguments else "loadfile"  # a notebook is one scope
    return ["-n", AT_ONCE, "--dist", scope, "--durations=12"] if is_whole(options) else []


def stages(options):
    """Yield the results of the stages that were asked for, one after the other."""
    everything = not options.paths and not options.k
    if everything:
        lint = [sys.executable, "-m", "ruff", "check", "labs", "scripts", "solutions", "tests"]
        yield timed("lint (ruff)", command_stage, lint)
        build = ["scripts/build", "--check"]
        yield timed("generated notebooks are current", command_stage, build)
    marks = ["-m", "not slow and not browser"] if options.fast else []
    tests, in_browser = [path for path in options.paths if not is_notebook(path)], set()
    if tests or not options.paths:
        where = tests or ["tests"]
        result = timed("Python tests (pytest)", pytest_stage, where, options,
                       # tests/conftest.py says which files come first
                       # each of pytest's processes would import nbval, and Jupyter's client with it
                       [*marks, "--no-loadscope-reorder", "-p", "no:nbval"])
        in_browser = result.in_browser
        yield result
    notebooks = [path for path in options.paths if is_notebook(path)]
    if everything and not options.fast:
        notebooks = notebooks_for_nbval(in_browser)
        if in_browser:
            print("\nRun untouched in the browser, and judged as by nbval, so not run again: "
                  f"{', '.join(sorted(in_browser))}", flush=True)
    if notebooks:
        yield timed("notebooks (nbval)", pytest_stage, notebooks, options, NBVAL)


def summarize(results):
    """Print one line per stage and the totals; return the exit code."""
    print("\n=== summary")
    for result in results:
        print(f"{result.seconds:6.0f} s  {result.name}: {result.counts()}")
    for note in [result.note for result in results if result.note]:
        print(note)
    if recovered := sorted({test for result in results for test in result.recovered}):
        print("failed beside others and passed alone (why they failed is above): "
              + ", ".join(recovered))
    total = Result("all")
    for word in ("passed", "failed", "skipped", "seconds"):
        setattr(total, word, sum(getattr(result, word) for result in results))
    print(f"{total.seconds:6.0f} s  in all")
    print(total.counts(), flush=True)
    return 1 if total.failed else 0


def announce(options):
    """Print how long a whole run takes; of a part nothing is known."""
    if is_whole(options):
        minutes = FAST_MINUTES if options.fast else ALL_MINUTES
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
    return summarize(list(stages(options)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
