"""Exercises whose judge is another process: the answers to all of them pass there, and nothing
that is done in the answer's process makes a wrong one pass."""

import json

import pytest
from _grade import judged_apart
from _grade.outcomes import FORGED, NOT_ALLOWED, PASSED, WRONG
from _grade.sandbox import Sandbox
from grading import (
    ROOT,
    grade,
    grade_one,
    looked_at,
    needs_namespaces,
    on_the_check,
    on_the_judge,
    students,
)


@pytest.fixture(scope="module")
def sandbox():
    found = Sandbox(["labs.manual_ddp", "labs.memory_math"], seconds=60)
    yield found
    found.close()


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("name", on_the_judge.ATTACKS)
def test_a_wrong_answer_gains_nothing(sandbox, lessons, tmp_path, name):
    found = grade(sandbox, lessons, on_the_judge.ATTACKS[name], tmp_path / "ada.ipynb")
    print(found)
    assert found.outcome != PASSED


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("name", [name for name, (source, _) in on_the_check.FOUND.items()
                                  if "mean_over_ranks" not in source])
def test_what_deceives_the_guard_gains_nothing_either(sandbox, lessons, tmp_path, name):
    found = grade(sandbox, lessons, on_the_check.FOUND[name][0], tmp_path / "ada.ipynb")
    print(found)
    assert found.outcome != PASSED


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("name", on_the_judge.HONEST)
def test_an_honest_answer_passes(sandbox, lessons, tmp_path, name):
    found = grade(sandbox, lessons, on_the_judge.HONEST[name], tmp_path / "ada.ipynb")
    assert found.outcome == PASSED, found


@pytest.mark.slow
@needs_namespaces
def test_what_is_no_message_is_forged(sandbox, lessons, tmp_path):
    found = grade(sandbox, lessons, on_the_judge.ATTACKS["sends_a_result_itself"],
                  tmp_path / "ada.ipynb")
    assert (found.outcome, found.sentence) == (FORGED, "sends a message of "
                                               "36,893,488,147,419,103,230 bytes")


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(("answer", "words"), [
    ("def combine(gradients, sizes):\n    return gradients[99]\n",
     "IndexError: list index out of range\n    cell 5 line 2, in combine:  return gradients[99]"),
    ("def combine(gradients):\n    return gradients[0]\n",
     "TypeError: combine() takes 1 positional argument but 2 were given\n"
     "    yours: combine(gradients)"),
    ("class Odd(Exception):\n    pass\ndef combine(gradients, sizes):\n    raise Odd('so')\n",
     "Odd: so\n    cell 5 line 4, in combine:  raise Odd('so')"),
    ("def combine(gradients, sizes):\n    gradients[0].mul_(2)\n    return gradients[0]\n",
     "combine wrote into gradient 0, which is an input"),
    ("def combine(gradients, sizes):\n    gradients.pop()\n    return gradients[0]\n",
     "combine changed the list it was given"),
    ("def combine(gradients, sizes):\n    return object()\n", "combine returned an object, not"),
    ("combine = 3\n", "not callable"),
    ("raise ValueError('at once')\ndef combine(g, s):\n    pass\ncombine = 1 / 0\n",
     "ZeroDivisionError: division by zero\n    cell 5 line 4:  combine = 1 / 0"),
])
def test_what_is_wrong_is_said_as_in_the_notebook(sandbox, lessons, tmp_path, answer, words):
    found = grade(sandbox, lessons, answer, tmp_path / "ada.ipynb")
    assert found.outcome == WRONG and words in found.sentence, found


@pytest.mark.slow
@needs_namespaces
def test_what_waits_is_no_mistake(sandbox, lessons, tmp_path):
    answer = ("def combine(gradients, sizes):\n    x = 1\n"
              "    raise NotImplementedError('Exercise 2.1')")
    assert grade(sandbox, lessons, answer, tmp_path / "a.ipynb").outcome == "waiting"


