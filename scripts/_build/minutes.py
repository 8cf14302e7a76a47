"""How long a notebook takes, by one rule for all of them, and how much of what is in it.

Minutes are those of the exercises' lines, words at 150 a minute (folded hints apart), one for each
picture or table that a cell leaves, and the waiting that the reference run on a laptop measured,
spread over the code cells. What stands in a section "Optional…" counts apart.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
from _build.exercises import LINE, SECTION
from _build.lint import HINT, count_words
from _build.source import CHECK, Cell
from _unattended import reference

WORDS_A_MINUTE = 150
SITTING = re.compile(r"^## \w+ sitting · (\d+) minutes$", re.MULTILINE)
TIME = re.compile(r"^\| \*\*Time\*\* \| (\d+) minutes(?: in (\w+) sittings \(([\d+ ]+)\))?"
                  r"(?:, (\d+) more for optional parts)? \|$", re.MULTILINE)
_NAME = re.compile(r"\blab\.(\w+)")
_PICTURE_OR_CHECK = ("check_", "show_", "explore_")
_DRAWN = re.compile(r"<table|<svg")


@dataclass
class Amount:
    """What some cells hold, and its minutes. waiting: in seconds."""

    exercises: int = 0
    exercise_minutes: int = 0
    words: int = 0
    pictures: int = 0
    waiting: float = 0.0

    @property
    def minutes(self) -> float:
        return (self.exercise_minutes + self.words / WORDS_A_MINUTE + self.pictures
                + self.waiting / 60)

    def add(self, cell: Cell, pictures: int, waiting: float) -> None:
        """Counts a cell, with what it leaves and takes."""
        if cell.kind == "markdown":
            self.words += count_words(HINT.sub(" ", cell.source))
            found = [int(line[2]) for line in LINE.finditer(cell.source)]
            self.exercises += len(found)
            self.exercise_minutes += sum(found)
        else:
            self.pictures += pictures
            self.waiting += waiting


@dataclass
class Sitting:
    """What is done in one go: up to the next cell with a heading "… sitting · N minutes"."""

    core: Amount
    optional: Amount


def sittings(cells: list[Cell], executed: Path, waiting: float) -> list[Sitting]:
    """The sittings of a notebook, one at least.

    executed: the solution's .ipynb, of which pictures are counted. waiting: seconds of all cells.
    """
    shown = [cell for cell in cells if cell.role != "solution-only"]
    outputs = {cell.id: cell.get("outputs", ()) for cell in
               nbformat.read(executed, as_version=4).cells}
    each = waiting / max(1, sum(cell.kind == "code" for cell in shown))
    found, optional = [Sitting(Amount(), Amount())], False
    for cell in shown:
        if cell.kind == "markdown":
            if SITTING.search(cell.source):
                found.append(Sitting(Amount(), Amount()))
            for section in SECTION.findall(cell.source):
                optional = section.startswith("Optional")
        part = found[-1].optional if optional else found[-1].core
        part.add(cell, _pictures(cell, outputs.get(cell.id, ())), each)
    return found


def measured_waiting(name: str, root: Path) -> float:
    """Seconds of all cells of a notebook in the reference run without a GPU; 0 where it has none."""
    return next((reference.seconds(run).get(name, 0.0) for run in reference.runs(root)
                 if not run["machine"]["gpus"]), 0.0)


def other_names(cells: list[Cell]) -> list[str]:
    """The names of `lab.` that a student meets in code and that are neither checks nor pictures."""
    found = {name for cell in cells if cell.kind == "code" and not cell.script
             for name in _NAME.findall(cell.source)}
    return sorted(name for name in found if not name.startswith(_PICTURE_OR_CHECK))


def row(name: str, cells: list[Cell], executed: Path, root: Path) -> str:
    """A line of the table of `scripts/build --minutes`."""
    parts = sittings(cells, executed, measured_waiting(name, root))
    core, optional = [[getattr(part, kind) for part in parts] for kind in ("core", "optional")]
    everything = core + optional
    return (f"{name:26}{len(cells):6}{sum(part.words for part in everything):7}"
            f"{len(other_names(cells)):7}{sum(part.exercises for part in core):6} +"
            f"{sum(part.exercises for part in optional):2}"
            f"{sum(part.pictures for part in everything):10}"
            f"{' + '.join(f'{part.minutes:.0f}' for part in core):>18}"
            f"{sum(part.minutes for part in optional):10.0f}")


HEADER = (f"{'':26}{'cells':>6}{'words':>7}{'names':>7}{'exercises':>10}{'pictures':>10}"
          f"{'core minutes':>18}{'optional':>10}")


def _pictures(cell, outputs) -> int:
    """The pictures and tables that a cell leaves; what a check or a guess says is none."""
    if CHECK.search(cell.source) or "labs.guess(" in cell.source:
        return 0
    return sum(bool("image/png" in data or _DRAWN.search("".join(data.get("text/html", ""))))
               for data in (output.get("data", {}) for output in outputs))
