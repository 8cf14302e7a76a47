"""Tables of the committed reference runs, for the page of results."""

import json
from pathlib import Path

from _book.pages import ROOT

REFERENCE = ROOT / "experiments" / "reference"


def tables(site: Path) -> str:
    """A Markdown table for each reference run of all solutions: what passed, and in what time."""
    runs = sorted(REFERENCE.glob("*/results.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in runs]
    return "\n\n".join(_table(run) for run in found if run.get("notebooks"))


def _table(run):
    machine = run["machine"]
    rows = [f"| [{one['name']}](notebooks/{one['name']}.html) | {one['outcome']} | "
            f"{one['seconds']:.0f} |" for one in run["notebooks"]]
    about = f"Python {machine['python']}, torch {machine['torch']}, {run['date'][:10]}"
    note = f"\n\nNote of this run: {run['note']}." if run.get("note") else ""
    return "\n".join([f"## {machine['title'].capitalize()}", "", f"{about}.{note}", "",
                      "| Notebook | Outcome | Seconds |", "|:--|:--|--:|", *rows])
