"""Run the workbook's tests in stages and add up what they say: scripts/test."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NBVAL = ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=120",
         "--nbval-sanitize-with=tests/nbval_sanitize.cfg", "-p", "untouched"]
NOTEBOOK_FOLDERS = ["notebooks", "solutions"]
NOTHING_SELECTED = 5  # pytest's exit code
# Tests wait for ranks, kernels and hangs more than they compute: two or more at a time.
AT_ONCE = str(max(2, min(8, (os.cpu_count() or 2) // 2)))
COUNTED = ("tests", "failures", "errors", "skipped")

EPILOG = """\
examples:
  scripts/test                                  everything
  scripts/test --fast                           without slow and browser tests, without nbval
  scripts/test tests/test_launch.py -k hang     a part of the Python tests
  scripts/test notebooks/00_start_here.ipynb    one notebook, every cell executed (nbval)
  scripts/test tests -- -x --pdb                arguments for pytest come after --

environment:
  WORKBOOK_PEERS=0   do not install DeepSpeed, the library that tests compare with
"""


@dataclass
class Result:
    """What one stage counted, and how long it took."""

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""

    def counts(self):
        """Return the line that all stages and the summary share."""
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def options(arguments):
    """Return the parsed command line, with pytest's own arguments under `extra`."""
    before, extra = arguments, []
    if "--" in arguments:
        before, extra = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    parser = argparse.ArgumentParser(
        prog="scripts/test",
        description="Set up if needed, then run the tests in stages.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", help="tests, or notebooks, to run; default: all")
    parser.add_argument("--fast", action="store_true", help="no slow or browser tests, no nbval")
    parser.add_argument("-k", metavar="EXPR", help="only tests whose name matches (as in pytest)")
    chosen = parser.parse_intermixed_args(before)
    chosen.extra = extra
    return chosen


def is_notebook(path):
    """Return whether a path goes to nbval: a notebook, or a folder of them."""
    file = Path(path.split("::")[0]).resolve()
    return file.suffix == ".ipynb" or file in [ROOT / name for name in NOTEBOOK_FOLDERS]


def missing(paths):
    """Return the paths that do not exist."""
    return [path for path in paths if not Path(path.split("::")[0]).exists()]


def timed(name, run, *arguments):
    """Announce a stage, run it, and return its Result with the time it took."""
    print(f"\n=== {name}", flush=True)
    start = time.monotonic()
    result = run(name, *arguments)
    result.seconds = time.monotonic() - start
    print(f"=== {name}: {result.counts()} in {result.seconds:.0f} s", flush=True)
    return result


def command_stage(name, command):
    """Run a command that counts as one test."""
    code = subprocess.run(command).returncode
    return Result(name, passed=int(code == 0), failed=int(code != 0))


def pytest_stage(name, paths, chosen, arguments):
    """Run pytest in a process of its own and count what its report says."""
    select = ["-k", chosen.k] if chosen.k else []
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}"]
        command += ["-c", "pyproject.toml", *arguments, *select, *chosen.extra, *paths]
        code = subprocess.run(command, env=with_plugins() if "-p" in arguments else None).returncode
        result = count(name, report)
    if code == NOTHING_SELECTED:
        result.note = nothing_selected(paths, chosen)
    elif code and not result.failed:
        result.note = f"{name}: pytest ended with exit code {code}; what it says is above."
    result.failed += bool(result.note)
    return result


def with_plugins():
    """Return an environment in which pytest finds the plugins that lie in tests/."""
    path = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def count(name, report):
    """Read pytest's own report; errors count as failures."""
    if not os.path.exists(report):
        return Result(name)
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    totals = [{key: int(suite.get(key, 0)) for key in COUNTED} for suite in suites]
    tests, failures, errors, skipped = (sum(total[key] for total in totals) for key in COUNTED)
    failed = failures + errors
    return Result(name, passed=max(tests - failed - skipped, 0), failed=failed, skipped=skipped)


def nothing_selected(paths, chosen):
    """Return the sentence for a selection that no test matches."""
    what = " ".join([*paths, *(["-k", chosen.k] if chosen.k else [])])
    hint = " (slow and browser tests are left out by --fast)" if chosen.fast else ""
    return f"No test is selected by {what}{hint}: check the path and the expression."


def side_by_side(chosen, scope):
    """Return xdist's options for a whole run: the tests of a file, or a notebook, stay together."""
    selected = chosen.paths or chosen.k or chosen.extra
    return [] if selected else ["-n", AT_ONCE, "--dist", scope, "--durations=12"]


def stages(chosen):
    """Yield the results of the stages that were asked for, one after the other."""
    everything = not chosen.paths and not chosen.k
    if everything:
        lint = [sys.executable, "-m", "ruff", "check", "labs", "scripts", "tests"]
        yield timed("lint (ruff)", command_stage, lint)
        build = ["scripts/build", "--check"]
        yield timed("generated notebooks are current", command_stage, build)
    marks = ["-m", "not slow and not browser"] if chosen.fast else []
    tests = [path for path in chosen.paths if not is_notebook(path)]
    if tests or not chosen.paths:
        where = tests or ["tests"]
        yield timed("Python tests (pytest)", pytest_stage, where, chosen,
                    marks + side_by_side(chosen, "loadfile"))
    notebooks = [path for path in chosen.paths if is_notebook(path)]
    if everything and not chosen.fast:
        notebooks = NOTEBOOK_FOLDERS
    if notebooks:
        yield timed("notebooks (nbval)", pytest_stage, notebooks, chosen,
                    NBVAL + side_by_side(chosen, "loadscope"))


def summarize(results):
    """Print one line per stage and the totals; return the exit code."""
    print("\n=== summary")
    for result in results:
        print(f"{result.seconds:6.0f} s  {result.name}: {result.counts()}")
    for note in [result.note for result in results if result.note]:
        print(note)
    total = Result("all")
    for word in ("passed", "failed", "skipped", "seconds"):
        setattr(total, word, sum(getattr(result, word) for result in results))
    print(f"{total.seconds:6.0f} s  in all")
    print(total.counts(), flush=True)
    return 1 if total.failed else 0


def main(arguments):
    """Run what the command line asks for; return the exit code."""
    chosen = options(arguments)
    absent = missing(chosen.paths)
    if absent:
        print(f"There is no {', '.join(absent)} in {os.getcwd()}: check the path.")
        return 1
    chosen.paths = [os.path.relpath(path, ROOT) for path in chosen.paths]
    os.chdir(ROOT)
    return summarize(list(stages(chosen)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
