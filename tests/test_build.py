"""scripts/build: one source, two notebooks. Tiny sources in a folder of their own."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from _build import build, execute, lint, notebook  # noqa: E402
from _build.command import find_sources, main  # noqa: E402

SOURCE = '''\
# %% [markdown]
# # Mean over ranks
# A text cell.

# %%
# Exercise 3.1: average
def average(values, ranks):
    """The mean over ranks."""
    total = sum(values)
    ### BEGIN SOLUTION
    mean = total / ranks  # the mean, not the sum
    return mean
    ### END SOLUTION

# %% [markdown]
# ### Exercise 3.2: arithmetic

# %% tags=["nbval-check-output"]
### BEGIN SOLUTION
bytes_sent = 2 * 3 / 4 * 16
calls = (1
         + 2)
### END SOLUTION
print("calls", calls)

# %% tags=["solution-only"]
"only for instructors"

# %% tags=["student-only"]
"only for students"
'''


@pytest.fixture
def tree(tmp_path):
    """A function that writes solutions/03_tiny.py and returns the root of the tree."""

    def write(source=SOURCE, name="03_tiny"):
        (tmp_path / "solutions").mkdir(exist_ok=True)
        (tmp_path / "solutions" / f"{name}.py").write_text(source)
        return tmp_path

    return write


def lesson(root, name="03_tiny"):
    return build.read_lesson(root, name)


def problems(root):
    return lesson(root).problems


def only_problem(root):
    (problem,) = problems(root)
    return problem


def texts(nb):
    return ["".join(cell["source"]) for cell in nb["cells"]]


def command(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPTS / "_build", *map(str, arguments)], capture_output=True, text=True
    )


def pretend_executed(root):
    """Build without a kernel, then number the cells as if it had run."""
    assert main(["--root", str(root), "--no-execute"]) == 0
    path = root / "solutions" / "03_tiny.ipynb"
    nb = json.loads(path.read_text())
    for count, cell in enumerate((c for c in nb["cells"] if c["cell_type"] == "code"), 1):
        cell["execution_count"] = count
    path.write_text(json.dumps(nb))
    return path


# ---- the two notebooks


def test_solution_has_answers_and_no_markers(tree):
    solution = texts(lesson(tree()).solution)
    assert "mean = total / ranks" in solution[1]
    assert "SOLUTION" not in "".join(solution)
    assert '"only for instructors"' in solution and '"only for students"' not in solution


def test_gap_in_a_function(tree):
    cell = texts(lesson(tree()).student)[1]
    assert cell.splitlines()[-3:] == [
        "    total = sum(values)",
        "    # your code here",
        '    raise NotImplementedError("Exercise 3.1")',
    ]


def test_gap_at_top_level_takes_the_number_of_the_heading(tree):
    cell = texts(lesson(tree()).student)[3]
    assert cell.splitlines() == [
        "bytes_sent = ...  # your answer",
        "calls = ...  # your answer",
        'print("calls", calls)',
    ]
    assert '"only for students"' in texts(lesson(tree()).student)


def test_several_gaps_in_a_method_and_deeper(tree):
    source = """\
# %%
# Exercise 3.1: two methods
class Net:
    def first(self, xs):
        for x in xs:
            ### BEGIN SOLUTION
            self.total += x
            ### END SOLUTION
    # Exercise 3.2: the second
    def second(self):
        ### BEGIN SOLUTION
        return self.total / 2
        ### END SOLUTION
