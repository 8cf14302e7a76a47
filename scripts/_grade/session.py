"""Grades submissions, several exercises at a time, and keeps what was found after each."""

import functools
import hashlib
import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from _grade import feedback, static_look, submissions, table
from _grade.lessons import Exercise, Lesson, read_lessons
from _grade.namespaces import OWN_FOLDERS
from _grade.sandbox import (
    BROKEN,
    FLAGGED,
    PASSED,
    ROOT,
    TIMED_OUT,
    WAITING,
    WRONG,
    Graded,
    Misplaced,
    Sandbox,
    Unavailable,
)
from _grade.submissions import Submission, Unreadable
from labs.workers import cores

UNSAFE = ("--unsafe: no namespaces. A submission can read and write what you can, other "
          "submissions too, and reach the network; only limits of time and memory hold.")
REFUSED = """\
This machine does not let a program make namespaces: {why}
Without them it cannot be guaranteed that a submission does not read your files or other
submissions, write into them, reach the network, or leave a process behind. As root it works, or
where `unshare -Ur true` does; a container needs --security-opt seccomp=unconfined and
systempaths=unconfined. On a machine that holds nothing worth reading, `--unsafe` grades without."""
MISPLACED = """\
{path} is needed to grade, but {own} is an empty folder of its own for each submission.
Move the checkout, and its Python, to another folder; or `--unsafe` grades without namespaces."""
NO_LINUX = "scripts/grade needs Linux, where each exercise gets namespaces of its own."


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
    lessons = _chosen(lessons, options.only)
    found, unreadable = _read(given, lessons)
    for student, why in unreadable:
        print(f"{student}: {why}", file=sys.stderr)
    session = Session(options, found, out)
    interrupted = False
    try:
        session.run()
    except Unavailable as error:
        print(REFUSED.format(why=error), file=sys.stderr)
        return 3
    except Misplaced as error:
        own = next(own for own in OWN_FOLDERS if str(error).startswith(own))
        print(MISPLACED.format(path=error, own=own), file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        interrupted = True
    except BaseException:
        session.write(unreadable)
        raise
    session.write(unreadable)
    flagged = [one for one in session.done if one["flagged"]]
    print(f"\n{session.in_words()}\n{out}\n{out.with_suffix('') / 'class.html'}")
    return 130 if interrupted else int(bool(unreadable or flagged))


def _chosen(lessons, only) -> list[Lesson]:
    """The lessons with the exercises that were asked for; all lessons stay, to be recognized."""
    return [Lesson(lesson.name, lesson.cells, [one for one in lesson.exercises
                                               if not only or one.number in only])
            for lesson in lessons]


def _read(given, lessons) -> tuple[list[Submission], list[tuple[str, str]]]:
    found, unreadable = [], []
    for student, path in submissions.files_of(given):
        try:
            found.append(submissions.read(student, path, lessons))
        except Unreadable as error:
            unreadable.append((student, str(error)))
    return _distinct(found), unreadable


def _distinct(found: list[Submission]) -> list[Submission]:
    """With a file's path for the student where one has handed in two files of one notebook."""
    taken = Counter((one.student, one.lesson.name) for one in found)
    found = [replace(one, student=str(one.path.with_suffix("")))
             if taken[one.student, one.lesson.name] > 1 else one for one in found]
    assert len({(one.student, one.lesson.name) for one in found}) == len(found)
    return found


# What another run may find otherwise: with more seconds, or on a machine that is less busy.
_NOT_KEPT = (TIMED_OUT, BROKEN)


class Session:
    """One run. done: what results.jsonl holds, one entry for each submission."""

    def __init__(self, options, found: list[Submission], out: Path):
        self._options, self._found, self._out = options, found, out
        self._folder = out.with_suffix("")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._records = self._folder / "results.jsonl"
        self.done: list[dict] = []
        self._others: list[dict] = []
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
        pool = ThreadPoolExecutor(self._options.at_once or max(1, cores.available() // 2))
        try:
            sandbox.probe()
            waiting = [(one, [pool.submit(grade_exercise, sandbox, one, exercise)
                              for exercise in one.lesson.exercises]) for one in todo]
            for number, (one, futures) in enumerate(waiting, 1):
                self._progress(number, len(waiting), one)
                self._add(one, [future.result() for future in futures])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            sandbox.close()

    def _progress(self, number, of, one):
        if sys.stdout.isatty():
            print(f"\r\x1b[K[{number} of {of}] {one.student}: {one.lesson.name}, "
                  f"{time.monotonic() - self._began:.0f} s", end="", flush=True)

    def _add(self, one, graded: list[Graded]):
        points = [self._points(exercise) for exercise in one.lesson.exercises]
        exercises = [{"number": exercise.number, "outcome": found.outcome,
                      "points": worth if found.outcome == PASSED else 0.0, "of": worth,
                      "sentence": found.sentence, "hint": found.hint,
                      "seconds": round(found.seconds, 2)}
                     for exercise, found, worth in zip(one.lesson.exercises, graded, points,
                                                       strict=True)]
        flagged = [f"{each['number']} {each['sentence']}" for each in exercises
                 if each["outcome"] == FLAGGED] + remarks(one)
        record = {"student": one.student, "lesson": one.lesson.name, "file": str(one.path),
                  "key": self._key(one), "flagged": flagged, "exercises": exercises}
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
        return hashlib.sha256(json.dumps([one.digest, asked, _our_code(), self._options.unsafe],
                                         ).encode()).hexdigest()

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
        table.write(self._out, self.done, unreadable)
        feedback.write(self._folder, self.done)

    def in_words(self) -> str:
        """One line on the whole run."""
        seconds = sum(each["seconds"] for one in self.done for each in one["exercises"])
        each = f", {seconds / len(self.done):.1f} s each" if self.done else ""
        flagged = sum(bool(one["flagged"]) for one in self.done)
        return (f"{len(self.done)} of {len(self._found)} submissions graded in "
                f"{time.monotonic() - self._began:.0f} s{each}; {flagged} flagged")


def _may_differ(record) -> bool:
    return any(each["outcome"] in _NOT_KEPT for each in record["exercises"])


@functools.cache
def _our_code() -> str:
    """A hash of labs and of the grader."""
    files = [path for folder in (ROOT / "labs", Path(__file__).parent, ROOT / "solutions")
             for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()


def remarks(one: Submission) -> list[str]:
    """What is wrong with code that no exercise needs, and that was not run: only what forges."""
    found = [f"cell {cell.number} {why}" for cell in one.cells if not _is_ours(cell, one.lesson)
             for why in static_look.forgeries(submissions.parse(cell.source))]
    return list(dict.fromkeys(found))


def _is_ours(cell, lesson) -> bool:
    return any(cell.source.strip() == clean.source.strip() for clean in lesson.cells)


def grade_exercise(sandbox: Sandbox, one: Submission, exercise: Exercise) -> Graded:
    """Grades one exercise of one submission; what must not run is not run."""
    kept = submissions.needed(one, exercise)
    for part, numbers in kept:
        body = [part.body[number] for number in numbers]
        if part.own and (why := next(static_look.findings(body), "")):
            return Graded(FLAGGED, f"{part.name} {why}")
    own = [part.source.strip() for part, _ in kept if part.own]
    if not own:
        why = submissions.not_python(one)
        return Graded(WRONG, why) if why else Graded(WAITING, "is waiting for your answer")
    if set(own) <= {submissions.parsed(cell.source)[0].strip() for cell in one.lesson.cells}:
        return Graded(WAITING, "is waiting for your code")
    seed = hashlib.sha256(f"{exercise.number} {_our_code()}".encode()).hexdigest()
    work = {"seed": seed, "package": one.lesson.package, "check": exercise.check,
            "arguments": list(exercise.arguments),
            "cells": [{"name": part.name, "source": part.source, "keep": numbers,
                       "file": part.file}
                      for part, numbers in kept]}
    try:
        return sandbox.grade(work)
    except (OSError, RuntimeError, ValueError) as error:  # of this machine: the others go on
        return Graded(BROKEN, f"this machine could not grade it: {type(error).__name__}: {error}")
