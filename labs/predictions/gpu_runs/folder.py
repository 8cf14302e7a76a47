"""Reads a folder of runs: every JSON file in it whose `about.source` names a code base we know."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from labs.predictions.gpu_runs import megatron, nanotron, prime_rl, workbook
from labs.predictions.gpu_runs.run import GpuRun

ROWS = Path(__file__).with_name("rows")
"""The rows of this project: about half of those that are public. Where each is from, what was
measured and what is known to be wrong with it says the file's `about`."""

READERS: dict[str, Callable[[dict], Iterator[GpuRun]]] = {
    "nanotron": nanotron.runs, "Megatron-LM": megatron.runs, "prime-rl": prime_rl.runs,
    "this workbook": workbook.runs}


class FolderError(ValueError):
    """A folder that cannot be read; one sentence says why."""


def load(folder: str | Path = ROWS) -> list[GpuRun]:
    """Every row of every file of the folder, in the order of the files' names. Raises
    FolderError."""
    folder = Path(folder)
    files = sorted(folder.glob("*.json"))
    if not files:
        raise FolderError(f"{folder} has no JSON file: name a folder of runs, such as {ROWS}")
    return [run for file in files for run in _read(file)]


def _read(file) -> list[GpuRun]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FolderError(f"cannot read {file}: {error}") from None
    source = content.get("about", {}).get("source", "") if isinstance(content, dict) else ""
    reader = next((found for mark, found in READERS.items() if mark in source), None)
    if not reader:
        raise FolderError(f"{file}: its about.source is {source!r}, and of that no rows can be "
                          f"read; {', '.join(READERS)} can")
    try:
        return list(reader(content))
    except (KeyError, TypeError) as error:
        raise FolderError(f"{file} lacks what its rows are read with: {error}") from None