"""
    (cell,) = texts(lesson(tree(source)).student)
    assert '            raise NotImplementedError("Exercise 3.1")\n' in cell
    assert '        raise NotImplementedError("Exercise 3.2")' in cell


def test_untouched_student_notebook_raises_only_inside_the_function(tree):
    cells = lesson(tree()).student["cells"]
    space = {}
    for cell in (c for c in cells if c["cell_type"] == "code"):
        exec("".join(cell["source"]), space)
    assert space["calls"] is ...
    with pytest.raises(NotImplementedError, match="Exercise 3.1"):
        space["average"]([1, 2], 2)


def test_same_source_same_bytes(tree):
    root = tree()
    assert main(["--root", str(root), "--no-execute"]) == 0
    paths = [root / "solutions" / "03_tiny.ipynb", root / "notebooks" / "03_tiny.ipynb"]
    first = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    assert main(["--root", str(root), "--no-execute"]) == 0
    assert [path.read_bytes() for path in paths] == first
    assert first[1].endswith(b"}\n")


def test_notebooks_are_valid_and_bare(tree):
    import nbformat

    for nb in (lesson(tree()).student, lesson(tree()).solution):
        nbformat.validate(nbformat.reads(notebook.to_bytes(nb).decode(), as_version=4))
    code = [c for c in lesson(tree()).student["cells"] if c["cell_type"] == "code"]
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in code)
    assert code[1]["metadata"] == {"tags": ["nbval-check-output"]}


def test_what_a_check_says_is_compared_by_nbval(tree):
    root = tree(SOURCE + "\n# %%\nlab.check_mean(mean)\n\n# %%\nuncheck = lab.check_mean\n")
    *_, check, other = lesson(root).solution["cells"]
    assert check["metadata"] == {"tags": ["nbval-check-output"]}
    assert other["metadata"] == {}


def test_ids_are_shared_stable_and_unique(tree):
    before = lesson(tree())
    student = {c["id"] for c in before.student["cells"]}
    shared = student & {c["id"] for c in before.solution["cells"]}
    assert len(shared) == 4 and all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", i) for i in student)
    inserted = SOURCE.replace(
        "# %% [markdown]\n# ###", "# %%\nx = 1\n\n# %%\nx = 1\n\n" + "# %% [markdown]\n# ###"
    )
    after = [c["id"] for c in lesson(tree(inserted)).student["cells"]]
    assert student < set(after) and len(after) == len(set(after))


def test_ids_do_not_tell_the_answer(tree):
    assert "bytes" not in "".join(c["id"] for c in lesson(tree()).student["cells"])


# ---- errors: one sentence each, with file, line and cell


MARKERS = {
    "### END SOLUTION": ["END SOLUTION without a BEGIN SOLUTION"],
    "### BEGIN SOLUTION\nx = 1": ["never followed by END SOLUTION"],
    "# Exercise 3.1\n### BEGIN SOLUTION\nx = 1\n### BEGIN SOLUTION\n### END SOLUTION": [
        "BEGIN SOLUTION inside a solution"
    ],
    "## begin solution": ["is no marker"],
    "x = 1 ### BEGIN SOLUTION": ["is no marker"],
}


@pytest.mark.parametrize("code", MARKERS)
def test_markers_out_of_order(tree, code):
    found = "\n".join(problems(tree(f"# %%\n{code}\n")))
    assert all(part in found for part in MARKERS[code]), found
    assert re.match(r"solutions/03_tiny\.py:\d+: cell 1 \('", found)


def test_marker_in_a_text_cell(tree):
    assert "is no marker" in only_problem(tree("# %% [markdown]\n# ### BEGIN SOLUTION\n"))


GAPS = {
    "if True:\n    ### BEGIN SOLUTION\n    x = 1\n    ### END SOLUTION": "stand inside a function",
    "class A:\n    ### BEGIN SOLUTION\n    def f(self): pass\n    ### END SOLUTION": (
        "stand inside a function"
    ),
    "### BEGIN SOLUTION\nx.y = 1\n### END SOLUTION": "only 'name = value' lines",
    "### BEGIN SOLUTION\nx = 1\nprint(x)\n### END SOLUTION": "only 'name = value' lines",
    "### BEGIN SOLUTION\n# nothing\n### END SOLUTION": "the solution is empty",
    "# A guess\n### BEGIN SOLUTION\n# nothing\n### END SOLUTION": "the solution is empty",
    "### BEGIN SOLUTION\nx = (\n### END SOLUTION\n1)": "not Python by itself",
    "def f():\n    return (\n    ### BEGIN SOLUTION\n        1\n    ### END SOLUTION\n    )": (
        "with its solution cut out the cell is not Python"
    ),
}


@pytest.mark.parametrize("code", GAPS)
def test_solution_that_cannot_become_a_gap(tree, code):
    assert GAPS[code] in only_problem(tree(f"# %%\n# Exercise 3.1: gap\n{code}\n"))


def test_bad_line_of_a_top_level_solution_is_named(tree):
    code = "# Exercise 3.1\n### BEGIN SOLUTION\nx = 1\nprint(x)\n### END SOLUTION"
    assert only_problem(tree(f"# %%\n{code}\n")).startswith("solutions/03_tiny.py:5: cell 1 ('# Ex")


def test_solution_without_an_exercise_number(tree):
    text = "# %% [markdown]\n# See Exercise 3.1.\n\n"
    found = only_problem(tree(text + "# %%\n### BEGIN SOLUTION\nx = 1\n### END SOLUTION\n"))
    assert found.startswith("solutions/03_tiny.py:5: cell 2 (")
    assert "without an exercise number" in found


def test_a_guess_needs_no_exercise_number(tree):
    guess = "# A guess, for exercise 3.1: a number\n### BEGIN SOLUTION\nmine = 10\n### END SOLUTION"
    (cell,) = texts(lesson(tree(f"# %%\n{guess}\n\nprint(mine)\n")).student)
    assert cell.splitlines()[1:] == ["mine = ...  # your answer", "", "print(mine)"]


@pytest.mark.parametrize("code", [
    "# A guess\ndef f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION",
    "# My answer\n# A guess\n### BEGIN SOLUTION\nx = 1\n### END SOLUTION"])
def test_only_a_guess_of_names_needs_no_number(tree, code):
    assert "without an exercise number" in only_problem(tree(f"# %%\n{code}\n"))


def test_solution_in_a_student_only_cell(tree):
    code = "# Exercise 3.1\n### BEGIN SOLUTION\nx = 1\n### END SOLUTION\n"
    assert "student-only" in only_problem(tree(f'# %% tags=["student-only"]\n{code}'))


@pytest.mark.parametrize(
    "leak",
    [
        "# %%\nvalues = [1]; total = 1; ranks = 1\nmean = total / ranks\n",
        "# %%\n# the trick: mean=total/ranks\n",
        "# %% [markdown]\n# One line\n# with `mean  = total/ranks` in it.\n",
    ],
)
def test_leaked_solution(tree, leak):
    found = only_problem(tree(SOURCE + "\n" + leak))
    assert "shows 'mean = total / ranks' here, a line of the solution in cell 2" in found
    text = (tree() / "solutions" / "03_tiny.py").read_text().splitlines() + [""]
    line = int(found.split(":")[1])
    assert "mean" in (text + leak.splitlines())[line - 1]


def test_everyday_lines_are_no_leak(tree):
    source = """\
