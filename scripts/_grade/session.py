"""Grades submissions, several exercises at a time, and keeps what was found after each."""

import functools
import hashlib
import json
import secrets
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from _grade import cgroups, evidence, feedback, files, judged_apart, reach, static_look, table
from _grade.bubblewrap import MISSING, OWN_FOLDERS
from _grade.files import Unreadable
from _grade.lessons import Exercise, Lesson, read_lessons
from _grade.look import Known
from _grade.outcomes import BROKEN, FORGED, PASSED, TIMED_OUT, Graded
from _grade.sandbox import ROOT, Closed, Misplaced, Missing, Sandbox, Unavailable
from labs.workers import cores

UNSAFE = ("--unsafe: no namespaces. A submission can read and write what you can, other "
          "submissions too, and reach the network; only limits of time and memory hold.")
REFUSED = """\
This machine does not let a program make namespaces: {why}
Without them it cannot be guaranteed that a submission does not read your files or other
submissions, write into them, reach the network, or leave a process behind. It works, also as root,
where `unshare -Ur true` works for an ordinary user: Ubuntu since 24.04 needs
sysctl kernel.apparmor_restrict_unprivileged_userns=0, a container --security-opt seccomp=unconfined
and systempaths=unconfined. {or_unsafe}"""
OR_UNSAFE = "On a machine that holds nothing worth reading, `--unsafe` grades without."
MISPLACED = """\
{path} is needed to grade, but {own} is an empty folder of its own for each submission.
Move the checkout, and its Python, to another folder; or `--unsafe` grades without namespaces."""
CLOSED = """\
{path} is open to root alone, and submissions run as another user: chmod -R go+rX {path}"""
NO_LINUX = "scripts/grade needs Linux, where each exercise gets namespaces of its own."


@dataclass(frozen=True)
class Submission:
    """student: whose it is, as it is shown. path: its file. lesson: with the exercises that are
    graded. looked: what `look.look_through` has found in it."""

    student: str
    path: Path
    lesson: Lesson
    looked: dict


def run(options, given: list[Path], out: Path) -> int:
    """Grades what was given; returns the exit code."""
    if sys.platform != "linux":
        print(NO_LINUX, file=sys.stderr)
        return 3
    lessons = read_lessons(ROOT)
    known = {exercise.number for lesson in lessons for exercise in lesson.exercises}
    if unknown := sorted({*(options.only or ()), *options.points} - known):
        print(f"There is no exercise {', '.join(unknown)}.", file=sys.stderr)
        return 2
    try:
        found, unreadable = _read(options, given, _chosen(lessons, options.only))
        for student, why in unreadable:
            print(f"{student}: {why}", file=sys.stderr)
        return _run(Session(options, found, out), unreadable)
    except KeyboardInterrupt:
        return 130
    except Missing:
        print(f"{MISSING}\n{OR_UNSAFE}", file=sys.stderr)
    except Unavailable as error:
        print(REFUSED.format(why=error, or_unsafe=OR_UNSAFE), file=sys.stderr)
    except Closed as error:
        print(CLOSED.format(path=error), file=sys.stderr)
    except Misplaced as error:
        own = next(own for own in OWN_FOLDERS if str(error).startswith(own))
        print(MISPLACED.format(path=error, own=own), file=sys.stderr)
    return 3


def _run(session, unreadable) -> int:
    interrupted = False
    try:
        session.run()
    except (Unavailable, Misplaced, Missing, Closed):
        raise
    except KeyboardInterrupt:
        interrupted = True
    except BaseException:
        session.write(unreadable)
        raise
    session.write(unreadable)
    forged = [one for one in session.done if one["forged"]]
    print(f"\n{session.in_words()}\n{session.out}\n{session.out.with_suffix('') / 'class.html'}")
    return 130 if interrupted else int(bool(unreadable or forged))


def _chosen(lessons, only) -> list[Lesson]:
    """The lessons with the exercises that were asked for; all lessons stay, to be recognized."""
    return [Lesson(lesson.name, lesson.cells, [one for one in lesson.exercises
                                               if not only or one.number in only])
            for lesson in lessons]


