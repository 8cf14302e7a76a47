"""grades.csv: one row a student."""

import csv
import re
from pathlib import Path

import _notebooks

from _grade.outcomes import PASSED


def write(path: Path, done: list[dict], unreadable: list[tuple[str, str]]) -> None:
    """Writes the table. A student may have handed in several notebooks."""
    numbers = sorted({each["number"] for one in done for each in one["exercises"]}, key=order)
    head = ["student", "points", "of", "flagged", "seconds"]
    for number in numbers:
        head += [number, f"{number} says"]
    rows = [_row(student, [one for one in done if one["student"] == student], numbers)
            for student in sorted({one["student"] for one in done})]
    rows += [[_safe(student), 0, "", _safe(why), 0] + [""] * 2 * len(numbers)
             for student, why in unreadable]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])


def order(number: str) -> tuple[int, ...]:
    """To sort numbers of exercises by: 2.10 after 2.9."""
    return tuple(map(int, number.split(".")))


def _row(student, records, numbers) -> list:
    exercises = {each["number"]: each for one in records for each in one["exercises"]}
    points, of = (sum(each[name] for each in exercises.values()) for name in ("points", "of"))
    flagged = "; ".join(text for one in records for text in one["flagged"])
    seconds = sum(each["seconds"] for each in exercises.values())
    cells = [_safe(student), f"{points:g}", f"{of:g}", _safe(flagged), f"{seconds:.1f}"]
    for number in numbers:
        each = exercises.get(number)
        cells += [f"{each['points']:g}", _safe(says(each))] if each else ["", ""]
    return cells


def says(each: dict) -> str:
    """What the check said, in one line."""
    sentence = re.sub(r"\s*\n\s*", " | ", each["sentence"])
    return sentence if each["outcome"] == PASSED else f"{each['outcome']}: {sentence}"


def _safe(text: str) -> str:
    """The text so that a spreadsheet does not take it for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def in_words(one: dict) -> str:
    """A line on one submission."""
    points, of = (sum(each[name] for each in one["exercises"]) for name in ("points", "of"))
    seconds = sum(each["seconds"] for each in one["exercises"])
    flagged = f"  flagged: {one['flagged'][0]}" if one["flagged"] else ""
    number = _notebooks.number(one["lesson"])
    return f"{points:g} of {of:g}  {one['student']}  {number}  {seconds:.1f} s{flagged}"
