"""The pictures of the executed notebooks, and which of them are a run's main ones."""

import base64
import re
from collections import namedtuple
from pathlib import Path

import _notebooks

from _solutions import markup, results

HEADING = re.compile(r"^#{2,3} (.+)$", re.MULTILINE)

# image: a PNG file in base64. words: what it shows. heading: the last one before it.
Shown = namedtuple("Shown", "image words heading")


def pictures(path: Path) -> list[Shown]:
    """The pictures of an executed notebook."""
    found, heading = [], ""
    for cell in results.read(path).get("cells", ()):
        if cell["cell_type"] == "markdown":
            heading = ([heading] + HEADING.findall("".join(cell["source"])))[-1]
        for output in cell.get("outputs", ()):
            bundle = output.get("data", {})
            if "image/png" in bundle:
                image = "".join(bundle["image/png"]).replace("\n", "")
                found.append(Shown(image, "".join(bundle.get("text/plain", "")), heading))
    return found


def main_ones(notebook: dict, found: list[Shown]) -> dict[str, Shown]:
    """Exercise -> the picture in which most measured numbers stand beside predicted ones, one for
    each exercise that has such a picture; without any, that with most measured numbers. notebook:
    as results.json has it; found: its pictures."""
    by_words = {shown.words: shown for shown in found}
    drawn = [record for record in notebook.get("records", ())
             if record["metrics"] and record.get("text") in by_words]
    best = {}
    for record in sorted(drawn, key=_predictions):
        if _predictions(record):
            best[record["exercise"]] = record
    if not best and drawn:
        most = max(drawn, key=lambda record: len(record["metrics"]))
        best = {most["exercise"]: most}
    return {record["exercise"]: by_words[record["text"]] for record in drawn
            if best.get(record["exercise"]) is record}


def _predictions(record) -> int:
    return sum(metric["predicted"] is not None for metric in record["metrics"])


def sections(data: dict, out: Path) -> str:
    """The page's two parts: the main pictures, and all others, folded."""
    main, others = [], []
    for one in data["notebooks"]:
        found = pictures(out / f"{one['name']}.ipynb")
        chosen = list(main_ones(one, found).values())
        main += [_figure(shown, one["name"]) for shown in chosen]
        rest = [_figure(shown, one["name"]) for shown in found if shown not in chosen]
        if rest:
            others.append(markup.folded(f"{markup.text(one['name'])}: {len(rest)} more",
                                        "".join(rest)))
    return (_section("Main charts", main, "One for each exercise that has measured numbers beside "
                                          "predicted ones, and one of any other notebook.")
            + f"<section>{_section('Other pictures', others)}</section>")


def _section(title, parts, lead: str = "") -> str:
    return f"<h2>{title}</h2>{lead and f'<p>{lead}</p>'}{''.join(parts)}" if parts else ""


def _figure(shown, notebook) -> str:
    caption = f"<b>{markup.text(_notebooks.number(notebook))}</b> {markup.text(shown.heading)}"
    return (f"<figure><figcaption>{caption}</figcaption><img alt='{markup.text(shown.words)}' "
            f"src='data:image/png;base64,{shown.image}'{_size(shown.image)}>"
            + markup.folded("In words", f"<pre>{markup.text(shown.words)}</pre>") + "</figure>")


def _size(image) -> str:
    """The picture's size in CSS pixels, half of its own, so that the page does not jump."""
    header = base64.b64decode(image[:64])
    width, height = (int.from_bytes(header[at:at + 4], "big") // 2 for at in (16, 20))
    return f" width='{width}' height='{height}'" if header.startswith(b"\x89PNG") else ""
