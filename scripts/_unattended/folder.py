"""Where a run leaves its results, and of which commit it was."""

import json
import re
import subprocess
from datetime import date
from pathlib import Path

from _unattended import machine


def results_folder(asked: str | None, found: dict, root: Path) -> Path:
    """The folder that was asked for, or a new one in experiments/ that is named after day and
    machine. found: what `machine.asked` returned."""
    if asked:
        out = Path(asked).resolve()
    else:
        base = root / "experiments" / f"{date.today().isoformat()}-{machine_name(found)}"
        taken = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 100))]
        out = next(path for path in taken if not path.exists())
    out.mkdir(parents=True, exist_ok=True)
    return out


def machine_name(found: dict) -> str:
    """A folder's name for this kind of machine: "laptop", or its GPUs, "8x-A100-SXM4-80GB"."""
    if not found["gpus"]:
        return "laptop"
    return re.sub(r"[^\w.-]+", "-", machine.title(found).replace("NVIDIA ", ""))


def read(path: Path) -> dict:
    """A JSON file, or an empty dict where there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def commit(root: Path) -> str:
    """The checkout's commit in short, with "-dirty" where files have changed; "unknown" without
    git, as in many containers."""
    try:
        done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"],
                              capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
