"""The shape of an answer: what stays of its code when names and layout are changed.

An answer's syntax tree is written as a sequence of nodes. Kept are the kinds of nodes, attributes
(`.all_reduce`), names that come from outside the answer (`torch`, `dist`), and numbers. Left out
are comments, docstrings, annotations, the text of strings, and the names that the answer itself
binds: those are all one name. Of the sequence all runs of 6 nodes are counted; runs that the
student's notebook has already, in the head of a function that is given, are taken off. (The idea is
that of MOSS: Schleimer, Wilkerson and Aiken, "Winnowing", SIGMOD 2003, section 2.)
"""

import ast
import zlib
from collections import Counter
from collections.abc import Iterator

from _grade import submissions
from _grade.lessons import Exercise
from _grade.submissions import Submission

RUN = 6  # nodes
_LONGEST = 20_000  # runs that are counted of one answer: ours have at most 460


def shape_of(one: Submission, exercise: Exercise) -> dict[str, int]:
    """Run of nodes, as a number -> how often the submission's answer to an exercise has it. The
    answer: the cells of its own between the check before and this one's, as far as the exercise
    needs them."""
    all_parts, places = one.layout
    before = [each.cell for each in one.lesson.exercises if each.cell < exercise.cell]
    cells = range(max(before, default=-1) + 1, exercise.cell + 1)
    first = places[cells[0]]
    near = {id(part) for part in all_parts[first:places[exercise.cell] + 1] if part.own}
    body = [part.body[index] for part, kept in submissions.needed(one, exercise)
            if id(part) in near for index in kept]
    given = [node for number in cells if one.lesson.cells[number].gap
             for node in submissions.parse(one.lesson.cells[number].source)]
    return dict((runs_of(body) - runs_of(given)).most_common(_LONGEST))


def runs_of(body: list[ast.stmt]) -> Counter:
    """The runs of nodes of these statements, each as a number."""
    own = {name for node in body for name in _bound_in(node)}
    nodes = [word for node in body for word in _words(node, own)]
    return Counter(str(zlib.crc32(" ".join(nodes[begin:begin + RUN]).encode(errors="replace")))
                   for begin in range(len(nodes) - RUN + 1))


def _bound_in(node) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each.name
        elif isinstance(each, ast.arg):
            yield each.arg
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id


def _words(node, own) -> Iterator[str]:
    """The nodes below a statement in their order, each as a word; without recursion, because code
    may be nested deeper than Python's stack."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
            continue  # a docstring
        kind = type(each).__name__
        if isinstance(each, ast.Name):
            yield "name" if each.id in own else each.id
        elif isinstance(each, ast.Attribute):
            yield f".{'name' if each.attr in own else each.attr}"
        elif isinstance(each, ast.Constant):
            yield kind if isinstance(each.value, str | bytes) else repr(each.value)[:40]
        elif not isinstance(each, ast.expr_context | ast.arguments):
            yield kind
        children = [child for name, value in ast.iter_fields(each)
                    if name not in ("annotation", "returns", "type_comment")
                    for child in (value if isinstance(value, list) else [value])
                    if isinstance(child, ast.AST)]
        waiting += reversed(children)
