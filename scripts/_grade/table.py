"""grades.csv: one row a student."""

import csv
import json
import re
from pathlib import Path

import _notebooks

from _grade import lessons
from _grade.handed_in import Row, by_name
from _grade.outcomes import PASSED
from _grade.sandbox import ROOT

TO_READ = "to read"  # stands where a part of an exercise has no check
MADE_FROM = "graded.json"  # what the table was made from: the arguments of `write`


def write(path: Path, done: list[dict], unreadable: list[tuple[str, str]],
          notes: list[str] | None = None) -> None:
    """Writes the table, and beside it what it was made from. notes: on this machine."""
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    made_from = {"done": done, "unreadable": unreadable, "notes": notes or []}
    (folder / MADE_FROM).write_text(json.dumps(made_from, ensure_ascii=False), encoding="utf-8")
    write_rows(path, by_name(done, unreadable))


def write_rows(path: Path, rows: list[Row], roster: bool = False) -> None:
    """Writes the table of these rows. roster: with ids and e-mails, and the same maximum of points
    for all. A cell of an exercise is empty where its notebook was not handed in."""
    worth = points_possible(rows)
    read_by_hand = sorted((number for number in worth if is_to_read(number)), key=order)
    head = ["student", *(["id", "email"] if roster else []), "points", "of", "handed in", "forged",
            "late", "unreadable", "remark", "seconds"]
    for number in worth:
        head += [number, f"{number} says"]
    head += [f"{number} {TO_READ}" for number in read_by_hand]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(_cells(row, worth, read_by_hand, roster) for row in rows)


def points_possible(rows: list[Row]) -> dict[str, float]:
    """Number of each exercise that was graded of somebody -> what it is worth, in their order."""
    found = {each["number"]: each["of"] for row in rows for one in row.records
             for each in one["exercises"]}
    return {number: found[number] for number in sorted(found, key=order)}


def is_to_read(number: str) -> bool:
    """Whether a part of an exercise has no check."""
    heading = lessons.headings(ROOT).get(number)
    return bool(heading and heading.written)


def order(number: str) -> tuple[int, ...]:
    """To sort numbers of exercises by: 2.10 after 2.9."""
    return tuple(map(int, number.split(".")))


def exercises_of(row: Row) -> dict[str, dict]:
    """Number -> what was found of a row's exercises."""
    return {each["number"]: each for one in row.records for each in one["exercises"]}


def _cells(row, worth, read_by_hand, roster) -> list:
    exercises = exercises_of(row)
    points = sum(each["points"] for each in exercises.values())
    of = sum(worth.values() if roster else (each["of"] for each in exercises.values()))
    seconds = sum(each["seconds"] for each in exercises.values())
    notebooks = ", ".join(_notebooks.number(one["lesson"]) for one in row.records)
    late = "; ".join(f"{_notebooks.number(name) or name} by {words}" for name, words in row.late)
    forged = "; ".join(text for one in row.records for text in one["forged"])
    remarks = [*row.remark, *(text for one in row.records for text in one["remarks"])]
    unreadable = "; ".join(why if file == row.label else f"{file}: {why}"
                           for file, why in row.unreadable)
    who = row.student
    ids = ([who.id, who.email] if who else ["", ""]) if roster else []
    handed_in = notebooks or ("" if row.unreadable else "nothing")
    cells = [safe(row.label), *map(safe, ids), f"{points:g}",
             f"{of:g}" if roster or row.records else "", handed_in, safe(forged), late,
             safe(unreadable), safe("; ".join(remarks)), f"{seconds:.1f}"]
    for number in worth:
        each = exercises.get(number)
        cells += [f"{each['points']:g}", safe(says(each))] if each else ["", ""]
    return cells + [TO_READ if number in exercises else "" for number in read_by_hand]


def says(each: dict) -> str:
    """What the check said, in one line."""
    sentence = re.sub(r"\s*\n\s*", " | ", each["sentence"])
    return sentence if each["outcome"] == PASSED else f"{each['outcome']}: {sentence}"


def safe(text: str) -> str:
    """The text so that a spreadsheet does not take it for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def in_words(one: dict) -> str:
    """A line on one submission."""
    points, of = (sum(each[name] for each in one["exercises"]) for name in ("points", "of"))
    seconds = sum(each["seconds"] for each in one["exercises"])
    forged = f"  forged: {one['forged'][0]}" if one["forged"] else ""
    number = _notebooks.number(one["lesson"])
    return f"{points:g} of {of:g}  {one['student']}  {number}  {seconds:.1f} s{forged}"
