"""Pieces of a page: text, tables and folded parts as HTML."""

import html
from pathlib import Path

import _notebooks

STYLE = (Path(__file__).parent / "report.css").read_text()


def document(title: str, lead: str, parts: list[str]) -> str:
    """A whole page in the house style; parts: its sections' HTML."""
    return (f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
            f"<meta name='viewport' content='width=device-width'><title>{text(title)}</title>"
            f"<style>\n{STYLE}</style></head>\n<body><main>\n<h1>{text(title)}</h1>\n"
            f"<p class='lead'>{text(lead)}</p>\n" + "\n".join(filter(None, parts))
            + "\n</main></body></html>\n")


def text(value) -> str:
    """A value as HTML; also between the quotes of an attribute."""
    return html.escape(str(value))


def where(notebook: str, exercise: str) -> str:
    """The exercise's number, which begins with the notebook's, or the picture's title after it."""
    number = _notebooks.number(notebook)
    return text(exercise if exercise[:1].isdigit() else f"{number} · {exercise}")


def table(caption: str, head: list[str], rows: list[list[str]], numbers: int = 0,
          total: bool = False) -> str:
    """An HTML table of cells that are HTML already; the last `numbers` columns are set to the
    right. total: the last row is a sum."""
    first = len(head) - numbers
    sides = ["" if column < first else " class='number'" for column in range(len(head))]
    lines = ["<thead><tr>" + "".join(f"<th scope='col'{side}>{cell}</th>" for side, cell in zip(
        sides, head, strict=True)) + "</tr></thead><tbody>"]
    for row in rows:
        kind = " class='total'" if total and row is rows[-1] else ""
        cells = [f"<th scope='row'>{row[0]}</th>", *(
            f"<td{side}>{cell}</td>" for side, cell in zip(sides[1:], row[1:], strict=True))]
        lines.append(f"<tr{kind}>{''.join(cells)}</tr>")
    return f"<table><caption>{caption}</caption>{''.join(lines)}</tbody></table>"


def folded(summary: str, inside: str) -> str:
    """A part that opens on a click. summary: HTML, as is `inside`."""
    return f"<details><summary>{summary}</summary>{inside}</details>"
