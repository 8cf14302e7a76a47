"""Reads a py:percent source into cells, each knowing where it stands in the file."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import jupytext

MARKER = re.compile(r"^\s*### (BEGIN|END) SOLUTION\s*$")
LIKE_A_MARKER = re.compile(r"#\s*(BEGIN|END)\W+SOLUTION", re.IGNORECASE)
HEADER = re.compile(r"\A(# ---\n(?:#.*\n)*?# ---\n)")
CELL_START = re.compile(r"^# ?%%")
LAYOUT = {"lines_to_next_cell", "cell_marker"}  # jupytext's notes on how the .py file looks
ROLES = {"solution-only", "student-only"}
CHECK = re.compile(r"^lab\.check_\w+\(", re.MULTILINE)
# A cell that stands for a script of solutions/scripts, see `_insert_script`.
SCRIPT = re.compile(r'lab\.write_script\("(\w+\.py)"\)')
COMPARED = "nbval-check-output"  # what a check says in CI must be what it says in the solution


@dataclass
class Region:
    """A solution: the marker lines' indices in the cell, and the lines between them."""

    begin: int
    end: int
    lines: list[str]

    @property
    def code(self):
        """(index in the cell, text) of each line that is neither blank nor only a comment."""
        numbered = enumerate(self.lines, self.begin + 1)
        return [(i, line) for i, line in numbered if line.strip() and line.strip()[0] != "#"]

    @property
    def indent(self):
        """Columns before the least-indented line of code."""
        return min(len(line) - len(line.lstrip()) for _, line in self.code)


@dataclass
class Cell:
    """A cell of the source; `number` and `line` count from 1, `line` in the .py file. script: the
    file that the cell writes; then `path` is its source, whose first line follows the magic line."""

    path: str
    number: int
    line: int
    kind: str
    source: str
    metadata: dict = field(default_factory=dict)
    role: str = ""
    regions: list[Region] = field(default_factory=list)
    id: str = ""
    script: str = ""

    @property
    def lines(self):
        return self.source.split("\n")

    @property
    def title(self):
        """The first line a reader would know the cell by; never a line of a solution."""
        inside = {i for r in self.regions for i in range(r.begin, r.end + 1)}
        shown = [line.strip() for i, line in enumerate(self.lines) if i not in inside]
        return next((line for line in shown if line and not MARKER.match(line)), "")

    def solution_lines(self):
        """(line in the .py file, text) of the cell as the solution notebook shows it."""
        numbered = enumerate(self.lines, self.line)
        return [(n, line) for n, line in numbered if not (self.regions and MARKER.match(line))]

    def problem(self, index, sentence):
        """The sentence, preceded by the file, the line at `index` in the cell, and the cell."""
        title = self.title if len(self.title) <= 60 else self.title[:57] + "..."
        line = max(1, self.line + index)
        return f"{self.path}:{line}: cell {self.number} ({title!r}): {sentence}"


def read_source(path: Path, shown_as: str):
    """Read a py:percent file; returns (cells, problems), each problem one sentence."""
    text = path.read_text(encoding="utf-8")
    text = HEADER.sub(lambda header: "\n" * header[0].count("\n"), text)
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if line.strip()), 0)
    if not CELL_START.match(lines[first]):
        return [], [f"{shown_as}:{first + 1}: text before the first cell; start it with '# %%'."]
    try:
        parsed = jupytext.reads("\n".join(lines[first:]), fmt="py:percent").cells
    except Exception as error:
        return [], [f"{shown_as}:1: jupytext cannot read it: {error}"]
    cells = [_cell(shown_as, number, raw) for number, raw in enumerate(parsed, 1)]
    _locate(cells, lines)
    missing = [problem for cell in cells for problem in _insert_script(cell, path.parent)]
    return cells, missing + [problem for cell in cells for problem in _prepare(cell)]


def _cell(path, number, raw):
    metadata = {k: v for k, v in raw.metadata.items() if k not in LAYOUT}
    tags = metadata.pop("tags", [])
    role = next((tag for tag in tags if tag in ROLES), "")
    tags = [tag for tag in tags if tag not in ROLES]
    if raw.cell_type == "code" and CHECK.search(raw.source) and COMPARED not in tags:
        tags.append(COMPARED)
    if tags:
        metadata["tags"] = tags
    return Cell(path, number, 0, raw.cell_type, raw.source.rstrip(), metadata, role)


def _locate(cells, lines):
    """Set each cell's line. Counting its lines skips a '# %%' that stands inside a string."""
    at = 0
    for cell in cells:
        while not CELL_START.match(lines[at]):
            at += 1
        cell.line = at + 2
        at += 1 + len(cell.lines) if cell.source else 1


def _insert_script(cell, folder):
    """Puts the text of a script in the place of the call that stands for it, so that a student
    sees and edits the file in the notebook; yields what is wrong."""
    call = cell.kind == "code" and SCRIPT.fullmatch(cell.source.strip())
    if not call:
        return
    path = folder / "scripts" / call[1]
    if not path.is_file():
        yield cell.problem(0, f"there is no solutions/scripts/{call[1]}.")
        return
    cell.script, cell.path, cell.line = call[1], f"solutions/scripts/{call[1]}", 0
    cell.source = f"%%writefile {call[1]}\n{path.read_text(encoding='utf-8').rstrip()}"


def _prepare(cell):
    """Fill in the cell's regions; yields what is wrong with its markers."""
    if not cell.source.strip():
        yield cell.problem(0, "the cell is empty.")
    begin = None
    for index, line in enumerate(cell.lines):
        marker = cell.kind == "code" and MARKER.match(line)
        if not marker:
            if LIKE_A_MARKER.search(line):
                yield cell.problem(
                    index,
                    f"{line.strip()!r} is no marker; write ### BEGIN SOLUTION or "
                    "### END SOLUTION on a line of its own, in a code cell.",
                )
        elif marker[1] == "BEGIN":
            if begin is not None:
                yield cell.problem(index, "BEGIN SOLUTION inside a solution; end that one first.")
            begin = index if begin is None else begin
        elif begin is None:
            yield cell.problem(index, "END SOLUTION without a BEGIN SOLUTION before it.")
        else:
            cell.regions.append(Region(begin, index, cell.lines[begin + 1 : index]))
            begin = None
    if begin is not None:
        yield cell.problem(begin, "BEGIN SOLUTION is never followed by END SOLUTION in its cell.")
