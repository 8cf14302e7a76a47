"""The pictures of the executed notebooks, and which of them are a run's main ones."""

import html
import re
from pathlib import Path

from _solutions import results


def pictures(path: Path) -> list[tuple[str, str]]:
    """(PNG file in base64, what it shows in words) of each picture of an executed notebook."""
    found = []
    for cell in results.read(path).get("cells", ()):
        for output in cell.get("outputs", ()):
            bundle = output.get("data", {})
            if "image/png" in bundle:
                image = "".join(bundle["image/png"]).replace("\n", "")
                found.append((image, "".join(bundle.get("text/plain", ""))))
    return found


def main_ones(notebook: dict, found: list[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Exercise -> the picture in which most measured numbers stand beside predicted ones, one for
    each exercise that has such a picture. notebook: as results.json has it; found: its pictures."""
    by_words, chosen = {words: (image, words) for image, words in found}, {}
    for record in notebook.get("records", ()):
        count = sum(metric["predicted"] is not None for metric in record["metrics"])
        best = chosen.get(record["exercise"], (None, 0))[1]
        if count > best and record.get("text") in by_words:
            chosen[record["exercise"]] = (by_words[record["text"]], count)
    return {exercise: picture for exercise, (picture, _) in chosen.items()}


def sections(data: dict, out: Path) -> str:
    """The page's two parts: the main pictures, and all others, folded."""
    main, others = [], []
    for one in data["notebooks"]:
        found = pictures(out / f"{one['name']}.ipynb")
        shown = main_ones(one, found)
        main += [_figure(*picture, f"{one['name'][:2]} · {exercise}")
                 for exercise, picture in shown.items()]
        rest = [_figure(*picture) for picture in found if picture not in shown.values()]
        if rest:
            others.append(f"<details><summary>{html.escape(one['name'])}: {len(rest)} more "
                          f"pictures</summary>{''.join(rest)}</details>")
    return (_section("Main charts", main, "Measured numbers beside predicted ones, one picture for "
                                          "each exercise that has both.")
            + _section("Other pictures", others, "On paper only those that are unfolded."))


def _section(title, parts, lead) -> str:
    return f"<h2>{title}</h2><p>{lead}</p>{''.join(parts)}" if parts else ""


def _figure(image, words, where: str = "") -> str:
    first, _, rest = html.escape(words, quote=False).partition("\n")
    head = f"<b>{html.escape(where)}</b> " if where else ""
    told = f"<details><summary>In words</summary><pre>{rest}</pre></details>" if rest else ""
    return (f"<figure><figcaption>{head}{first}</figcaption>"
            f"<img alt='{html.escape(words, quote=True)}' src='data:image/png;base64,{image}'"
            f"{_size(image)}>{told}</figure>")


def _size(image) -> str:
    """The picture's size in CSS pixels, half of its own, so that the page does not jump."""
    import base64

    header = base64.b64decode(image[:64])
    width, height = (int.from_bytes(header[at:at + 4], "big") // 2 for at in (16, 20))
    return f" width='{width}' height='{height}'" if re.match(rb"\x89PNG", header) else ""
