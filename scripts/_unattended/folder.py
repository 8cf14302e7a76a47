"""Where a run leaves its results, and of which commit it was."""

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
        name = machine.title(found).replace("NVIDIA ", "") if found["gpus"] else "laptop"
        slug = re.sub(r"[^\w.-]+", "-", name)
        base = root / "experiments" / f"{date.today().isoformat()}-{slug}"
        taken = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 100))]
        out = next(path for path in taken if not path.exists())
    out.mkdir(parents=True, exist_ok=True)
    return out


def commit(root: Path) -> str:
    """The checkout's commit in short, with "-dirty" where files have changed; "unknown" without
    git, as in many containers."""
    try:
        done = subprocess.run(["git", "-C", str(root), "describe", "--always", "--dirty"],
                              capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
