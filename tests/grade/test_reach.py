"""What of labs an answer's process has: what the notebook names, and no formula of the check's."""

import ast

import pytest
from _grade import judged_apart, reach
from _grade.outcomes import PASSED
from _grade.sandbox import Sandbox
from grading import ROOT, grade, looked_at, needs_namespaces, students


def apart(lessons):
    return [(lesson, exercise) for lesson in lessons for exercise in lesson.exercises
            if exercise.number in judged_apart.EXERCISES]


def test_no_module_with_a_check_is_there(lessons):
    for lesson, exercise in apart(lessons):
        assert not reach.modules_for(lesson, exercise) & reach.with_checks(), exercise.number


def test_what_a_check_computes_with_is_not_there(lessons):
    """Except what NEEDED names, and what that is made of."""
    found = {}
    for lesson, exercise in apart(lessons):
        known = reach._known_by(reach.offered(lesson.package)[exercise.check])
        there = known & reach.modules_for(lesson, exercise)
        found[exercise.number] = there - reach.closure(
            (*reach.BASE, *reach.NEEDED.get(exercise.number, ())))
    assert {number: names for number, names in found.items() if names} == {}


def test_what_the_answers_of_the_solutions_name_is_there(lessons):
    for lesson in lessons:
        one = looked_at(ROOT / "solutions" / f"{lesson.name}.ipynb", lessons)
        names = reach.offered(lesson.package)
        for exercise in (each for of, each in apart([lesson])):
            used = set()
            for number, keep in one.looked["exercises"][exercise.number]["keep"]:
                _, source, file = one.looked["parts"][number]
                body = ast.parse(source).body
                for node in (node for at, statement in enumerate(body) if file or at in keep
                             for node in ast.walk(statement)):
                    used |= set(reach._imported([node]))
                    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "lab":
                        used.add(names[node.attr])
            assert used <= reach.modules_for(lesson, exercise), exercise.number


ASKS = """\
import importlib, os, sys
def combine(gradients, sizes):
    found = []
    for name in NAMES:
        if name in sys.modules or os.path.exists(f"{ROOT}/{name.replace('.', '/')}.py"):
            found.append(name)
        try:
            found.append(importlib.import_module("la" + name[2:]))
        except ImportError:
            pass
    import gc
    kinds = [each for each in gc.get_objects() if callable(each)
             and str(getattr(each, "__module__", "")) in NAMES]
    raise ValueError(f"{len(NAMES)} names, found {found + kinds}")
"""


@pytest.mark.slow
@needs_namespaces
def test_composed_names_reach_no_formula(lessons, tmp_path):
    """Of all checks of exercises that are judged apart, and what these compute with; asked from
    2.1, whose notebook names no prediction."""
    names = set()
    for lesson, exercise in apart(lessons):
        names |= reach._known_by(reach.offered(lesson.package)[exercise.check])
    names -= reach.closure(reach.BASE)
    [(lesson, exercise)] = [(lesson, exercise) for lesson, exercise in apart(lessons)
                            if exercise.number == "2.1"]
    names = sorted(names - reach.modules_for(lesson, exercise))
    assert {"labs.memory_math.per_rank", "labs.predictions.memory.recipes"} <= set(names)
    assert len(names) > 100
    source = f"NAMES = {names!r}\nROOT = {str(ROOT)!r}\n{ASKS}"
    sandbox = Sandbox(["labs.manual_ddp", "labs.memory_math"], seconds=60)
    try:
        found = grade(sandbox, lessons, source, tmp_path / "ada.ipynb")
        right = grade(sandbox, lessons, students.RIGHT[0], tmp_path / "bob.ipynb")
    finally:
        sandbox.close()
    assert f"{len(names)} names, found []" in found.sentence, found.sentence[:2000]
    assert right.outcome == PASSED


def test_a_copy_has_its_modules_alone(tmp_path):
    """A copy has the files of its modules, open to all, and the data beside them."""
    reach.copy(reach.closure(("labs.predictions.gpu_runs.folder",)), tmp_path / "labs")
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"labs/__init__.py", "labs/predictions/gpu_runs/folder.py",
            "labs/predictions/gpu_runs/rows/workbook.json"} <= there
    assert "labs/memory_math/per_rank.py" not in there
    assert all(path.stat().st_mode & 0o005 for path in tmp_path.rglob("*") if path.is_dir())
