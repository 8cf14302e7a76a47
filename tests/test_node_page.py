"""book/node.md: a class on one node. Each number of the page is computed here again."""

import math
import re
from pathlib import Path

import pytest
from _on_gpu import parts
from _preflight import students
from _turn import __main__ as command
from _turn import shares

from labs.predictions.cost import prices

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "book" / "node.md").read_text(encoding="utf-8")
WORDS = " ".join(PAGE.split())
STUDENTS, GPUS, GROUPS, CLASS, SET_UP = 80, 8, 8, 60, 15


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    table = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def options(line: str, tmp_path: Path):
    """The parsed command line of `./scripts/turn`; its notebook must be one of the workbook's."""
    words = line.split("#")[0].replace("~/work/", f"{ROOT}/notebooks/").split()
    return command.check([*words[1:], "--queue", str(tmp_path)])


def test_its_commands_are_ones_that_turn_takes(tmp_path):
    found = re.findall(r"^\./scripts/turn .+$", PAGE, re.MULTILINE)
    assert len(found) == 3 and all(options(line, tmp_path) for line in found)


def test_the_hour_is_what_the_turns_take(tmp_path):
    table = rows("An hour's plan")
    spans = [tuple(map(int, row[0].split("–"))) for row in table]
    assert [begin for begin, _ in spans[1:]] == [end for _, end in spans[:-1]]
    assert spans[0][0] == 0 and spans[-1][1] == CLASS
    seconds = {part.name: part.seconds for part in parts.PARTS}
    for (begin, end), row, turns in ((spans[1], table[1], STUDENTS), (spans[2], table[2], GROUPS)):
        turn = options(row[3].strip("`"), tmp_path)
        together = GPUS // turn.gpus
        assert row[1].endswith(f"{together} at a time") and row[1].startswith(f"{turns} ")
        rounds = math.ceil(turns / together)
        assert rounds * turn.minutes == end - begin
        assert f"{rounds} rounds, {rounds * turn.minutes:g} minutes" in WORDS
        name = Path(turn.notebook).stem
        assert seconds[name] < 60 * turn.minutes
        number = name[:2]
        assert re.search(rf"{seconds[name] / 60:.1f} for (notebook )?{number}\b", WORDS)
    assert STUDENTS / GROUPS == 10 and "Eight groups of ten" in WORDS


def test_memory_and_cores(tmp_path):
    runs, waits, cores = rows("Memory and cores")
    assert runs[1:] == [f"{students.MEMORY / 1e9:g} GB", str(GPUS),
                        f"{GPUS * students.MEMORY / 1e9:g} GB"]
    each, many = float(waits[1].split()[0]), int(waits[2])
    assert many == STUDENTS - GPUS and waits[3] == f"{each * many:.1f} GB"
    node = shares.Node(tuple(map(str, range(GPUS))), tuple(range(int(cores[3]))))
    assert len(node.cores_of(["gpu-0"])) == int(cores[1]) and f"with {cores[3]}" in cores[0]


@pytest.mark.parametrize("row", rows("Dollars"), ids=lambda row: row[0])
def test_dollars_are_the_table_of_prices(row):
    machine = prices.MACHINES[row[0]]
    assert machine.gpus == GPUS
    whole = prices.node_dollars(CLASS + SET_UP, row[0])
    assert row[1:4] == [f"{prices.hourly(machine):.2f}", f"{whole:.2f}", f"{whole / STUDENTS:.2f}"]
    assert row[4] == f"{machine.source}, {machine.read}"


def test_a_node_that_is_forgotten():
    night = [prices.node_dollars(12 * 60, row[0]) for row in rows("Dollars")]
    assert f"{min(night):.0f} to {max(night):.0f} dollars for 12 hours" in WORDS
    assert f"for {CLASS + SET_UP} minutes: {SET_UP} for set-up" in WORDS


def test_slurm_has_more_minutes_than_the_turn():
    job = PAGE.split("## With Slurm instead")[1]
    assert int(re.search(r"--time=(\d+)", job)[1]) == 2 + int(re.search(r"--minutes (\d+)", job)[1])
    batch = (ROOT / "scripts" / "cluster" / "train.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --(nodes|gpus-per-node)=(\d+)$", batch, re.MULTILINE))
    assert f"asks for {asked['nodes']} nodes with {asked['gpus-per-node']} GPUs each" in WORDS
