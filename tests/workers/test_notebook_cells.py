"""A cell that Python cannot read: the check below it must not look at what an earlier run left."""

import pytest
from notebook_kernel import Kernel

from labs.workers import notebook_cells

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


def test_a_cell_that_assigns_the_name_itself_is_no_old_answer(in_kernel):
    in_kernel.run("double = 2 x")
    assert "✓" in in_kernel.run("double = abs\ncheck_double(double)")[0]


def test_a_guess_that_is_not_python_leaves_no_earlier_one(in_kernel):
    in_kernel.run("import labs\nfrom labs.checks.guesses import guessed, all_guesses")
    guess = "my_guess = {}\nlabs.guess('9.1', 'MB', my_guess)"
    in_kernel.run(guess.format(12))
    in_kernel.run(guess.format("13 MB"))
    assert in_kernel.run("print(guessed('9.1'), all_guesses())")[0] == "None []\n"
    in_kernel.run(guess.format(14))
    assert in_kernel.run("print(guessed('9.1'))")[0] == "14\n"


def test_what_is_no_check_says_afterwards_that_it_used_an_old_cell(in_kernel):
    in_kernel.run("double = abs\ndef launch(function): return function(3)")
    in_kernel.run("double = 2 x")
    shown, _ = in_kernel.run("launch(double)")
    assert "the last cell that defines double is not Python" in shown and "this looked at" in shown
    assert "not Python" not in in_kernel.run("def g(double): return double\nlaunch(g)")[0]
    in_kernel.run("double = abs")
    assert "not Python" not in in_kernel.run("launch(double)")[0]


@pytest.mark.parametrize(("source", "names"), [
    ("import a.b, c as d\nfrom e import f as g, h", {"a", "d", "g", "h"}),
    ("def f():\n    x = 1\n@wrapped\nclass C: pass\nx, y = 1, 2", {"f", "C", "x"}),
    ("x == 1\nf(x=1)", set()), ("%%writefile a.py\nx = 1", set()),
    ("labs.guess('3.8b', 'MB', x)", {"guess 3.8b"})])
def test_the_names_of_a_cell(source, names):
    assert notebook_cells.names_in(source) == names