def _read(options, given, lessons) -> tuple[list[Submission], list[tuple[str, str]]]:
    """(what can be graded, [(student, why not)] of the rest): each file is one or the other."""
    paths = files.files_of(given)
    if not paths:
        return [], []
    known = Known(lessons, static_look.notebooks_imports(),
                  apart=judged_apart.EXERCISES).as_json()
    by_name = {lesson.name: lesson for lesson in lessons}
    cgroups.remove_left_behind()
    looker = Sandbox([], not options.unsafe)

    def looked_at(student, path):
        found = looker.look(files.read(path), known)
        return Submission(student, path, by_name[found["lesson"]], found)

    pool = ThreadPoolExecutor(_at_once(options))
    try:
        looker.probe()
        waiting = [(student, pool.submit(looked_at, *each)) for each in paths
                   for student in each[:1]]
        found, unreadable = [], []
        for student, future in waiting:
            try:
                found.append(future.result())
            except Unreadable as error:
                unreadable.append((student, files.plain(str(error))))
            except Exception as error:  # whatever it is: the others go on, and it has its row
                unreadable.append((student, files.plain(
                    f"could not be read on this machine: {type(error).__name__}: {error}")))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        looker.close()
    return _distinct(found), unreadable


def _at_once(options) -> int:
    return options.at_once or max(1, cores.available() // 2)


def _distinct(found: list[Submission]) -> list[Submission]:
    """With a file's path for the student where one has handed in two files of one notebook."""
    taken = Counter((one.student, one.lesson.name) for one in found)
    found = [replace(one, student=files.shown(str(one.path.with_suffix(""))))
             if taken[one.student, one.lesson.name] > 1 else one for one in found]
    assert len({(one.student, one.lesson.name) for one in found}) == len(found)
    return found


# What another run may find otherwise: with more seconds, or on a machine that is less busy.
_NOT_KEPT = (TIMED_OUT, BROKEN)
# The inputs of all exercises come from it: nobody can know them before, and in one run all students
# have the same.
_RUN = secrets.token_hex(16)


class Session:
    """One run. done: what results.jsonl holds, one entry for each submission."""

    def __init__(self, options, found: list[Submission], out: Path):
        self._options, self._found, self.out = options, found, out
        self._folder = out.with_suffix("")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._records = self._folder / "results.jsonl"
        self.done: list[dict] = []
        self._others: list[dict] = []
        self._solutions: evidence.Solutions | None = None
        self._began = time.monotonic()

    def run(self) -> None:
        """Grades all that is not graded yet. Raises Unavailable."""
        before = self._before()
        todo = []
        for one in self._found:
            kept = before.pop((one.student, one.lesson.name, self._key(one)), None)
            if kept and not self._options.again and not _may_differ(kept):
                self.done.append(kept)
            else:
                todo.append(one)
        self._others = [record for record in before.values() if not self._is_asked(record)]
        self._rewrite()
        if self.done:
            print(f"{len(self.done)} graded before, and unchanged", flush=True)
        if todo:
            self._grade(todo)

    def _is_asked(self, record) -> bool:
        """Whether this run grades all of a record again: then its code has changed."""
        asked = {exercise.number for one in self._found for exercise in one.lesson.exercises
                 if (one.student, one.lesson.name) == (record["student"], record["lesson"])}
        return asked >= {each["number"] for each in record["exercises"]}

    def _grade(self, todo):
        if self._options.unsafe:
            print(UNSAFE, file=sys.stderr)
        sandbox = Sandbox(sorted({one.lesson.package for one in todo}),
                          not self._options.unsafe, self._options.seconds)
        if not self._options.unsafe:  # else all interfaces are the machine's
            self._solutions = evidence.Solutions(
                ROOT, functools.partial(grade_exercise, sandbox))
        pool = ThreadPoolExecutor(_at_once(self._options))
        try:
            sandbox.probe()
            waiting = [(one, [pool.submit(self._graded, sandbox, one, exercise)
                              for exercise in one.lesson.exercises]) for one in todo]
            for number, (one, futures) in enumerate(waiting, 1):
                self._progress(number, len(waiting), one)
                self._add(one, [future.result() for future in futures])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            sandbox.close()

    def _graded(self, sandbox, one, exercise) -> Graded:
        found = grade_exercise(sandbox, one.lesson, exercise, one.looked)
        if self._solutions is None:
            return found
        return self._solutions.judged(one.lesson, exercise, found)

    def _progress(self, number, of, one):
        if sys.stdout.isatty():
            print(f"\r\x1b[K[{number} of {of}] {one.student}: {one.lesson.name}, "
                  f"{time.monotonic() - self._began:.0f} s", end="", flush=True)

    def _add(self, one, graded: list[Graded]):
        points = [self._points(exercise) for exercise in one.lesson.exercises]
        exercises = [{"number": exercise.number, "outcome": found.outcome,
                      "points": worth if found.outcome == PASSED else 0.0, "of": worth,
                      "sentence": found.sentence, "hint": found.hint,
                      "seconds": round(found.seconds, 2), "sent": found.sent}
                     for exercise, found, worth in zip(one.lesson.exercises, graded, points,
                                                       strict=True)]
        forged = [f"{each['number']} {each['sentence']}" for each in exercises
                  if each["outcome"] == FORGED]
        record = {"student": one.student, "lesson": one.lesson.name,
                  "file": files.shown(str(one.path)), "key": self._key(one), "forged": forged,
                  "remarks": [*map(files.plain, one.looked["remarks"])],
                  "exercises": exercises}
        self.done.append(record)
        with open(self._records, "a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        clear = "\r\x1b[K" * sys.stdout.isatty()
        print(f"{clear}{table.in_words(record)}", flush=True)

    def _points(self, exercise) -> float:
        return self._options.points.get(exercise.number, exercise.points)

    def _key(self, one) -> str:
        """Of what the points depend on: the code, the exercises, and our own code."""
        asked = [[exercise.number, self._points(exercise)]
                 for exercise in one.lesson.exercises]
        key = [one.looked["digest"], asked, _our_code(), self._options.unsafe]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()

    def _before(self) -> dict[tuple, dict]:
        """What an earlier run has left, by student, lesson and key."""
        found = {}
        if self._records.exists():
            for line in self._records.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except ValueError:  # an interrupt may have cut the last one
                    continue
                found[record["student"], record["lesson"], record["key"]] = record
        return found

    def _rewrite(self):
        """Leaves in the records what still holds."""
        self._records.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n"
                                         for record in [*self._others, *self.done]),
                                 encoding="utf-8")

    def write(self, unreadable: list[tuple[str, str]]) -> None:
        """Writes the table, a page for each student, and the class's."""
        self.done.sort(key=lambda record: (record["student"], record["lesson"]))
        table.write(self.out, self.done, unreadable, self.notes())
        feedback.write(self._folder, self.done, self.notes())

    def notes(self) -> list[str]:
        """What the summary and the class's page say of this machine."""
        return self._solutions.failures() if self._solutions else []

    def in_words(self) -> str:
        """One line on the whole run."""
        seconds = sum(each["seconds"] for one in self.done for each in one["exercises"])
        each = f", {seconds / len(self.done):.1f} s each" if self.done else ""
        forged = sum(bool(one["forged"]) for one in self.done)
        notes = "".join(f"\n{note}" for note in self.notes())
        return (f"{len(self.done)} of {len(self._found)} submissions graded in "
                f"{time.monotonic() - self._began:.0f} s{each}; {forged} forged{notes}")


def _may_differ(record) -> bool:
    return any(each["outcome"] in _NOT_KEPT for each in record["exercises"])


@functools.cache
def _our_code() -> str:
    """A hash of labs and of the grader."""
    files = [path for folder in (ROOT / "labs", Path(__file__).parent, ROOT / "solutions")
             for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()


def grade_exercise(sandbox: Sandbox, lesson: Lesson, exercise: Exercise, looked: dict) -> Graded:
    """Grades one exercise of a submission; what must not run is not run."""
    plan = looked["exercises"][exercise.number]
    if plan["outcome"]:
        return Graded(plan["outcome"], files.plain(plan["sentence"]))
    cells = _previous_work(lesson, exercise)
    for number, keep in plan["keep"]:
        name, source, file = looked["parts"][number]
        cells.append({"name": name, "source": source, "keep": keep, "file": file})
    seed = hashlib.sha256(f"{exercise.number} {_RUN}".encode()).hexdigest()
    apart = exercise.number in judged_apart.EXERCISES
    try:
        return sandbox.grade({"seed": seed, "apart": apart, "modules": sorted(
                                  reach.modules_for(lesson, exercise)) if apart else [],
                              "package": lesson.package, "check": exercise.check,
                              "arguments": list(exercise.arguments), "cells": cells})
    except Exception as error:  # of this machine: the others go on
        why = files.plain(f"{type(error).__name__}: {error}")
        return Graded(BROKEN, f"this machine could not grade it: {why}")


def _previous_work(lesson, exercise) -> list[dict]:
    """Where an exercise goes on with the student's zero3 (8.1, 8.2): our notebook 03 as a file in
    the working folder, so that nobody loses a point there for the notebook before."""
    if "zero3" not in exercise.arguments or not any(
            "your_zero3(" in cell.source for cell in lesson.cells if not cell.gap):
        return []
    path = ROOT / "solutions" / "03_zero_stages.ipynb"
    if not path.exists():
        return []
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell.pop("attachments", None)
        if cell["cell_type"] == "code":
            cell["outputs"] = []
    return [{"name": path.name, "source": json.dumps(notebook), "keep": [], "file": path.name}]