# %%
# Exercise 3.1: train
def train(optimizer, loss):
    ### BEGIN SOLUTION
    import torch.distributed
    for parameter in optimizer.parameters():
        parameter.grad /= 3 * torch.pi
    optimizer.zero_grad()
    return loss, optimizer
    ### END SOLUTION

# %%
import torch.distributed
def other(optimizer, loss):
    for parameter in optimizer.parameters():
        optimizer.zero_grad()
    return loss, optimizer
"""
    assert problems(tree(source)) == []


def test_a_wide_line_of_code(tree):
    wide = "x = " + "1 + " * 24 + "1"
    assert problems(tree(f"# %%\nx = 1\n{wide}\n")) == []
    found, = problems(tree(f"# %%\nx = 1\n{wide} \n"[:-2] + "0\n"))
    assert found == ("solutions/03_tiny.py:3: cell 1 ('x = 1'): a line of 102 characters; a line "
                     "of code has at most 101.")


def test_a_link_in_a_sentence_is_told_apart_without_colour(tree):
    """axe-core's rule link-in-text-block, found without a browser."""
    fine = ("see *[Muon](https://a.b/c)*, [`NCCL_ALGO`](https://a.b/#d), [the next](02.ipynb)\n#\n"
            "# | [a paper](https://a.b/p) | 2020 |\n# |:--|:--|\n# | [one](https://a.b/q) | 2021 |")
    assert problems(tree(f"# %% [markdown]\n# {fine}\n")) == []
    found, = problems(tree("# %% [markdown]\n# see [Muon](https://a.b/c)\n"))
    assert "'[Muon](https://a.b/c)' stands in a sentence" in found
    found, = problems(tree("# %% [markdown]\n# | since [1](https://a.b/c) | x |\n"))
    assert "stands in a sentence" in found


