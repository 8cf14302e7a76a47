"""Looks through a submission without running it: which statements each exercise needs, and what in
them no answer needs. It has a process of its own behind the walls, because a parser can be made to
take hours, all memory, or to crash.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from _grade import judged_apart, static_look, submissions
from _grade.files import Unreadable
from _grade.lessons import CleanCell, Exercise, Lesson
from _grade.outcomes import NOT_ALLOWED, WAITING, WRONG
from _grade.shapes import shape_of
from _grade.submissions import Submission

TOO_DEEP = "is nested too deeply to be read"


@dataclass(frozen=True)
class Known:
    """What the look compares with: the lessons, how the notebooks import labs, and which exercises
    are judged apart. shapes: whether it returns the shapes of the answers, too."""

    lessons: list[Lesson]
    imports: frozenset[str]
    shapes: bool = False
    apart: frozenset[str] = judged_apart.EXERCISES

    def as_json(self) -> dict:
        return {"lessons": [asdict(lesson) for lesson in self.lessons],
                "imports": sorted(self.imports), "shapes": self.shapes,
                "apart": sorted(self.apart)}

    @classmethod
    def of_json(cls, found: dict) -> "Known":
        return cls([Lesson(each["name"], [CleanCell(**cell) for cell in each["cells"]],
                           [Exercise(**one) for one in each["exercises"]])
                    for each in found["lessons"]], frozenset(found["imports"]),
                   found.get("shapes", False), frozenset(found["apart"]))


def main(job: int, answer: int, _alarm: int) -> None:
    """Reads a job, {"known": ..., "bytes": n} and behind that line the file's n bytes, and writes
    what `look_through` returns."""
    with open(job, "rb") as file:
        file.read(32)  # the secret with which exercises seal their verdicts
        known = Known.of_json(json.loads(file.readline()))
        data = file.read()
    with open(answer, "wb") as file:
        file.write(json.dumps(look_through(data, known)).encode())


def look_through(data: bytes, known: Known) -> dict:
    """{"unreadable": why}; or the name of its lesson, a digest of its code, remarks on what is not
    run, the shapes of its answers, its parts, and for each exercise either an outcome and a
    sentence, or what to keep of which part."""
    try:
        one = submissions.parse_notebook("", Path(), data, known.lessons)
    except Unreadable as error:
        return {"unreadable": str(error)}
    all_parts = one.layout[0]
    place = {id(part): number for number, part in enumerate(all_parts)}
    exercises = {}
    for exercise in one.lesson.exercises:
        outcome, sentence, kept = exercise_of(one, exercise, known)
        exercises[exercise.number] = {"outcome": outcome, "sentence": sentence,
                                      "keep": [[place[id(part)], indices]
                                               for part, indices in kept]}
    shapes = {exercise.number: shape_of(one, exercise) for exercise in one.lesson.exercises
              } if known.shapes else {}
    return {"lesson": one.lesson.name, "digest": one.digest, "remarks": remarks(one, known),
            "shapes": shapes, "exercises": exercises, "parts": [[part.name, part.source, part.file]
                                              for part in all_parts]}


def exercise_of(one: Submission, exercise: Exercise, known: Known) -> tuple[str, str, Iterable]:
    """(outcome, sentence, nothing) of an exercise of which nothing must be run, else ("", "", what
    `submissions.needed` returns)."""
    kept = submissions.needed(one, exercise)
    # Where the judge is another process, only what asks labs for the answer matters.
    apart = exercise.number in known.apart
    look = static_look.answers_of_labs if apart else static_look.findings
    for part, numbers in kept:
        if not part.own:
            continue
        try:
            why = next(look((part.body[each] for each in numbers), known.imports), "")
        except RecursionError:  # of ast.unparse
            return WRONG, f"{part.name} {TOO_DEEP}", ()
        if why:
            return NOT_ALLOWED, f"{part.name} {why}", ()
    own = [part.source.strip() for part, _ in kept if part.own]
    if not own:
        why = submissions.not_python(one)
        return (WRONG, why, ()) if why else (WAITING, "is waiting for your answer", ())
    if set(own) <= {submissions.parsed(cell.source)[0].strip() for cell in one.lesson.cells}:
        return WAITING, "is waiting for your code", ()
    return "", "", kept


def remarks(one: Submission, known: Known) -> list[str]:
    """What is wrong with code that no exercise needs, and that was not run: only what forges."""
    ours, found = {cell.source.strip() for cell in one.lesson.cells}, []
    for cell in one.cells:
        if cell.source.strip() in ours:
            continue
        try:
            found += [f"cell {cell.number} {why}" for why in
                      static_look.forgeries(submissions.parse(cell.source), known.imports)]
        except RecursionError:
            continue
    return list(dict.fromkeys(found))
