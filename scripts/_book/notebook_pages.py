"""The two pages of a notebook: without answers, but with what the executed solution printed and
drew, and with answers."""

import base64
import copy
import html
import json
import os
import re
from pathlib import Path

import _address

from _book import glossary, mathml, repository_links
from _book.pages import ROOT, Page

MACHINERY = "-opened-alone"  # how the id of a cell ends that is no part of the lesson
YOUR_GUESS = "# A guess"
FOLD = "<details class='outcome'><summary>What a right answer gives</summary>"
# A link to what the run left on the machine where it was executed.
LOCAL_FILE = re.compile(r"<a [^>]*href=(?![\"']?(?:https?:|#))[^>]*>(.*?)</a>", re.DOTALL)
# The card below a title, whose head says nothing on a page, and one of its rows.
CARD = re.compile(r"\| In short \|.*\n\|[:| -]+\|\n((?:\|.*\|\n)+)")
CARD_ROW = re.compile(r"\| *(.+?) *\| *(.+?) *\|$", re.MULTILINE)
# A notebook's own links to its neighbours stand below each page of the book anyway.
NEIGHBOURS = re.compile(r"\n\n\*(?:←|\[)[^\n]*\*$")


class Unexecuted(Exception):
    """A solution without outputs; the sentence says how to execute it."""


def write_pages(page: Page, answers: Page, staged: Path, site: Path,
                repository: str | None) -> None:
    """Writes the sources of a notebook's two pages below `staged`, and its pictures and the
    notebook itself, to be taken along, below `site`."""
    student, solution = (json.loads((ROOT / one.source).read_text(encoding="utf-8"))
                         for one in (page, answers))
    pictures = _Pictures(Path(page.source).stem, site)
    outputs = {cell["id"]: pictures.taken_out(cell) for cell in solution["cells"]
               if cell["cell_type"] == "code"}
    if not any(outputs.values()):
        raise Unexecuted(f"{answers.source} has no outputs: ./scripts/build executes it.")
    for one, notebook, other in ((page, student, answers), (answers, solution, page)):
        cells = [_cell(cell, outputs.get(cell["id"], []), one, repository)
                 for cell in notebook["cells"] if not cell["id"].endswith(MACHINERY)]
        cells[0]["source"] = _with_ways(cells[0]["source"], one, other, repository)
        target = staged / f"{one.address}.ipynb"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps({**notebook, "cells": cells}), encoding="utf-8")
    taken = site / page.source
    taken.parent.mkdir(parents=True, exist_ok=True)
    taken.write_bytes((ROOT / page.source).read_bytes())


class _Pictures:
    """Files of a notebook's pictures, below the site's folder `pictures`."""

    def __init__(self, name: str, site: Path):
        self.folder, self.site = f"pictures/{name}", site
        (site / self.folder).mkdir(parents=True, exist_ok=True)

    def taken_out(self, cell: dict) -> list[dict]:
        """The cell's outputs, each PNG replaced by an <img> with its words; its file is written."""
        return [self._output(output, f"{cell['id']}-{number}.png")
                for number, output in enumerate(cell["outputs"])]

    def _output(self, output, name):
        data = output.get("data", {})
        if "text/html" in data:
            shown = LOCAL_FILE.sub(r"\1", "".join(data["text/html"]))
            return {**output, "data": {**data, "text/html": shown}}
        if "image/png" not in data:
            return output
        about = output.get("metadata", {}).get("image/png", {})
        words = about.get("alt") or "".join(data.get("text/plain", ""))
        path = f"{self.folder}/{name}"
        (self.site / path).write_bytes(base64.b64decode("".join(data["image/png"])))
        sizes = "".join(f" {side}='{about[side]}'" for side in ("width", "height")
                        if side in about)
        # Pages of notebooks stand in a folder beside the folder of pictures.
        image = (f"<img class='drawn' src='../{path}' alt='{html.escape(words, quote=True)}'"
                 f"{sizes} loading='lazy'>")
        return {"output_type": "display_data", "metadata": {}, "data": {"text/html": image}}


def _cell(cell, outputs, page, repository):
    """The cell as it stands on the page."""
    cell = copy.deepcopy(cell)
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        cell["source"] = _text(source, page, repository)
        return cell
    cell["outputs"], cell["execution_count"] = outputs, None
    if cell["metadata"].get("jupyter", {}).get("source_hidden"):
        cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), "hide-input"]
    if page.address.startswith("notebooks/"):
        cell["outputs"] = _without_answers(cell, source)
    return cell


def _text(source, page, repository):
    source = NEIGHBOURS.sub("", source)
    way = os.path.relpath("glossary.html", os.path.dirname(page.address))
    source = repository_links.rewrite(source, page, repository)
    source = repository_links.outside_code(source, lambda part: glossary.link_terms(part, way))
    return repository_links.outside_code(source, mathml.render)


def _without_answers(cell, source):
    """The outputs of a cell on the page without answers: a guess is the reader's own, and what a
    check says of the right answer is folded."""
    if source.startswith(YOUR_GUESS):
        return []
    if not cell["metadata"].get("nbgrader", {}).get("grade"):
        return cell["outputs"]
    said = [_as_html(output) for output in cell["outputs"]]
    return [{"output_type": "display_data", "metadata": {},
             "data": {"text/html": f"{FOLD}{''.join(said)}</details>"}}] if said else []


def _as_html(output):
    data = output.get("data", {})
    words = "".join(data.get("text/plain", output.get("text", "")))
    return "".join(data.get("text/html", f"<pre>{html.escape(words)}</pre>"))


def _with_ways(title, page, other, repository):
    """The first cell with a line of what can be done with the notebook below its title."""
    title = CARD.sub(lambda card: CARD_ROW.sub(r"- \1: \2", card[1]), title)
    head, _, rest = title.partition("\n")
    here = os.path.dirname(page.address)
    ways = [f"[{'Without answers' if here == 'answers' else 'With answers'}]"
            f"({os.path.relpath(other.address, here)}.html)",
            f"[Download]({os.path.relpath(page.source, here)})"]
    if here == "answers":
        head, ways = f"{head}: answers", ways[:1]
    else:
        ways += [f"[Open in {name}]({link})"
                 for name, link in _address.open_links(repository, page.source).items()]
    return f"{head}\n\n<div class='ways'>\n\n{' · '.join(ways)}\n\n</div>\n{rest}"