def test_a_column_without_a_name(tree):
    """jupyterlab-a11y-checker's rule table-missing-header, and axe-core's empty-table-header."""
    rows = "# |:--|:--|\n# | x | y |"
    assert problems(tree(f"# %% [markdown]\n# | a | b |\n{rows}\n")) == []
    for head in ("| | |", "| | b |", "| a |  |"):
        found, = problems(tree(f"# %% [markdown]\n# {head}\n{rows}\n"))
        assert "has a column without a name" in found


def test_long_cells(tree):
    lines = "\n".join(f"x = {i}" for i in range(17))
    code, text = problems(tree(f"# %%\n{lines}\n\n# %% [markdown]\n# {'word ' * 81}\n"))
    assert code.startswith("solutions/03_tiny.py:18: cell 1 ('x = 0'): 17 lines; a code cell has")
    assert "cell 2 ('word" in text and "81 words; a text cell has at most 80." in text


SCRIPT = '''\
"""A script."""
import math


# Exercise 3.1: the root
def root(x):
    """The root of x."""
    ### BEGIN SOLUTION
    rooted = math.sqrt(x) + 0.0
    return rooted
    ### END SOLUTION


if __name__ == "__main__":
    root(2)
'''
WRITES = '# %%\nlab.write_script("train.py")\n'


def with_script(root, script):
    (root / "solutions" / "scripts").mkdir()
    (root / "solutions" / "scripts" / "train.py").write_text(script)
    return root


def test_a_cell_that_stands_for_a_script_becomes_its_text(tree):
    tiny = lesson(with_script(tree(WRITES), SCRIPT))
    assert tiny.problems == []
    [worked], [gap] = texts(tiny.solution), texts(tiny.student)
    lines = [line for line in SCRIPT.splitlines() if "SOLUTION" not in line]
    assert worked.splitlines() == ["%%writefile train.py", *lines]
    assert gap.splitlines()[:2] == ["%%writefile train.py", '"""A script."""']
    assert '    raise NotImplementedError("Exercise 3.1")' in gap.splitlines()
    assert "sqrt" not in gap
    assert [cell["id"] for cell in tiny.student["cells"]] == ["03-writefile-train-py"]


def test_a_problem_in_a_script_names_the_scripts_line(tree):
    root = with_script(tree(WRITES), SCRIPT.replace("    ### END SOLUTION\n", ""))
    assert only_problem(root).startswith("solutions/scripts/train.py:8: cell 1 ('%%writefile")
    longer = SCRIPT.replace("    rooted", 21 * "    x = x * 1.000001\n" + "    rooted")
    (root / "solutions" / "scripts" / "train.py").write_text(longer)
    assert "solutions/scripts/train.py:8: " in only_problem(root)
    assert only_problem(root).endswith("23 lines; a gap in a script has at most 20.")
    (root / "solutions" / "scripts" / "train.py").write_text(SCRIPT + 140 * "x = 1\n")
    assert "a script's cell has at most 135" in only_problem(root)


def test_a_script_that_is_not_there(tree):
    assert "there is no solutions/scripts/train.py" in only_problem(tree(WRITES))


