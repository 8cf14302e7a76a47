"""A cell that is run before those above it, that waits for an answer, or that is interrupted."""

import time
from pathlib import Path

import pytest
from notebook_kernel import Kernel

from labs.words import LINE

START = Path(__file__).resolve().parents[1] / "notebooks" / "00_start_here.ipynb"


def as_one_line(text):
    """Messages are broken between words, wherever these fall."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def kernel():
    """As after a restart: only what set-up loads into each kernel is there."""
    kernel = Kernel()
    yield kernel
    kernel.close()


@pytest.mark.parametrize("cell", ["lab.check_combine(combine)",
                                  "# the check\nrun = lab.show_ranks(\n    combine)",
                                  "x = 3\nlabs.guess('0.1', 'the mean', x)", "launch(hello)",
                                  "class Mine(lab.Wrapper):\n    pass"])
def test_after_a_restart_a_cell_of_ours_says_to_run_those_above(kernel, cell):
    shown, error = kernel.run(cell)
    assert "NameError" in error and "Run the cells above this one first" in error


@pytest.mark.parametrize("cell", ["print(combine)", "def f():\n    return helper(x)\nf()",
                                  "def lab_(x): helper(x)\nlab_(1)"])
def test_a_slip_of_the_students_own_is_shown_as_ever(kernel, cell):
    shown, error = kernel.run(cell)
    assert "NameError" in error and "Run the cells above" not in error


@pytest.fixture(scope="module")
def in_notebook():
    """As Jupyter starts a kernel for 00, which says in a variable which notebook it is."""
    kernel = Kernel(JPY_SESSION_NAME=str(START))
    yield kernel
    kernel.close()


@pytest.mark.parametrize(("cell", "name", "begins"), [
    ("labs.guess('0.1', 'the mean', 3)", "labs", "import time"),
    ("RANKS = max(4, machine.ranks)", "machine", "import time"),
    ("def f():\n    return ring_bytes(1, 2)\nf()", "ring_bytes", "# Exercise 0.3, second half")])
def test_the_cell_that_defines_what_is_missing_is_named(in_notebook, cell, name, begins):
    shown, error = in_notebook.run(cell)
    assert f"{name} is defined in the cell that begins with `{begins}" in as_one_line(error)
    assert "run it first" in as_one_line(error)


def test_a_missing_cell_is_named_without_a_traceback_and_with_its_heading(in_notebook):
    error = in_notebook.run("RANKS = max(4, machine.ranks)")[1]
    assert error.startswith("NameError: name 'machine' is not defined, at In [")
    assert "below the heading “Hardware and backend”" in as_one_line(error)
    lines = error.splitlines()
    assert "Traceback" not in error and len(lines) <= 6
    assert all(len(line) <= LINE for line in lines)


def test_all_that_a_cell_misses_is_named(in_notebook):
    cell = "def ring(mine):\n    return ring_all_gather(ring_reduce_scatter(mine))\nring(3)"
    error = as_one_line(in_notebook.run(cell)[1])
    assert "ring_all_gather is defined in the cell" in error
    assert error.endswith("Missing, too: ring_reduce_scatter.")


def test_a_name_that_no_cell_defines_is_a_slip(in_notebook):
    assert "run it first" not in in_notebook.run("print(mean_of_ranks)")[1]


def test_a_gap_that_is_called_says_what_waits(in_notebook):
    gap = "def f():\n    raise NotImplementedError('Exercise 0.2')\nf()"
    assert "Exercise 0.2 is waiting for your code" in in_notebook.run(gap)[1]
    assert "waiting" not in in_notebook.run("raise NotImplementedError('mine')")[1]


@pytest.mark.slow
def test_a_check_and_a_launch_wait_for_a_cell_that_was_skipped(in_notebook):
    """The answer calls what an earlier cell defines: no wrong answer."""
    in_notebook.run("import torch\nimport labs\nimport labs.start_here as lab\n"
                    "from labs import launch\n"
                    "def together(losses):\n    return mean_losses(losses), 1")
    shown, _ = in_notebook.run("lab.check_mean_losses(together)")
    assert "○ Exercise 0.4  waits for another cell. mean_losses is defined in" in shown
    shown, error = in_notebook.run("launch(together, [1.0], ranks=2)")
    assert "rank 0 raised NameError" in error and "`def mean_losses(losses):`" in error


@pytest.mark.slow
def test_a_launch_of_a_gap_says_what_waits_or_which_line_is_left(in_notebook):
    in_notebook.run("from labs import launch")
    gap = "def f():\n    # your code here\n    {}raise NotImplementedError('Exercise 0.2')\n"
    waits = in_notebook.run(gap.format("") + "launch(f, ranks=2)")[1]
    assert "Exercise 0.2 is waiting for your code: fill it in first" in waits
    left = in_notebook.run(gap.format("x = 1\n    ") + "launch(f, ranks=2)")[1]
    assert "line 4 still raises an error, below your code; remove that line" in left


def interrupted(kernel, cell, shown):
    """The error of a cell that is interrupted once it has shown this."""
    kernel.start(cell)
    kernel.finish(until=shown)
    time.sleep(0.3)
    kernel.manager.interrupt_kernel()
    return kernel.finish()[1]


def test_an_interrupted_cell_says_where_it_was_and_what_to_run_next(kernel):
    error = interrupted(kernel, "import time\nprint('on')\ntime.sleep(60)", "on")
    assert "interrupted at In [" in error and "line 3:  time.sleep(60)" in error
    assert "run this cell again, and then those below it" in as_one_line(error)
    assert all(len(line) <= LINE for line in error.splitlines())
    assert "Traceback" not in error


def test_an_interrupted_measurement_says_what_was_measured(kernel):
    error = interrupted(kernel, "import time\nfrom labs.workers.progress import status\n"
                                "with status('exercise 8.1'), status('2 ranks at work'):\n"
                                "    print('on')\n    time.sleep(60)", "on")
    assert "The cell was at work on exercise 8.1." in error
