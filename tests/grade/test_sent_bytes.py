"""The bytes that ranks sent, as evidence. Measured on loopback, headers included, as shares of our
solution's: the honest answers of tests/start_here and tests/manual_ddp lie between 0.58 (2.2, all
gradients in one flat tensor) and 1.9, those of tests/hostile/on_the_wire.py between 0.11 and 0.34;
two runs of one answer differ by less than 0.02."""

import ast
import json

import pytest
from _grade import evidence, look, session, static_look
from _grade.outcomes import NOT_ALLOWED, PASSED, TIMED_OUT, WRONG, Graded
from _grade.sandbox import Sandbox
from grading import ROOT, grade, needs_namespaces, not_hostile, on_the_wire, students


def exercise_of(lessons, number):
    return next((lesson, exercise) for lesson in lessons for exercise in lesson.exercises
                if exercise.number == number)


@pytest.fixture
def solutions():
    """of(ours) makes Solutions of which each is graded so; .asked has the exercises."""
    def of(ours):
        def graded(_, exercise, looked):
            assert looked["exercises"][exercise.number]["keep"]
            of.asked.append(exercise.number)
            return ours

        return evidence.Solutions(ROOT, graded)

    of.asked = []
    return of


@pytest.mark.parametrize(("sent", "outcome"), [(399, NOT_ALLOWED), (400, PASSED), (3000, PASSED)])
def test_what_has_passed_must_have_sent_enough(lessons, solutions, sent, outcome):
    known = solutions(Graded(PASSED, sent=1000))
    found = known.judged(*exercise_of(lessons, "2.4"), Graded(PASSED, "well", sent=sent))
    assert found.outcome == outcome
    assert ("the ranks sent 399 bytes" in found.sentence) == (outcome == NOT_ALLOWED)


def test_our_solution_is_graded_once_and_only_where_it_says_something(lessons, solutions):
    known = solutions(Graded(PASSED, sent=1000))
    for number, outcome in (("2.4", WRONG), ("2.1", PASSED), ("2.4", PASSED), ("2.4", PASSED)):
        known.judged(*exercise_of(lessons, number), Graded(outcome, sent=1000))
    assert solutions.asked == ["2.4"] and known.failures() == []


def test_a_machine_on_which_our_solution_fails_is_to_blame(lessons, solutions):
    known = solutions(Graded(TIMED_OUT, "not done after 9 s"))
    for outcome in (PASSED, TIMED_OUT):
        found = Graded(outcome, "as it is", sent=0)
        assert known.judged(*exercise_of(lessons, "2.4"), found) is found
    [said] = known.failures()
    assert said == ("Our own solution of exercise 2.4 does not pass on this machine (timed out: "
                    "not done after 9 s). Blame no student for what 2.4 says.")


@pytest.fixture(scope="module")
def sandbox():
    found = Sandbox(["labs.start_here", "labs.manual_ddp"], seconds=120)
    yield found
    found.close()


def looked_with(lessons, number, cell):
    """The look at our solution with this in the place of the cell that defines the same."""
    lesson, exercise = exercise_of(lessons, number)
    names = {each.name for each in ast.parse(cell).body if hasattr(each, "name")}
    nb = json.loads((ROOT / "solutions" / f"{lesson.name}.ipynb").read_text())
    for each in nb["cells"]:
        source = "".join(each["source"])
        if each["cell_type"] == "code" and any(f"def {name}(" in source or f"class {name}(" in
                                               source for name in names):
            each["source"] = cell
    known = look.Known([lesson], static_look.notebooks_imports())
    return lesson, exercise, look.look_through(json.dumps(nb).encode(), known)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("number", on_the_wire.ANSWERS)
def test_ranks_that_compute_alone_are_seen(sandbox, lessons, number):
    """The check lets them pass, and the guard: only the bytes are missing."""
    def graded(lesson, exercise, looked):
        return session.grade_exercise(sandbox, lesson, exercise, looked)

    known = evidence.Solutions(ROOT, graded)
    lesson, exercise, looked = looked_with(lessons, number, on_the_wire.ANSWERS[number])
    alone = graded(lesson, exercise, looked)
    assert alone.outcome == PASSED, alone
    judged = known.judged(lesson, exercise, alone)
    print(number, alone.sent, judged.sentence)
    assert judged.outcome == NOT_ALLOWED and "ask your instructor" in judged.sentence
    assert known.failures() == []


ON_RANKS = ("def mean_over_ranks(mine):\n", students.ON_RANKS.partition("\n")[2])
APART = ("def combine(gradients, sizes):\n", students.RIGHT[0].partition("\n")[2])


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(("number", "head", "rest"), [("0.1", *ON_RANKS), ("2.1", *APART)])
def test_an_idiom_is_no_accusation(sandbox, lessons, tmp_path, number, head, rest):
    """All of them in one answer, on ranks and judged apart: each alone takes 40 times as long."""
    before, begins = map("".join, zip(*not_hostile.IDIOMS.values(), strict=True))
    answer = f"import torch\nimport torch.distributed as dist\n{before}{head}{begins}{rest}"
    found = grade(sandbox, lessons, answer, tmp_path / "ada.ipynb", number)
    assert found.outcome == PASSED, found
