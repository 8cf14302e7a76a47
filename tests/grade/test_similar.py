"""Answers that are one another's code: what is listed, and what is not."""

import json
import re

import pytest
from _grade import look, similar, static_look
from _grade.handed_in import Row
from _grade.shapes import runs_of
from _grade.submissions import parse
from grading import ROOT, students

BUCKETS = """\
def f(parameters, cap_bytes):
    buckets, current, size = [], [], 0
    for parameter in reversed(parameters):
        if current and size + parameter.numel() * 4 > cap_bytes:
            buckets.append(current)
            current, size = [], 0
        current.append(parameter)
        size += parameter.numel() * 4
    return buckets + [current]
"""


def share(one, other):
    first, second = (runs_of(parse(each)) for each in (one, other))
    return (first & second).total() / max(first.total(), second.total())


def test_names_texts_comments_and_layout_make_no_difference():
    other = re.sub(r"\b(f|parameters?|buckets|current|size)\b", r"my_\1", BUCKETS)
    other = other.replace("):\n", "):\n    'In the order of backward.'\n", 1).replace(
        "[], [], 0\n", "[], [], 0  # none yet\n", 1)
    assert other != BUCKETS and share(BUCKETS, other) == 1


@pytest.mark.parametrize("change", [("* 4", "* 2"), ("reversed", "list"), (".numel", ".nelement")])
def test_numbers_functions_and_attributes_do(change):
    assert 0.6 < share(BUCKETS, BUCKETS.replace(*change)) < 1


def test_the_head_of_a_function_that_is_given_is_nobodys_answer(lessons):
    known = look.Known(lessons, static_look.notebooks_imports(), shapes=True)
    data = (ROOT / "notebooks" / "02_manual_ddp.ipynb").read_bytes()
    shapes = look.look_through(data, look.Known.of_json(known.as_json()))["shapes"]
    # what is left of an untouched notebook is nothing, or the line that raises
    assert shapes.keys() >= {"2.1", "2.7"} and max(map(len, shapes.values())) < similar.SHORTEST


def test_pairs_are_listed_the_longest_first():
    long, short = ({str(run): 1 for run in range(size)} for size in (200, 100))
    other = {str(run): 1 for run in range(20, 200)}
    tiny = {str(run): 1 for run in range(similar.SHORTEST - 1)}
    found = similar.pairs([
        ("ada", {"2.7": long, "2.1": tiny, "2.8": short}), ("bob", {"2.7": other, "2.1": tiny}),
        ("eve", {"2.7": {}, "2.8": short}),
        (similar.SOLUTION, {"2.7": {"x": 100}, "2.1": tiny, "2.8": short})])
    assert [(pair.number, pair.first, pair.second, pair.nodes, pair.share) for pair in found] == [
        ("2.7", "ada", "bob", 180, 0.9), ("2.8", "ada", "eve", 100, 1.0),
        ("2.8", "ada", "the solution", 100, 1.0), ("2.8", "eve", "the solution", 100, 1.0)]


def test_a_copy_of_the_solution_is_listed(lessons, tmp_path):
    path = tmp_path / "ada.ipynb"
    path.write_bytes((ROOT / "solutions" / "02_manual_ddp.ipynb").read_bytes())
    other = tmp_path / "bob.ipynb"
    other.write_text(json.dumps(students.notebook(students.RIGHT[0])))
    rows = [Row(name, records=[{"lesson": "02_manual_ddp", "file": name, "exercises": []}])
            for name in ("ada", "bob")]
    text = similar.listed(rows, {"ada": path, "bob": other}, lessons,
                          lambda data, known: look.look_through(data, look.Known.of_json(known)), 1)
    lines = [line for line in text.splitlines() if line.endswith(": ada, the solution")]
    assert len(lines) >= 5 and all(line.startswith("100% of") for line in lines)
    assert "bob" not in text and "not an accusation" in text
