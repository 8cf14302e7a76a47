"""A check cell that is run before the cells above it."""

import pytest
from notebook_kernel import Kernel


@pytest.fixture(scope="module")
def kernel():
    """As after a restart: only what set-up loads into each kernel is there."""
    kernel = Kernel()
    yield kernel
    kernel.close()


@pytest.mark.parametrize("cell", ["lab.check_combine(combine)",
                                  "# the check\nrun = lab.show_ranks(\n    combine)"])
def test_after_a_restart_a_cell_of_ours_says_to_run_those_above(kernel, cell):
    shown, error = kernel.run(cell)
    assert "NameError" in error and "Run the cells above this one first" in error


@pytest.mark.parametrize("cell", ["print(combine)", "def f():\n    return lab.check(x)\nf()",
                                  "def lab_(x): lab.check(x)\nlab_(1)"])
def test_a_slip_of_the_students_own_is_shown_as_ever(kernel, cell):
    shown, error = kernel.run(cell)
    assert "NameError" in error and "Run the cells above" not in error