@pytest.mark.slow
@needs_namespaces
def test_what_asks_labs_is_not_allowed(sandbox, lessons, tmp_path):
    answer = f"from labs.predictions import memory\n{students.RIGHT[0]}    memory\n"
    found = grade(sandbox, lessons, answer, tmp_path / "ada.ipynb")
    assert (found.outcome, found.sentence) == (
        NOT_ALLOWED, "cell 5 imports labs.predictions.memory, which checks are made of")


def of_01(path, lessons, number, function, body):
    """A submission of notebook 01 with this body in the place of a function's, and its exercise."""
    nb = json.loads((ROOT / "notebooks" / "01_memory_math.ipynb").read_text())
    cell = next(cell for cell in nb["cells"] if f"def {function}" in "".join(cell["source"]))
    lines = "".join(cell["source"]).split("\n")
    head = next(line for line in lines if line.startswith(f"def {function}"))
    cell["source"] = f"import numpy as np\nimport torch\n{head}\n{body}"
    path.write_text(json.dumps(nb))
    one = looked_at(path, lessons)
    return one, next(each for each in one.lesson.exercises if each.number == number)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("answer", [
    "shard, buckets", "[*shard, buckets]", "(x for x in (*shard, buckets))",
    "np.array([*shard, buckets])", "torch.tensor([*shard, buckets], dtype=torch.float64)",
    "tuple(map(np.float64, (*shard, buckets)))"])
def test_what_ranks_hold_may_be_written_in_many_ways(sandbox, lessons, tmp_path, answer):
    answer = answer.replace("shard, buckets", "*shard, buckets") if answer[0] == "s" else answer
    body = ("    n = ranks if strategy == 'FSDP2' else 1\n"
            "    shard = [4 * count / n, 4 * count / n, 8 * count / n]\n"
            "    buckets = 4 * count if strategy == 'DDP' else 0\n"
            f"    return {answer}\n")
    found = grade_one(sandbox, *of_01(tmp_path / "ada.ipynb", lessons, "1.7", "rank_states", body))
    assert found.outcome == PASSED, found


@pytest.mark.slow
@needs_namespaces
def test_a_verdict_does_not_say_the_right_number(sandbox, lessons, tmp_path):
    """1.3 and a wrong number: neither the right one nor how many times it is."""
    found = grade_one(sandbox, *of_01(tmp_path / "ada.ipynb", lessons, "1.3", "per_rank",
                                      "    return 12345.678, 3, 4"))
    assert found.outcome == WRONG
    assert found.sentence.endswith("parameters: you say 1.2345678e-05 GB per rank, which is not "
                                   "right")


@pytest.mark.slow
@needs_namespaces
def test_the_answers_process_does_not_have_the_seed(sandbox, lessons, tmp_path):
    answer = ("import os\ndef combine(gradients, sizes):\n"
              "    raise ValueError(repr(os.environ.get('WORKBOOK_SEED')))\n")
    assert "ValueError: ''" in grade(sandbox, lessons, answer, tmp_path / "ada.ipynb").sentence


# The quick ones of 02 and 09; all of them, by hand: scripts/grade solutions --out all.csv.
@pytest.mark.slow
@needs_namespaces
def test_the_solutions_pass(sandbox, lessons):
    found = {}
    for name in ("01_memory_math", "02_manual_ddp", "09_mixture_of_experts"):
        one = looked_at(ROOT / "solutions" / f"{name}.ipynb", lessons)
        found |= {each.number: grade_one(sandbox, one, each) for each in one.lesson.exercises
                  if each.number in judged_apart.EXERCISES}
    assert len(found) == 14
    assert {number: one for number, one in found.items() if one.outcome != PASSED} == {}


def test_exercises_judged_apart_exist(lessons):
    numbers = {exercise.number for lesson in lessons for exercise in lesson.exercises}
    assert judged_apart.EXERCISES <= numbers
