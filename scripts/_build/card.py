"""What the builder adds to a notebook's header card: the minutes that a run of all cells takes, and
the dollars, from the committed reference runs. Nobody guesses them."""

import re
from pathlib import Path

from _unattended import reference

TABLE_END = re.compile(r"((?:^\|.*\n)+)", re.MULTILINE)
NOT_YET = "not yet measured"


def add_row(cells: list, sources: dict[int, str], row: str) -> None:
    """Puts the row at the end of the table in the title's cell, in `sources` (number -> text)."""
    first = cells[0] if cells else None
    if first and first.kind == "markdown" and first.source.startswith("# "):
        sources[first.number] = TABLE_END.sub(rf"\1{row}\n", sources[first.number], count=1)


def row_of(name: str, root: Path) -> str:
    """The table's row: minutes on each machine that has run this notebook for reference."""
    found = [(run["machine"], reference.seconds(run)[name], run.get("dollars_per_hour"))
             for run in reference.runs(root) if name in reference.seconds(run)]
    said = [f"{minutes(seconds)} on {_title(machine)}{_cost(seconds, rate)}"
            for machine, seconds, rate in found]
    if not any(machine["gpus"] for machine, *_ in found):
        said.append(f"on GPUs {NOT_YET}" if said else NOT_YET)
    return f"| **Run All** | {'; '.join(said)} |"


def minutes(seconds: float) -> str:
    """"2 minutes": whole ones, so that a card changes only where a run really takes longer."""
    number = max(1, round(seconds / 60))
    return f"{number} minute{'s' * (number > 1)}"


def _title(machine) -> str:
    return machine["title"] if machine["gpus"] else f"{machine['cores']} CPU cores"


def _cost(seconds, rate) -> str:
    return f" (${rate * seconds / 3600:.2f} at ${rate:g} an hour)" if rate else ""
