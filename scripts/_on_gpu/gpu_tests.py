"""The tests marked gpu, from the files that have any: others may need what is not installed."""

import argparse
import os
import sys

from _on_gpu.parts import ROOT

REPEATED = ("test_gpu_faults", "test_bench_memory")  # what the parts "faults", "bench-memory" run
LONG = ("test_on_gpus", "test_node")  # every check of every solution; a billion parameters
FIRST = "00_start_here or card_is_found"  # of the long ones, with --small


def files(long: bool) -> list[str]:
    """Returns the test files with a test marked gpu: those that take minutes, or all others."""
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("test_*.py"))
            if "pytest.mark.gpu" in path.read_text() and path.stem not in REPEATED
            and (path.stem in LONG) == long]


def command(arguments: list) -> list[str]:
    """Returns pytest's command line."""
    parser = argparse.ArgumentParser(prog="python -m _on_gpu.gpu_tests", description=__doc__)
    parser.add_argument("out", help="the JUnit XML file to write")
    parser.add_argument("--long", action="store_true", help="those that take minutes")
    parser.add_argument("--small", action="store_true", help="few of them")
    options = parser.parse_args(arguments)
    chosen = ["-m", "gpu"]
    if options.small:
        chosen = ["-m", "gpu", "-k", FIRST] if options.long else ["-m", "gpu and not slow"]
    return [sys.executable, "-m", "pytest", "-c", "pyproject.toml", *chosen, "-v",
            "-p", "no:cacheprovider", "--continue-on-collection-errors",
            f"--junitxml={options.out}", *files(options.long)]


if __name__ == "__main__":
    os.chdir(ROOT)
    os.execv(sys.executable, command(sys.argv[1:]))