def test_a_line_of_a_scripts_solution_leaks_elsewhere(tree):
    root = with_script(tree(WRITES + "\n# %%\nrooted = math.sqrt(x) + 0.0\n"), SCRIPT)
    assert "a line of the solution in cell 1" in only_problem(root)


def test_the_titles_cell_links_to_the_glossary_in_both_notebooks(tree):
    tiny = lesson(tree())
    for built in (tiny.solution, tiny.student):
        first, *others = ["".join(cell["source"]) for cell in built["cells"]]
        assert first.endswith("A text cell.\n\n*symbols and terms: [glossary](../GLOSSARY.md)*")
        assert not any("GLOSSARY" in source for source in others)


def test_each_notebook_links_to_those_before_and_after_it_that_exist(tree):
    ends = "# %% [markdown]\n# # {}\n\n# %% [markdown]\n# The end.\n"
    for number, title in (("00", "Zero"), ("01a", "One"), ("01b", "More"), ("02", "Two")):
        root = tree(ends.format(f"{number} · {title}"), f"{number}_{title.lower()}")
    links = {
        "00_zero": "[01a · One](01a_one.ipynb) →",
        "01a_one": "← [00 · Zero](00_zero.ipynb) · [01b · More](01b_more.ipynb) →",
        "01b_more": "← [01a · One](01a_one.ipynb) · [02 · Two](02_two.ipynb) →",
        "02_two": "← [01b · More](01b_more.ipynb)",
    }
    for name, shown in links.items():
        first, last = texts(lesson(root, name).student)
        assert first.endswith(f"\n\n*{shown} · symbols and terms: [glossary](../GLOSSARY.md)*")
        assert last == f"The end.\n\n*{shown}*"


def test_a_folded_hint_has_words_of_its_own(tree):
    hint = "# <details><summary>Hint</summary>\n#\n# {}\n#\n# </details>\n"
    start = "# %% [markdown]\n"
    assert problems(tree(f"{start}# {'word ' * 70}\n#\n{hint.format('idea ' * 100)}")) == []
    found = only_problem(tree(start + hint.format("idea " * 120)))
    assert "a hint of 121 words; it has at most 120." in found


TITLED = ("# %% [markdown]\n# # 03 · Tiny\n#\n# | In short | This notebook |\n# |:--|:--|\n"
          "# | **Time** | 1 minute |\n#\n"
          "# Text.\n")


def reference_run(root, name, gpus=(), title="2 cores, no GPU", seconds=100.0, **others):
    folder = root / "experiments" / "reference" / name
    folder.mkdir(parents=True)
    machine = {"gpus": list(gpus), "title": title, "cores": 2}
    notebooks = [{"name": "03_tiny", "outcome": "passed", "seconds": seconds}]
    (folder / "results.json").write_text(json.dumps(
        {"date": "2026-11-22", "machine": machine, "notebooks": notebooks, **others}))


def test_the_card_has_the_minutes_of_the_reference_runs(tree):
    def row():
        built = lesson(root)
        first, same = (texts(nb)[0] for nb in (built.student, built.solution))
        assert first == same
        return re.search(r"\| \*\*Time\*\* \| 1 minute \|\n(\| .+ \|)\n\nText", first)[1]

    root = tree(TITLED)
    assert row() == "| **Run All** | not yet measured |"
    reference_run(root, "laptop")
    assert row() == "| **Run All** | 2 minutes on 2 CPU cores; on GPUs not yet measured |"
    reference_run(root, "node", [{"name": "A100"}], "8x A100", 30.0, dollars_per_hour=22.32)
    assert row() == ("| **Run All** | 2 minutes on 2 CPU cores; 1 minute on 8x A100 ($0.19 at "
                     "$22.32 an hour) |")


