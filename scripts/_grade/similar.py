"""Answers that are one another's code, or the solution's: a list to look at, no accusation.

Left out are exercises whose solution is shorter than SHORTEST runs of nodes, because all right
answers to them look alike, and answers of which less than SHARE is equal.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from _grade import files, static_look
from _grade.class_page import title_of
from _grade.files import Unreadable
from _grade.handed_in import Row
from _grade.lessons import Lesson
from _grade.look import Known
from _grade.sandbox import ROOT

SHORTEST = 60  # runs of nodes of a solution, some 6 lines: 48 of our 112 exercises are shorter
SHARE = 0.8
SOLUTION = "the solution"
HEAD = """\
Answers that are alike. This is a list to look at, not an accusation: a team may have been allowed,
and a notebook's hints lead many to the same lines. Compared are syntax trees, without names, texts
and comments; numbers are kept. The share is that of the longer answer. Exercises with a solution of
less than {} nodes are left out, and shares below {:.0%}.
"""


@dataclass(frozen=True)
class Pair:
    """Two answers to an exercise. nodes: how many are equal. share: of the longer answer."""

    number: str
    first: str
    second: str
    nodes: int
    share: float

    def __str__(self):
        return (f"{self.share:4.0%} of {self.nodes / self.share:5.0f} nodes  "
                f"{title_of(self.number)}: {self.first}, {self.second}")


def listed(rows: list[Row], paths: dict[str, Path], lessons: list[Lesson], look: Callable,
           at_once: int, only: list[str] | None = None) -> str:
    """The list. look: `Sandbox.look`. only: numbers of exercises."""
    known = Known(lessons, static_look.notebooks_imports(), shapes=True).as_json()

    def looked_at(name, path):
        try:
            shapes = look(files.read(path), known)["shapes"]
            return name, {number: shape for number, shape in shapes.items()
                          if not only or number in only}
        except Unreadable:
            return name, {}

    handed_in = [(row.label, paths[one["file"]]) for row in rows for one in row.records
                 if one["file"] in paths]
    taken = {one["lesson"] for row in rows for one in row.records}
    solutions = [(SOLUTION, ROOT / "solutions" / f"{name}.ipynb") for name in sorted(taken)]
    with ThreadPoolExecutor(at_once) as pool:
        found = list(pool.map(lambda each: looked_at(*each), [*handed_in, *solutions]))
    lines = [str(pair) for pair in pairs(found)]
    return "\n".join([HEAD.format(SHORTEST, SHARE), *(lines or ["No two answers are alike."]), ""])


def pairs(found: list[tuple[str, dict[str, dict[str, int]]]]) -> list[Pair]:
    """The pairs of answers that are alike, the longest equal code first. found: (name, exercise ->
    shape), SOLUTION among them."""
    shapes: dict[str, list[tuple[str, Counter, int]]] = {}
    for name, exercises in found:
        for number, shape in exercises.items():
            if shape:
                shapes.setdefault(number, []).append((name, Counter(shape), sum(shape.values())))
    alike = []
    for number, answers in shapes.items():
        if max((size for name, _, size in answers if name == SOLUTION), default=0) < SHORTEST:
            continue
        for place, (first, one, size) in enumerate(answers):
            for second, other, its_size in answers[place + 1:]:
                longer = max(size, its_size)
                # min() first: no intersection where the lengths alone say that it is too small
                if first == second or min(size, its_size) < SHARE * longer:
                    continue
                equal = (one & other).total()
                if equal >= SHARE * longer:
                    alike.append(Pair(number, first, second, equal, equal / longer))
    return sorted(alike, key=lambda pair: (-pair.nodes, pair.number, pair.first, pair.second))
