"""The two runners of notebooks (tests/untouched.py): both are red where a reader sees an error."""

import re
import subprocess
import sys

import _test_run as runner
import nbformat
import pytest
import untouched

FOLDERS = ("notebooks", "solutions")  # under nbclient, under nbval
CELLS = {"good": "1 + 1", "unknown_magic": "%nomagic", "unknown_cell_magic": "%%nomagic\n1",
         "error": "1 / 0"}
ONLY_UNTOUCHED = {"warning": "import sys; print('a warning', file=sys.stderr)",
                  "dead_kernel": "import os; os._exit(1)"}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What pytest says of notebooks with one cell each, run as scripts/test runs them."""
    root = tmp_path_factory.mktemp("workbook")
    for folder in FOLDERS:
        (root / folder).mkdir()
        cells = CELLS | (ONLY_UNTOUCHED if folder == "notebooks" else {})
        for name, source in cells.items():
            cells = [nbformat.v4.new_code_cell(source), nbformat.v4.new_code_cell("2")]
            nbformat.write(nbformat.v4.new_notebook(cells=cells),
                           root / folder / f"{folder}_{name}.ipynb")  # pytest names only the file
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-c", "pyproject.toml", *runner.NBVAL,
               root / "notebooks", root / "solutions"]
    return subprocess.run(command, cwd=runner.ROOT, env=runner.environment(True), text=True,
                          capture_output=True, timeout=300).stdout


def outcomes(report, folder):
    """Name of the notebook -> whether its first cell, or all of it, passed."""
    found = re.findall(rf"^(PASSED|FAILED) \S*{folder}_(\w+)\.ipynb::(?:untouched|Cell 0)",
                       report, re.MULTILINE)
    return {name: outcome == "PASSED" for outcome, name in found}


@pytest.mark.slow
@pytest.mark.gate
def test_both_runners_reject_what_a_reader_would_see_as_an_error(report):
    assert outcomes(report, "solutions") == {name: name == "good" for name in CELLS}
    assert outcomes(report, "notebooks") == {
        name: name == "good" for name in {**CELLS, **ONLY_UNTOUCHED}}


@pytest.mark.slow
@pytest.mark.gate
def test_the_reason_is_named(report):
    for said in ("nomagic", "ZeroDivisionError", "a warning", "DeadKernelError"):
        assert said in report


@pytest.mark.parametrize("deaths", [0, 1, 2, 3])
def test_a_kernel_that_dies_before_its_first_cell_is_started_again(deaths):
    """Of three starts one must live; what else goes wrong is not tried again."""
    started = []

    def start(name):
        started.append(name)
        if len(started) <= deaths:
            raise RuntimeError(f"{untouched.DIED} to kernel_info")
        return "kernel"

    again = untouched.started_again(start)
    if deaths == untouched.STARTS:
        with pytest.raises(RuntimeError, match=untouched.DIED):
            again("python3")
    else:
        assert again("python3") == "kernel"
    assert len(started) == min(deaths + 1, untouched.STARTS)


def test_another_error_of_a_start_is_not_tried_again():
    def start():
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        untouched.started_again(start)()