def test_a_failed_run_and_one_of_on_gpu_are_no_reference(tree):
    root = tree(TITLED)
    reference_run(root, "laptop")
    path = root / "experiments" / "reference" / "laptop" / "results.json"
    path.write_text(path.read_text().replace("passed", "failed"))
    other = root / "experiments" / "reference" / "on-gpu"
    other.mkdir()
    (other / "results.json").write_text('{"parts": [], "machine": {"gpus": []}}')
    assert "| **Run All** | not yet measured |" in texts(lesson(root).student)[0]


def test_without_a_title_there_is_no_link(tree):
    assert "GLOSSARY" not in str(lesson(tree("# %%\n1\n")).student)


def test_marker_lines_do_not_count(tree):
    lines = "\n".join(f"x = {i}" for i in range(14))
    solution = "# Exercise 3.1: long\n### BEGIN SOLUTION\nx = 3\n### END SOLUTION"
    assert problems(tree(f"# %%\n{solution}\n{lines}\n")) == []


@pytest.mark.parametrize(
    "text, words",
    [
        ("# Two words", 2),
        ("<!-- not these --> [link text](https://example.org/not-this) end", 3),
        ("$a + b + c$ and $$\nx = y\n$$", 3),
        ("costs $2 or $3 a day", 6),
        ("| a | b |\n|---|---|\n| 1 | 2 |", 4),
        ('<div class="card" style="x: y"><b>30&nbsp;min</b> → `a b`</div>', 4),
    ],
)
def test_counted_words(text, words):
    assert lint.count_words(text) == words


@pytest.mark.parametrize(
    "code", ["import matplotlib.pyplot as plt", "from matplotlib import cm", "plt.plot([1])"]
)
def test_plotting_code(tree, code):
    assert "belongs in labs/" in only_problem(tree(f"# %%\n{code}\n"))


def test_text_before_the_first_cell_and_empty_cells(tree):
    header = "# ---\n# jupyter: {}\n# ---\n\n"
    assert "3_tiny.py:5: text before the first cell" in only_problem(
        tree(header + "x = 1\n# %%\n2\n")
    )
    assert problems(tree(header + "# %%\nx = 1\n")) == []
    assert "the cell is empty" in only_problem(tree("# %%\n\n# %%\nx = 1\n"))


def test_a_cell_mark_inside_a_string_is_no_cell(tree):
    source = '# %%\nx = """\n# %% no cell\n"""\n\n# %%\n### END SOLUTION\n'
    assert only_problem(tree(source)).startswith("solutions/03_tiny.py:7: cell 2 ")


def test_all_errors_are_printed_and_nothing_is_written(tree, capsys):
    tree("# %%\nplt.show()\n\n# %%\n### END SOLUTION\n")
    root = tree("# %%\nplt.show()\n", "04_more")
    assert main(["--root", str(root)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert list(root.rglob("*.ipynb")) == []


# ---- --check and the other options


def check(root, capsys):
    capsys.readouterr()
    status = main(["--root", str(root), "--check"])
    lines = capsys.readouterr().err.splitlines()
    assert status == (1 if lines else 0)
    return lines


def test_check_after_a_build(tree, capsys):
    root = tree()
    pretend_executed(root)
    assert check(root, capsys) == []


def test_check_missing(tree, capsys):
    assert check(tree(), capsys) == [
        "notebooks/03_tiny.ipynb is missing: run scripts/build 03_tiny",
        "solutions/03_tiny.ipynb is missing: run scripts/build 03_tiny",
    ]


def test_check_stale(tree, capsys):
    pretend_executed(tree())
    root = tree(SOURCE.replace("A text cell", "Another text"))
    assert [line.split(":")[0] for line in check(root, capsys)] == [
        "notebooks/03_tiny.ipynb is stale",
        "solutions/03_tiny.ipynb is stale",
    ]


def test_check_sees_a_change_of_the_solution_alone(tree, capsys):
    pretend_executed(tree())
    root = tree(SOURCE.replace("2 * 3 / 4", "2 * 4 / 5"))
    assert check(root, capsys) == ["solutions/03_tiny.ipynb is stale: run scripts/build 03_tiny"]


def test_check_orphan(tree, capsys):
    root = tree()
    path = pretend_executed(root)
    (root / "notebooks" / "09_gone.ipynb").write_bytes(path.read_bytes())
    (line,) = check(root, capsys)
    gone, source = "notebooks/09_gone.ipynb", "solutions/09_gone.py"
    assert line == f"{gone} has no source {source}: run rm {gone}"


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"execution_count": None}, "cells that were not executed"),
        ({"outputs": [{"output_type": "error"}]}, "a stored error"),
        ({"outputs": [{"output_type": "stream", "name": "stdout", "text": ["hi"]}]}, None),
        ({"source": ["x"]}, "is stale"),
    ],
)
def test_check_looks_into_the_executed_notebook(tree, capsys, change, reason):
    root = tree()
    path = pretend_executed(root)
    nb = json.loads(path.read_text())
    nb["cells"][1] |= change
    path.write_text(json.dumps(nb))
    lines = check(root, capsys)
    assert len(lines) == bool(reason) and (not reason or reason in lines[0])


