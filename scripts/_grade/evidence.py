"""What is seen of a submission's ranks from outside of its processes: the bytes that they sent.

Each exercise has a network namespace of its own, and gloo's ranks talk over its loopback interface.
The process that has made the namespaces reads the interface's counter at the end
(`namespaces.run_isolated`); no code of the submission's can see or reach it. What is right is not
written down anywhere: in each grading run our own solution is graded in the same sandbox, with the
same inputs, when the first answer to an exercise has passed. An answer that has passed while its
ranks sent much less has not done what the exercise is about.

Not used: the control group's peak memory (memory.peak, memory.max_usage_in_bytes). It has no
number where this user may make no group, and it says little: our solution of 2.4 peaks at 298 to
299 MB, and the answer that trains on each rank alone (tests/hostile/on_the_wire.py) at 300 to 301,
because Python and torch in each process outweigh the small models of the checks.
"""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from _grade import files, judged_apart, look, static_look
from _grade.lessons import Exercise, Lesson
from _grade.outcomes import BROKEN, NOT_ALLOWED, PASSED, TIMED_OUT, Graded

# Of the bytes of our solution. tests/grade/test_sent_bytes.py has what was measured.
SHARE = 0.4
_SAY_SOMETHING = (PASSED, TIMED_OUT, BROKEN)  # of the machine, too: does our own answer pass here?


class Solutions:
    """Our own answers, each graded once in a run, when the first answer to its exercise needs it.
    Threads may ask at the same time. root: the checkout. grade(lesson, exercise, looked): as
    `session.grade_exercise`."""

    def __init__(self, root: Path, grade: Callable[[Lesson, Exercise, dict], Graded]):
        self._root, self._grade, self._lock = root, grade, threading.Lock()
        self._looked: dict[str, dict] = {}
        self._graded: dict[str, Future] = {}

    def judged(self, lesson: Lesson, exercise: Exercise, found: Graded) -> Graded:
        """The outcome of an answer, after a look at what its ranks sent. One that has passed with
        too few bytes is not allowed, and no more: that somebody forged something was not seen."""
        if exercise.number in judged_apart.VALUES or found.outcome not in _SAY_SOMETHING:
            return found
        ours = self._of(lesson, exercise)
        if PASSED == found.outcome == ours.outcome and found.sent < SHARE * ours.sent:
            return Graded(NOT_ALLOWED, f"the check passed, but the ranks sent {found.sent:,} bytes "
                          f"to each other, and those of our solution {ours.sent:,}: without "
                          "communication this is no answer. If you think that yours communicates "
                          "what it must, ask your instructor to look", "", found.seconds,
                          found.sent)
        return found

    def failures(self) -> list[str]:
        """A sentence on each of our solutions that does not pass on this machine."""
        found = []
        for number, future in sorted(self._graded.items()):
            if future.done() and (one := future.result()).outcome != PASSED:
                first = one.sentence.split("\n")[0]
                found.append(f"Our own solution of exercise {number} does not pass on this machine "
                             f"({one.outcome}: {first}). Blame no student for what {number} says.")
        return found

    def _of(self, lesson, exercise) -> Graded:
        future = Future()
        with self._lock:
            first = self._graded.setdefault(exercise.number, future)
        if first is future:
            try:
                future.set_result(self._grade(lesson, exercise, self._look(lesson)))
            except BaseException as error:
                future.set_result(Graded(BROKEN, files.plain(f"{type(error).__name__}: {error}")))
                if not isinstance(error, Exception):
                    raise
        return first.result()

    def _look(self, lesson) -> dict:
        """What the look finds in our solution of a lesson. It needs no walls."""
        from _build.build import read_lesson

        with self._lock:
            if lesson.name not in self._looked:
                data = json.dumps(read_lesson(self._root, lesson.name).solution).encode()
                known = look.Known([lesson], static_look.notebooks_imports())
                self._looked[lesson.name] = look.look_through(data, known)
            return self._looked[lesson.name]
