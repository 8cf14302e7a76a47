"""Cells as notebook files: fixed ids and metadata, the same bytes for the same source."""

import json
import os
import re
from pathlib import Path

import _notebooks

METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}
ID_LENGTH = 64


def set_ids(cells, name):
    """Give each cell an id made of the notebook's number and the cell's first line.

    Equal first lines are told apart by a counter, so a new cell elsewhere changes no other id.
    Both notebooks take their ids from here.
    """
    used = set()
    for cell in cells:
        stem = f"{_notebooks.number(name)}-{_slug(cell.title)}"[: ID_LENGTH - 4].strip("-")
        candidates = (f"{stem}-{k}" if k > 1 else stem for k in range(1, len(cells) + 2))
        cell.id = next(c for c in candidates if c not in used)
        used.add(cell.id)


def _slug(text):
    visible = re.sub(r"<[^>]*>", "", text).lower()
    return re.sub(r"[^a-z0-9]+", "-", visible).strip("-") or "cell"


def notebook(cells, sources):
    """A notebook, as plain dicts, of the cells whose number is in `sources` (number → text)."""
    shown = [_cell(cell, sources[cell.number]) for cell in cells if cell.number in sources]
    return {"cells": shown, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def _cell(cell, source):
    fields = {
        "cell_type": cell.kind,
        "id": cell.id,
        "metadata": cell.metadata,
        "source": source.splitlines(keepends=True),
    }
    if cell.kind == "code":
        fields |= {"execution_count": None, "outputs": []}
    return fields


def to_bytes(nb):
    """The notebook as Jupyter writes it: sorted keys, indent 1, one newline at the end."""
    text = json.dumps(nb, ensure_ascii=False, indent=1, sort_keys=True)
    return (text + "\n").encode("utf-8")


def from_file(path: Path):
    """The notebook in a file, None if there is none or it cannot be read."""
    try:
        nb = json.loads(path.read_bytes())
        return nb if isinstance(nb["cells"], list) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def without_outputs(nb):
    """A copy of the notebook without outputs and execution counts."""
    cleared = [
        c | {"outputs": [], "execution_count": None} if c["cell_type"] == "code" else c
        for c in nb["cells"]
    ]
    return nb | {"cells": cleared}


def keep_outputs(nb, earlier):
    """Copy the outputs of an earlier build into cells whose id and source are the same."""
    known = {c.get("id"): c for c in (earlier or {"cells": []})["cells"]}
    for cell in nb["cells"]:
        before = known.get(cell["id"], {})
        if cell["cell_type"] == "code" and before.get("source") == cell["source"]:
            cell |= {key: before.get(key, cell[key]) for key in ("outputs", "execution_count")}


def write(path: Path, content: bytes):
    """Replace the file in one step, so that an interrupted build leaves the old one."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