def test_check_unreadable(tree, capsys):
    root = tree()
    pretend_executed(root).write_text("{")
    assert check(root, capsys) == ["solutions/03_tiny.ipynb is stale: run scripts/build 03_tiny"]


def test_no_execute_keeps_outputs_of_unchanged_cells(tree):
    root = tree()
    path = pretend_executed(root)
    root = tree(SOURCE.replace('print("calls"', 'print("Calls"'))
    assert main(["--root", str(root), "--no-execute"]) == 0
    counts = [c.get("execution_count") for c in json.loads(path.read_text())["cells"]]
    assert counts == [None, 1, None, None, 3]


def test_student_only_and_names(tree):
    root = tree()
    tree(SOURCE, "04_more")
    assert main(["--root", str(root), "--student-only", "04", "solutions/04_more.py"]) == 0
    assert [p.name for p in root.rglob("*.ipynb")] == ["04_more.ipynb"]


def test_notebooks_that_share_their_digits(tree):
    """07 stands for 07a and 07b, which are built in their order; a letter names one of them."""
    for letter in "ba":
        root = tree(SOURCE, f"07{letter}_tiny")
    tree(SOURCE, "08_more")
    assert find_sources(root, ["07"]) == (["07a_tiny", "07b_tiny"], [])
    assert find_sources(root, ["07b", "notebooks/07b_tiny.ipynb"]) == (["07b_tiny"], [])
    assert find_sources(root, []) == (["07a_tiny", "07b_tiny", "08_more"], [])
    assert main(["--root", str(root), "--student-only", "07a"]) == 0
    assert [path.name for path in root.rglob("*.ipynb")] == ["07a_tiny.ipynb"]
    assert {cell["id"][:4] for cell in lesson(root, "07a_tiny").student["cells"]} == {"07a-"}


def test_unknown_name(tree, capsys):
    assert main(["--root", str(tree()), "08"]) == 1
    assert "There is no solutions/08.py; there are: 03_tiny." in capsys.readouterr().err


def test_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.ipynb"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        notebook.write(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


# ---- outputs


def test_progress_bars_keep_their_last_state():
    assert execute.last_state("\r  0%\r 50%\r100% done\nnext\r\n") == "100% done\nnext\n"
    assert execute.last_state("\r 50% ab\r       \rok\n\x1b[A") == "ok\n"


