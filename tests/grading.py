"""What the tests of scripts/grade share: the hostile set, and one exercise graded alone."""

import json
import sys
from pathlib import Path

import pytest
from _grade import files, judged_apart, look, session, static_look
from _grade.sandbox import Misplaced, Missing, Sandbox, Unavailable

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "hostile"))
import class_of_students as students  # noqa: E402
import not_hostile  # noqa: E402, F401
import on_scripts  # noqa: E402, F401
import on_the_check  # noqa: E402, F401
import on_the_judge  # noqa: E402, F401
import on_the_machine  # noqa: E402, F401
import on_the_reader  # noqa: E402, F401
import on_the_wire  # noqa: E402, F401


def namespaces_work() -> bool:
    try:
        found = Sandbox([])
    except (Missing, Misplaced, Unavailable):
        return False
    try:
        found.probe()
    except Unavailable:
        return False
    finally:
        found.close()
    return True


needs_namespaces = pytest.mark.skipif(not namespaces_work(),
                                      reason="no bubblewrap, or namespaces are forbidden here")


def looked_at(path, lessons) -> session.Submission:
    """What the look finds in a file, in this process."""
    known = look.Known(lessons, static_look.notebooks_imports(),
                       apart=judged_apart.EXERCISES)
    found = look.look_through(files.read(path), known)
    if "unreadable" in found:
        raise files.Unreadable(found["unreadable"])
    lesson = next(lesson for lesson in lessons if lesson.name == found["lesson"])
    return session.Submission("ada", path, lesson, found)


def grade_one(sandbox, one, exercise):
    return session.grade_exercise(sandbox, one.lesson, exercise, one.looked)


def grade(sandbox, lessons, source, path, only="2.1"):
    path.write_text(json.dumps(students.notebook(source)))
    one = looked_at(path, lessons)
    return grade_one(sandbox, one, next(each for each in one.lesson.exercises
                                        if each.number == only))
