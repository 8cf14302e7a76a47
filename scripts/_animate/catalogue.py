"""What README and the web book know of the animations: their files, titles and words."""

import html
import json
from pathlib import Path

from labs.checks.previous_work import ROOT

FOLDER = ROOT / "experiments" / "reference" / "animations"
NAME, RECORDED = "animations.json", "recorded.json"
WIDTH = 760  # pixels that a page has for it


def read(folder: Path = FOLDER) -> dict[str, dict]:
    """name -> {"file", "still", "title", "alt", "size": [width, height] in CSS pixels}."""
    path = folder / NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def add(folder: Path, name: str, **entry) -> None:
    """Writes an animation's entry, and keeps those of the others."""
    _write(folder / NAME, read(folder) | {name: entry})


def read_recorded(folder: Path) -> dict[str, dict]:
    """name -> what its run recorded."""
    path = folder / RECORDED
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def keep_recorded(folder: Path, name: str, recorded: dict) -> None:
    """Writes what a run recorded, and keeps that of the others."""
    _write(folder / RECORDED, read_recorded(folder) | {name: recorded})


def picture_html(name: str, root: str, folder: Path = FOLDER) -> str:
    """The <picture> element of an animation; it stands still for readers who prefer no motion.
    root: the address of `folder` as seen from the page, such as
    "experiments/reference/animations". Raises KeyError for a name that is not there."""
    entry = read(folder)[name]
    wide, high = entry["size"]
    words = html.escape(entry["alt"], quote=True)
    return (f'<picture><source media="(prefers-reduced-motion: reduce)" '
            f'srcset="{root}/{entry["still"]}">'
            f'<img src="{root}/{entry["file"]}" alt="{words}" width="{WIDTH}" '
            f'height="{round(high * WIDTH / wide)}"></picture>')


def _write(path, content):
    # An animation a line, so that a new run of one changes one line; inside, the order is data.
    lines = [f"{json.dumps(name)}: {json.dumps(content[name], ensure_ascii=False)}"
             for name in sorted(content)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
