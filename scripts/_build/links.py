"""Links that the builder adds to each notebook: the one before, the one after, and the glossary."""

import re
from pathlib import Path

import _notebooks

GLOSSARY = "symbols and terms: [glossary](../GLOSSARY.md)"  # as seen from a folder beside it
TITLE = re.compile(r"^# # (.+)$", re.MULTILINE)


def add_links(cells, sources, neighbours):
    """Put the links at the end of the title's cell and of the last text cell, in `sources` (number
    → text). `neighbours`: markdown links to the notebooks before and after, see `neighbours_of`."""
    first, last = (cells[0], cells[-1]) if cells else (None, None)
    if first and first.kind == "markdown" and first.source.startswith("# "):
        sources[first.number] += f"\n\n*{' · '.join([*neighbours, GLOSSARY])}*"
    if neighbours and last.kind == "markdown" and last is not first:
        sources[last.number] += f"\n\n*{' · '.join(neighbours)}*"


def neighbours_of(name: str, root: Path):
    """["← [title](file)", "[title](file) →"] for the sources before and after this one, by name;
    only those that exist."""
    names = [path.stem for path in _notebooks.paths(root / "solutions")]
    here = names.index(name)
    before = [f"← {_link(root, other)}" for other in names[max(here - 1, 0) : here]]
    return before + [f"{_link(root, other)} →" for other in names[here + 1 : here + 2]]


def _link(root, name):
    text = (root / "solutions" / f"{name}.py").read_text(encoding="utf-8")
    title = TITLE.search(text)
    return f"[{title[1].strip() if title else name}]({name}.ipynb)"
