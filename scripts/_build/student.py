"""The student's version of a cell: gaps in place of solutions, and no solution anywhere else."""

import ast
import contextlib
import re
import textwrap

EXERCISE = re.compile(r"""[\s#*_>"']*(?:<[^>]+>\s*)*[*_]*Exercise\s+(\d+\.\d+)""")
GUESS = re.compile(r"#\s*A guess\b")
HEADING = re.compile(r"#+\s.*\bExercise\s+(\d+\.\d+)")
TRIVIAL = re.compile(
    r"""(?:import|from)\s.*                       # an import
    | return(?:\s+[\w.]+(?:,\s*[\w.]+)*)?         # a return of names
    | (?:for|with|def|class|else|try|except|finally|async)\b.*:   # the head of a block
    | if\s__name__\s==\s["']__main__["']:          # the guard of a script
    | [\w.()]+\(\)                                # a call without arguments
    | self\.(\w+)\s*=\s*\1                        # an argument stored under its own name
    """,
    re.VERBOSE,
)
SHORTEST_SECRET = 12


class GapError(Exception):
    """A solution that cannot become a gap: (index of the line in the cell, sentence)."""


def student_sources(cells):
    """(text of each student cell by cell number, problems). Solution-only cells are left out."""
    sources, problems = {}, []
    for cell in (cell for cell in cells if cell.role != "solution-only"):
        text, wrong = _student_source(cells, cell)
        problems += wrong
        if not wrong:
            sources[cell.number] = text
    return sources, problems + list(_leaks(cells, sources))


def exercise_number(cells, cell, index):
    """'2.2' of the nearest 'Exercise 2.2' above line `index`; None without one.

    Looked for in the cell's own comments and docstrings, which must start with the words, then in
    the markdown cells before it: a line that starts with the words, or a heading that has them.
    """
    remarks = [line for line in cell.lines[:index] if _is_remark(line)]
    number = _last_exercise(remarks, EXERCISE)
    for before in reversed(cells[: cell.number - 1]):
        if number:
            break
        if before.kind == "markdown":
            number = _last_exercise(before.lines, HEADING, EXERCISE)
    return number


def _student_source(cells, cell):
    """(the cell's text with each solution replaced by its gap, problems)."""
    lines, problems, done = [], [], 0
    for region in cell.regions:
        lines += cell.lines[done : region.begin]
        done = region.end + 1
        try:
            lines += _gap(cell, region, exercise_number(cells, cell, region.begin))
        except GapError as error:
            problems.append(cell.problem(*error.args))
    source = "\n".join(lines + cell.lines[done:]).rstrip()
    if cell.regions and not problems and not _parse(source):
        begin = cell.regions[0].begin
        problems.append(cell.problem(begin, "with its solution cut out the cell is not Python."))
    return source, problems


def _leaks(cells, sources):
    """Yields one sentence for each solution line that shows in a student cell.

    A line is a secret unless it is shorter than 12 characters or trivial: an import, a return of
    names, the head of a block, a script's guard, a call without arguments,
    `self.x = x`. Spacing and the kind of
    quotes make no difference.
    """
    shown = {c.number: c for c in cells if c.number in sources}
    texts = {number: tokens(text) for number, text in sources.items()}
    for secret, origin in secrets(cells).items():
        for number, cell in shown.items():
            if f" {secret} " in texts[number]:
                yield cell.problem(_line_of(cell, secret), _leak_sentence(origin))


def _gap(cell, region, exercise):
    if cell.role == "student-only":
        raise GapError(region.begin, "a solution in a student-only cell.")
    if not region.code:
        raise GapError(region.begin, "the solution is empty.")
    if not exercise and not is_guess(cell, region):
        raise GapError(
            region.begin,
            "a solution without an exercise number; start the cell with '# Exercise N.M: ...', or "
            "with '# A guess ...' where it only sets names.",
        )
    if region.indent == 0:
        return _waiting_names(region)
    if not _in_function(cell, region):
        raise GapError(
            region.begin,
            "an indented solution must stand inside a function; here its "
            "gap would raise when an untouched notebook is run.",
        )
    indent = " " * region.indent
    return [
        f"{indent}# your code here",
        f'{indent}raise NotImplementedError("Exercise {exercise}")',
    ]


def is_guess(cell, region):
    """Whether the gap will hold names alone, in a cell that says that it is a guess: nothing in it
    raises, so it needs no number of an exercise."""
    return region.indent == 0 and bool(GUESS.match(cell.lines[0]))


def _waiting_names(region):
    """`name = ...` for each assignment of a top-level solution."""
    tree = _parse("\n".join(region.lines))
    if not tree:
        raise GapError(region.code[0][0], "the solution is not Python by itself.")
    gap = []
    for statement in tree.body:
        if not _is_simple(statement):
            raise GapError(
                region.begin + statement.lineno,
                "a solution outside a function may hold only 'name = value' lines.",
            )
        gap.append(f"{statement.targets[0].id} = ...  # your answer")
    return gap


def _is_simple(statement):
    return (
        isinstance(statement, ast.Assign)
        and len(statement.targets) == 1
        and isinstance(statement.targets[0], ast.Name)
    )


def _in_function(cell, region):
    """Whether one function's body holds all of the solution."""
    tree = _parse(cell.source)
    first, last = region.code[0][0] + 1, region.code[-1][0] + 1
    return any(
        node.lineno < first and last <= node.end_lineno
        for node in ast.walk(tree or ast.Module([], []))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _parse(source):
    """The syntax tree, None if it is not Python. Lines for IPython (%magic, !command) pass."""
    source = textwrap.dedent(source)
    for text in (source, re.sub(r"^(\s*)[%!].*$", r"\1pass", source, flags=re.MULTILINE)):
        with contextlib.suppress(SyntaxError):
            return ast.parse(text)
    return None


def _is_remark(line):
    return line.lstrip().startswith(("#", '"""', "'''", 'r"""'))


def _last_exercise(lines, *patterns):
    found = [m[1] for line in lines for pattern in patterns if (m := pattern.match(line))]
    return found[-1] if found else None


def secrets(cells):
    """Maps each secret line, as tokens, to (its cell, the line as written)."""
    found = {}
    for cell in cells:
        for line in (line for region in cell.regions for line in region.lines):
            bare = re.sub(r"\s+# .*", "", line).strip()
            words = tokens(bare.lstrip("# ")).strip()
            if not TRIVIAL.fullmatch(bare) and len(words.replace(" ", "")) >= SHORTEST_SECRET:
                found.setdefault(words, (cell, bare))
    return found


def tokens(text):
    """The text as words and signs with one space between, so that layout makes no difference."""
    found = re.findall(r"\w+|[^\w\s]", text.replace('"', "'"))
    return f" {' '.join(found)} "


def _line_of(cell, secret):
    found = (
        i
        for i, line in enumerate(cell.lines)
        if f" {secret} " in tokens(line) and not _in_region(cell, i)
    )
    return next(found, 0)


def _in_region(cell, index):
    return any(region.begin <= index <= region.end for region in cell.regions)


def _leak_sentence(origin):
    cell, line = origin
    return (
        f"the student notebook shows {line!r} here, a line of the solution in cell "
        f"{cell.number}; move it into the solution or write it differently."
    )
