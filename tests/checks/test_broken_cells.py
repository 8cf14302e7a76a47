"""A cell that Python cannot read: the check below it must not look at what an earlier run left."""

import pytest
from notebook_kernel import Kernel

CHECK = """
from labs.checks.verdicts import check
@check("9.1")
def check_double(double):
    return f"twice 2 is {double(2)}"
"""
OLD = "○ Exercise 9.1  the last cell that defines double is not Python"


@pytest.fixture(scope="module")
def in_kernel():
    kernel = Kernel()
    kernel.run(CHECK)
    yield kernel
    kernel.close()


def test_a_check_says_that_the_last_cell_was_not_python(in_kernel):
    in_kernel.run("def double(x):\n    return 2 * x")
    assert "✓ Exercise 9.1" in in_kernel.run("check_double(double)")[0]
    shown, error = in_kernel.run("def double(x):\n    return 2 * * x")
    assert "SyntaxError" in error
    shown, error = in_kernel.run("check_double(double)")
    assert OLD in shown and "line 2: invalid syntax" in shown and error is None, shown
    assert "✓" in in_kernel.run("check_double(lambda x: x)")[0]  # another answer is looked at
    in_kernel.run("def double(x):\n    return 3 * x")
    assert "✓ Exercise 9.1  twice 2 is 6" in in_kernel.run("check_double(double)")[0]


@pytest.mark.parametrize("cell", ["class double:\n    pass pass", "double = lambda x: 2 x",
                                  "double, other = abs,, abs", "async def double(x): x x"])
def test_whatever_was_to_define_the_name(in_kernel, cell):
    in_kernel.run("double = abs")
    in_kernel.run("x = 1\n" + cell)
    assert OLD in in_kernel.run("check_double(double)")[0]
    in_kernel.run("double = abs")
    assert "✓" in in_kernel.run("check_double(double)")[0]


def test_a_cell_that_raises_is_no_broken_cell(in_kernel):
    in_kernel.run("double = abs\n1 / 0")
    assert "✓" in in_kernel.run("check_double(double)")[0]