def test_tidy_outputs():
    def stream(name, text):
        return {"output_type": "stream", "name": name, "text": text}

    def widget(**data):
        return {"output_type": "display_data", "metadata": {}, "data": {execute.WIDGET: {}} | data}

    outputs = [
        stream("stderr", "\r 0%"),
        stream("stdout", "a\n"),
        stream("stderr", "\r 9%\n"),
        stream("stdout", "b\n"),
        widget(**{"image/png": "xyz", "text/plain": "2 < 3\nand more"}),
        widget(**{"text/plain": "IntSlider(value=0)"}),
        widget(**{"text/plain": "  0%|          | 0/3"}),
        widget(**{"text/plain": "largest: 0training [00:00, ?training/s]"}),
        stream("stdout", "c\n"),
    ]
    tidied = execute.tidy(outputs)
    assert [o["text"] for o in tidied if "text" in o] == [" 9%\n", "a\nb\n", "c\n"]
    assert [o["data"] for o in tidied if "data" in o] == [
        {"image/png": "xyz", "text/plain": "2 < 3\nand more"},
        {"text/html": "<details><summary>The picture in words</summary>2 &lt; 3<br>and more"
                      "</details>"},
        {"text/plain": execute.NO_PICTURE},
    ]
    assert execute.tidy(tidied) == tidied


# ---- real kernels, through the command


def test_help_names_the_options():
    shown = command("--help")
    assert shown.returncode == 0
    assert all(option in shown.stdout for option in ("--check", "--student-only", "--no-execute"))


@pytest.mark.slow
def test_build_executes_and_a_raising_cell_is_named(tree):
    tree(SOURCE)
    root = tree(
        "# %%\nx = 1\n\n# %%\n# Exercise 4.1: f\ndef f():\n    ### BEGIN SOLUTION\n"
        "    y = 0\n    return x / y\n    ### END SOLUTION\n\nprint('so far')\nf()\n",
        "04_raises",
    )
    done = command("--root", root)
    assert done.returncode == 1
    assert re.search(r"^03_tiny: 6 cells built in \d+\.\d s$", done.stdout, re.MULTILINE)
    assert done.stderr == (
        "solutions/04_raises.py:9: cell 2 ('# Exercise 4.1: f'): "
        "at 'return x / y': ZeroDivisionError: division by zero\n"
    )
    assert not list(root.rglob("04_raises.ipynb"))
    check_executed(root)


def check_executed(root):
    nb = json.loads((root / "solutions" / "03_tiny.ipynb").read_text())
    assert [c.get("execution_count") for c in nb["cells"]] == [None, 1, None, 2, 3]
    assert nb["cells"][3]["outputs"] == [
        {"output_type": "stream", "name": "stdout", "text": ["calls 3\n"]}
    ]
    assert nb["metadata"] == notebook.METADATA
    assert command("--root", root, "--check", "03").returncode == 0


@pytest.mark.slow
def test_cell_that_runs_too_long_or_kills_its_kernel(tree, monkeypatch, tmp_path):
    monkeypatch.setattr(execute, "CELL_SECONDS", 1)
    pid = tmp_path / "pid"
    root = tree(
        "# %%\nimport os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    nb, (problem,) = build.run(lesson(root))
    assert nb is None and problem.endswith("it ran longer than 1 s")
    assert gone(int(pid.read_text()))
    _, (problem,) = build.run(lesson(tree("# %%\nimport os\nos._exit(1)\n")))
    assert problem.endswith("its kernel died")


def test_interrupted_build_leaves_the_old_files_and_no_process(tree, tmp_path):
    pid = tmp_path / "pid"
    code = ("import os, time\nwith open(os.environ['PID'], 'w') as file:\n"
            "    file.write(f'{os.getpid()}\\n')\ntime.sleep(60)\n")
    root = tree("# %%\n" + code)
    path = pretend_executed(root)
    before = path.read_bytes()
    building = subprocess.Popen([sys.executable, SCRIPTS / "_build", "--root", root],
                                env={**os.environ, "PID": str(pid)})
    while not (pid.exists() and pid.read_text().endswith("\n")):
        assert building.poll() is None
        time.sleep(0.05)
    building.terminate()
    assert building.wait(10) == 130
    assert gone(int(pid.read_text())) and path.read_bytes() == before


def gone(pid):
    """Whether the process is gone (or a zombie that nobody has waited for) within a second."""
    for _ in range(20):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False
