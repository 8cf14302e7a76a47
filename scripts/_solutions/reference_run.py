"""Keeps a run as the reference for its kind of machine: small enough to be committed."""

import base64
import json
import shutil
from pathlib import Path

from _unattended import reference
from _unattended.folder import machine_name
from _unattended.runner import PASSED

from _solutions import charts

CHARTS = 1  # of each notebook
# of the records and the header, what says nothing a year later, or is about this machine alone
_LEFT_OUT = ("text", "preflight", "cell_seconds", "left_on_gpu_mib")


def keep(data: dict, out: Path, root: Path) -> str:
    """Writes results.json and the main chart of each notebook into experiments/reference/NAME, in
    place of those before; returns what it did, one sentence. Only a run that passed is kept."""
    failed = [one["name"] for one in data["notebooks"] if one["outcome"] != PASSED]
    if failed:
        return f"Not kept as the reference: {', '.join(failed)} did not pass."
    folder = root / reference.PLACE / machine_name(data["machine"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = json.dumps(_small(data), indent=1, ensure_ascii=False)
    (folder / "results.json").write_text(f"{text}\n")
    for one in data["notebooks"]:
        found = charts.main_ones(one, charts.pictures(out / f"{one['name']}.ipynb"))
        for exercise, shown in list(found.items())[-CHARTS:]:
            title = exercise.replace(" ", "_")
            (folder / f"{one['name']}-{title}.png").write_bytes(base64.b64decode(shown.image))
    return (f"Kept as the reference: {folder}. The notebooks' cards are built from it: "
            "scripts/build --no-execute")


def _small(data):
    if isinstance(data, dict):
        return {name: _small(value) for name, value in data.items() if name not in _LEFT_OUT}
    return [_small(each) for each in data] if isinstance(data, list) else data
