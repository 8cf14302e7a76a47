"""How long each test took in the last run of everything: tests/durations.json, which
`scripts/test --all` renews and from which the gate is chosen (tests/gate.py)."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

PATH = Path(__file__).resolve().parent.parent / "tests" / "durations.json"
CELLS = "all cells"  # of a notebook
LEAST = 0.1  # seconds; shorter ones are not listed


def of_report(report):
    """Return the seconds of each test in one of pytest's reports (of the older kind, which names
    files), by its node ID, with what its fixtures took; of a notebook, those of all its cells."""
    seconds = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.get("file"):
            seconds[_node_id(case)] += float(case.get("time", 0))
    return seconds


def _node_id(case):
    file = case.get("file")
    if not file.endswith(".py"):
        return whole(file)
    within = case.get("classname", "")[len(file) - len(".py") + 1:]  # dots for slashes: as long
    return "::".join(filter(None, [file, *within.split("."), case.get("name")]))


def whole(notebook):
    """Return what stands for all cells of a notebook, in the place of a test's node ID."""
    return f"{notebook}::{CELLS}"


def write(seconds, path=PATH):
    """Write what took long, by file: {file: {test: seconds}}."""
    by_file = {}
    for test in sorted(test for test, took in seconds.items() if took >= LEAST):
        file, _, name = test.partition("::")
        by_file.setdefault(file, {})[name] = round(seconds[test], 1)
    path.write_text(json.dumps(by_file, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def read(path=PATH):
    """Return the seconds of each test that took long, by its node ID."""
    by_file = json.loads(path.read_text(encoding="utf-8"))
    return {f"{file}::{name}": took for file, tests in by_file.items()
            for name, took in tests.items()}


if __name__ == "__main__":
    write({test: took for report in sys.argv[1:] for test, took in of_report(report).items()})
