"""What the tests of scripts/grade share: the hostile set, and one exercise graded alone."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _grade import session, submissions

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "hostile"))
import class_of_students as students  # noqa: E402
import on_the_check  # noqa: E402, F401
import on_the_machine  # noqa: E402, F401


def namespaces_work() -> bool:
    if not shutil.which("unshare"):
        return False
    done = subprocess.run(["unshare", "-Urnmpf", "--mount-proc", "true"], capture_output=True)
    return done.returncode == 0


needs_namespaces = pytest.mark.skipif(not namespaces_work(), reason="namespaces are forbidden here")


def grade(sandbox, lessons, source, path, only="2.1"):
    path.write_text(json.dumps(students.notebook(source)))
    one = submissions.read("ada", path, lessons)
    exercise = next(each for each in one.lesson.exercises if each.number == only)
    return session.grade_exercise(sandbox, one, exercise)
