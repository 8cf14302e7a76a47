"""The first code cell of each notebook: says how to get the workbook where a notebook was opened
without it, as on Colab, on Kaggle or from a mail. In the workbook it does nothing."""

import re

from _build.source import Cell

# Where this workbook is published. Nobody can know that before it is: the publisher puts the
# address here, for example https://github.com/..., and runs `scripts/build --no-execute`.
REPOSITORY = ""
FOLDER = "data-parallel-workbook"  # of the clone that the sentence asks for
ID = "-opened-alone"  # how the cell's id ends
USES_LABS = re.compile(r"^(import|from) labs\b", re.MULTILINE)
CODE = '''\
# Was this notebook opened alone? Then this cell says how to get the rest of the workbook.
import importlib.util, os, sys

if not importlib.util.find_spec("labs") and os.path.isdir("{folder}"):
    sys.path.append(os.path.abspath("{folder}"))
if not importlib.util.find_spec("labs"):
    class WorkbookMissing(Exception):
        _render_traceback_ = lambda self: [str(self)]  # a sentence instead of a traceback

    raise WorkbookMissing("{sentence}")'''


def sentence(repository: str | None = None) -> str:
    """How to get the workbook: one line for Colab and Kaggle, a command for a machine."""
    repository = REPOSITORY if repository is None else repository
    address = repository or "ADDRESS"
    where = "" if repository else " (ADDRESS: of the repository that this notebook is from)"
    return (f"This notebook needs the rest of its workbook: on Colab or Kaggle run "
            f"`!git clone --depth 1 {address} {FOLDER} && pip install -q -e {FOLDER}` in a new "
            f"cell, then this one again; elsewhere clone {address}, and start ./scripts/lab in "
            f"it{where}.")


def add_cell(cells: list[Cell], *notebooks: dict[int, str]) -> None:
    """Puts the cell before the first code cell, in `cells` and in each notebook's sources (number →
    text), if the notebook imports labs. Its number is 0: it stands in no source."""
    code = [place for place, cell in enumerate(cells) if cell.kind == "code"]
    if not any(USES_LABS.search(cells[place].source) for place in code):
        return
    text = CODE.format(folder=FOLDER, sentence=sentence())
    path, stem = "scripts/_build/opened_alone.py", cells[0].id.split("-")[0]
    metadata = {"jupyter": {"source_hidden": True}}  # folded: it is no part of the lesson
    cells.insert(code[0], Cell(path, 0, 1, "code", text, metadata, id=f"{stem}{ID}"))
    for sources in notebooks:
        sources[0] = text


def keep_count(nb: dict, earlier: dict | None) -> None:
    """Counts the cell as executed if it was in the earlier notebook, also with another address: in
    the workbook it has no output."""
    counts = {cell["id"]: cell.get("execution_count") for cell in (earlier or {"cells": []})["cells"]}
    for cell in nb["cells"]:
        if cell["id"].endswith(ID):
            cell["execution_count"] = counts.get(cell["id"])
