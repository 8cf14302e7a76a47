"""The pages: feedback for each student, and where the class struggles."""

import html
import re
from collections import Counter
from pathlib import Path

from _solutions.report import document, table, text

from _grade.outcomes import BROKEN, FLAGGED, NOT_ALLOWED, PASSED, TIMED_OUT, WAITING, WRONG
from _grade.table import order

ORDER = [PASSED, WRONG, TIMED_OUT, BROKEN, NOT_ALLOWED, FLAGGED, WAITING]
# White text is legible on each of them.
_COLOURS = {PASSED: "#1a7f37", WRONG: "#c42b20", TIMED_OUT: "#9a6700", BROKEN: "#6e4c00",
            NOT_ALLOWED: "#0b6e75", FLAGGED: "#6f42c1", WAITING: "#5f6773"}
_KINDS = {PASSED: ("good", "✓"), WAITING: ("plain", "○")}
_NAME = 60  # characters of a page's name, of up to 4 bytes: file systems allow 255 bytes
_MOST = 8  # wrong answers listed of an exercise


def write(folder: Path, done: list[dict]) -> None:
    """Writes NAME.html for each student, class.html and class.svg."""
    taken = set()
    for student in sorted({one["student"] for one in done}):
        records = [one for one in done if one["student"] == student]
        name = stem = re.sub(r"[^\w.-]+", "-", student).strip(".-")[:_NAME] or "student"
        while name.lower() in taken | {"class"}:
            name = f"{stem}-{len(taken)}"
        taken.add(name.lower())
        (folder / f"{name}.html").write_text(page_of(student, records), encoding="utf-8")
    picture = class_picture(done)
    (folder / "class.svg").write_text(picture, encoding="utf-8")
    (folder / "class.html").write_text(class_page(done, picture), encoding="utf-8")


def page_of(student: str, records: list[dict]) -> str:
    """Feedback for one student: nothing of others, and nothing of the machine."""
    points, of = (sum(each[name] for one in records for each in one["exercises"])
                  for name in ("points", "of"))
    parts = []
    for one in records:
        rows = [[text(each["number"]), _outcome(each["outcome"]), f"{each['points']:g}",
                 _sentence(each)] for each in sorted(one["exercises"],
                                                     key=lambda each: order(each["number"]))]
        parts.append(f"<h2>{text(one['lesson'])}</h2>" + table(
            "What the checks say of your code", ["exercise", "outcome", "points", "the check says"],
            rows))
        if one["flagged"]:
            items = "".join(f"<li>{text(why)}</li>" for why in one["flagged"])
            parts.append("<p>This is not what an answer needs; please talk to your instructor:</p>"
                         f"<ul>{items}</ul>")
    return document(f"Feedback for {student}", f"{points:g} of {of:g} points", parts)


def _outcome(word) -> str:
    kind, sign = _KINDS.get(word, ("bad", "✗"))
    return f"<span class='{kind}'>{sign} {text(word)}</span>"


def _sentence(each) -> str:
    hint = f"<br><i>Hint: {text(each['hint'])}</i>" if each["hint"] else ""
    return text(each["sentence"]).replace("\n", "<br>") + hint


def counts(done: list[dict]) -> dict[str, Counter]:
    """Exercise -> outcome -> how many."""
    found = {}
    for each in (each for one in done for each in one["exercises"]):
        found.setdefault(each["number"], Counter())[each["outcome"]] += 1
    return dict(sorted(found.items(), key=lambda pair: order(pair[0])))


def wrong_answers(done: list[dict], number: str) -> list[tuple[int, str]]:
    """(how often, an example) of each kind of wrong answer to an exercise: sentences that differ in
    numbers alone are one kind."""
    kinds, examples = Counter(), {}
    for each in (each for one in done for each in one["exercises"]):
        if each["number"] == number and each["outcome"] not in (PASSED, WAITING, FLAGGED):
            first = each["sentence"].split("\n")[0]
            kind = re.sub(r"\d[\d.,e+-]*", "#", first)
            kinds[kind] += 1
            examples[kind] = min(first, examples.get(kind, first))
    return sorted(((often, examples[kind]) for kind, often in kinds.items()),
                  key=lambda pair: (-pair[0], pair[1]))


def class_page(done: list[dict], picture: str) -> str:
    """Where the class struggles."""
    parts = [f"<figure>{picture}</figure>"]
    for number, found in counts(done).items():
        wrong = wrong_answers(done, number)
        if wrong:
            rows = [[text(often), text(example)] for often, example in wrong[:_MOST]]
            parts.append(f"<h2>Exercise {text(number)}: {found[PASSED]} of {found.total()} passed"
                         "</h2>" + table("Wrong answers, the most frequent first",
                                         ["how often", "the check says"], rows))
    students = len({one["student"] for one in done})
    return document("Where the class struggles", f"{students} students", parts)


def class_picture(done: list[dict]) -> str:
    """An SVG with a bar for each exercise, divided by outcome."""
    found = counts(done)
    wide, high, left = 760, 26, 60
    lines = []
    for row, (number, outcomes) in enumerate(found.items()):
        y, x, total = 40 + high * row, float(left), outcomes.total()
        lines.append(f"<text x='{left - 8}' y='{y + 14}' text-anchor='end'>{number}</text>")
        for outcome in ORDER:
            share = (wide - left - 20) * outcomes[outcome] / total
            if share:
                lines.append(f"<rect x='{x:.1f}' y='{y}' width='{share:.1f}' height='18' "
                             f"fill='{_COLOURS[outcome]}'/>")
                if share > 22:
                    lines.append(f"<text x='{x + 6:.1f}' y='{y + 14}' fill='#ffffff'>"
                                 f"{outcomes[outcome]}</text>")
            x += share
    legend, x = [], left
    for outcome in ORDER:
        if any(outcomes[outcome] for outcomes in found.values()):
            legend.append(f"<rect x='{x}' y='10' width='14' height='14' "
                          f"fill='{_COLOURS[outcome]}'/><text x='{x + 20}' y='22'>{outcome}"
                          "</text>")
            x += 100
    words = "; ".join(f"exercise {number}: " + ", ".join(
        f"{outcomes[one]} {one}" for one in ORDER if outcomes[one])
        for number, outcomes in found.items())
    return (f"<svg xmlns='http://www.w3.org/2000/svg' role='img' viewBox='0 0 {wide} "
            f"{50 + high * len(found)}' font-family='sans-serif' font-size='13' "
            f"fill='currentColor'><title>{html.escape(words)}</title>"
            f"{''.join(legend)}{''.join(lines)}</svg>\n")
