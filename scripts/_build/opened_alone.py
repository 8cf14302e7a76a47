"""The first code cell of each notebook: gets the workbook where a notebook was opened without it, as
on Colab, on Kaggle or from a mail, or says in one sentence how to. In the workbook it does nothing.

What can be done once the workbook is there stands in labs/opened_alone.py.
"""

import re
from pathlib import Path

from _address import address as known
from _build.source import Cell

FOLDER = "data-parallel-workbook"  # of the clone
ID = "-opened-alone"  # how the cell's id ends
USES_LABS = re.compile(r"^(import|from) labs\b", re.MULTILINE)
# git's own progress needs a terminal, and so would its question for a password: it asks none. Without
# torch in the kernel's Python it is a machine that nobody has prepared for this: there ./scripts/lab
# makes an environment of its own.
CODE = '''\
# Was this notebook opened alone? Then this cell gets the rest of the workbook, or says how to.
import importlib.util, os, shutil, subprocess, sys
if not importlib.util.find_spec("labs"):
    class WorkbookMissing(Exception):  # shown as a sentence, without a traceback
        _render_traceback_ = lambda self: [str(self)]
    address, said = "{address}", ""
    folder = ".." if os.path.isdir("../labs/workers") else "{folder}"
    if address and not os.path.isdir(folder) and shutil.which("git") and importlib.util.find_spec("torch"):
        print(f"Getting the workbook, 8 MB, from {{address}} into {{folder}} ...", flush=True)
        git = ["git", "clone", "-q", "--depth=1", address, folder]
        git = subprocess.run(git, capture_output=True, text=True, start_new_session=True)
        said = git.stderr.partition("\\n")[0]
    if not os.path.isdir(f"{{folder}}/labs/workers"):
        raise WorkbookMissing("{sentence} " + said)
    sys.path.append(os.path.abspath(folder))
    __import__("labs.opened_alone").opened_alone.complete(WorkbookMissing)'''


def sentence(address: str | None) -> str:
    """How to get the workbook where the cell cannot."""
    if address:
        return (f"This notebook needs the rest of its workbook: run `git clone {address} {FOLDER}` "
                "and start ./scripts/lab in that folder.")
    return ("This notebook needs the rest of its workbook, and this copy does not know its own "
            f"address yet: clone the repository that it is from into {FOLDER} beside it and run "
            "this cell again, or start ./scripts/lab in the clone (who publishes it runs "
            "./scripts/address first).")


def cell(address: str | None) -> str:
    """The source of the cell. address: of the repository, None if nobody has said it."""
    return CODE.format(address=address or "", folder=FOLDER, sentence=sentence(address))


def add_cell(cells: list[Cell], root: Path, *notebooks: dict[int, str]) -> None:
    """Puts the cell before the first code cell, in `cells` and in each notebook's sources (number →
    text), if the notebook imports labs. Its number is 0: it stands in no source.

    root: the tree whose address the cell names."""
    code = [place for place, cell in enumerate(cells) if cell.kind == "code"]
    if not any(USES_LABS.search(cells[place].source) for place in code):
        return
    text = cell(known(root))
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
