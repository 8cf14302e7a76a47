"""What a student of notebook 06 calls or subclasses."""

import re
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "solutions" / "scripts"
_MARKER = re.compile(r"^\s*### (BEGIN|END) SOLUTION\n", re.MULTILINE)


def worked_script(name: str) -> str:
    """The text of a worked script, such as "train.py"."""
    return _MARKER.sub("", (SCRIPTS / name).read_text(encoding="utf-8"))


def write_script(name: str, folder: Path | str = ".") -> Path:
    """Writes the worked script to the folder, as the solution's cell `%%writefile NAME` does it in
    Jupyter, and returns its path."""
    path = Path(folder) / name
    path.write_text(worked_script(name), encoding="utf-8")
    return path
