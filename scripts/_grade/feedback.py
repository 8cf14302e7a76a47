"""The pages: feedback for each student, and the class's."""

import re
from pathlib import Path

from _solutions.report import document, table, text

from _grade import class_page, lessons
from _grade.handed_in import Row, by_name
from _grade.outcomes import PASSED, WAITING
from _grade.sandbox import ROOT
from _grade.table import TO_READ, is_to_read, order

_KINDS = {PASSED: ("good", "✓"), WAITING: ("plain", "○")}
_NAME = 60  # characters of a page's name, of up to 4 bytes: file systems allow 255 bytes
RUBRIC = "answers/written.html"  # of the book: how to read what no check reads


def write(folder: Path, done: list[dict], notes: list[str] | None = None) -> None:
    """Writes NAME.html for each student, class.html and class.svg. notes: on this machine."""
    write_rows(folder, by_name(done, []), notes=notes)


def write_rows(folder: Path, rows: list[Row], book: str = "",
               notes: list[str] | None = None) -> None:
    """The same, of rows of the table. book: the address of the web book, which sections are linked
    to; empty where nobody knows it."""
    pages = names(rows)
    for row in (row for row in rows if row.records):
        page = page_of(row.label, row.records, book)
        (folder / pages[id(row)]).write_text(page, encoding="utf-8")
    picture = class_page.outcomes_picture([one for row in rows for one in row.records])
    (folder / "class.svg").write_text(picture, encoding="utf-8")
    rubric = f"{book.rstrip('/')}/{RUBRIC}" if book else ""
    (folder / "class.html").write_text(class_page.page(rows, picture, pages, rubric, notes),
                                       encoding="utf-8")


def names(rows: list[Row]) -> dict[int, str]:
    """id() of a row -> the file name of its page, of rows that have one."""
    found, taken = {}, {"class"}
    for row in (row for row in rows if row.records):
        name = stem = re.sub(r"[^\w.-]+", "-", row.label).strip(".-")[:_NAME] or "student"
        while name.lower() in taken:
            name = f"{stem}-{len(taken)}"
        taken.add(name.lower())
        found[id(row)] = f"{name}.html"
    return found


def page_of(student: str, records: list[dict], book: str = "") -> str:
    """Feedback for one student: nothing of others, and nothing of the machine."""
    points, of = (sum(each[name] for one in records for each in one["exercises"])
                  for name in ("points", "of"))
    parts, names = [], lessons.titles(ROOT)
    for one in records:
        rows = [[_section(each["number"], book), _outcome(each["outcome"]), f"{each['points']:g}",
                 _sentence(each)] for each in sorted(one["exercises"],
                                                     key=lambda each: order(each["number"]))]
        parts.append(f"<h2>{text(names.get(one['lesson'], one['lesson']))}</h2>" + table(
            "What the checks say of your code", ["exercise", "outcome", "points", "the check says"],
            rows))
        if one["forged"]:
            items = "".join(f"<li>{text(why)}</li>" for why in one["forged"])
            parts.append("<p>This changes what the check sees; please talk to your instructor:</p>"
                         f"<ul>{items}</ul>")
    return document(f"Feedback for {student}", f"{points:g} of {of:g} points", parts)


def _section(number, book) -> str:
    """The exercise's number and title, linked to its section of the book."""
    title, heading = text(class_page.title_of(number)), lessons.headings(ROOT).get(number)
    if not book or not heading:
        return title
    address = f"{book.rstrip('/')}/notebooks/{heading.lesson}.html#{heading.anchor}"
    return f"<a href='{text(address)}'>{title}</a>"


def _outcome(word) -> str:
    kind, sign = _KINDS.get(word, ("bad", "✗"))
    return f"<span class='{kind}'>{sign} {text(word)}</span>"


def _sentence(each) -> str:
    hint = f"<br><i>Hint: {text(each['hint'])}</i>" if each["hint"] else ""
    by_hand = f"<br><i>Your sentences: {TO_READ}</i>" if is_to_read(each["number"]) else ""
    return text(each["sentence"]).replace("\n", "<br>") + hint + by_hand
