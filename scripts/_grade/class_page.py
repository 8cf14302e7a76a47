"""class.html: how the points are distributed, students by exercise, and where the class struggles.
"""

import html
import re
from collections import Counter

import _notebooks
from _solutions.report import document, table, text

from _grade import lessons
from _grade.handed_in import Row
from _grade.outcomes import BROKEN, FORGED, NOT_ALLOWED, PASSED, TIMED_OUT, WAITING, WRONG
from _grade.sandbox import ROOT
from _grade.table import TO_READ, exercises_of, is_to_read, order, points_possible

ORDER = [PASSED, WRONG, TIMED_OUT, BROKEN, NOT_ALLOWED, FORGED, WAITING]
# White text is legible on each of them.
_COLOURS = {PASSED: "#1a7f37", WRONG: "#c42b20", TIMED_OUT: "#9a6700", BROKEN: "#6e4c00",
            NOT_ALLOWED: "#0b6e75", FORGED: "#6f42c1", WAITING: "#5f6773"}
_MOST = 8  # wrong answers listed of an exercise
_TITLE = 42  # characters of a title beside a bar
# A table with a column for each exercise is wider than a page: the keyboard scrolls it, too.
_WIDE = ("<div role='region' tabindex='0' aria-label='students by exercise' "
         "style='overflow-x: auto; max-width: 100%'>{}</div>")


def title_of(number: str) -> str:
    """"2.1 Combine gradients" of an exercise's number."""
    heading = lessons.headings(ROOT).get(number)
    return f"{number} {heading.title}" if heading else number


def page(rows: list[Row], picture: str, pages: dict[int, str], rubric: str = "",
         notes: list[str] | None = None) -> str:
    """The page. picture: of `outcomes_picture`. pages: id() of a row -> the file name of its page
    of feedback. rubric: the address of the rubric of what somebody has to read, if it is known.
    notes: on this machine, above all else."""
    worth = points_possible(rows)
    students = [row for row in rows if row.student] or rows
    handed_in = sum(bool(row.records or row.unreadable) for row in students)
    points = [_points(row) for row in students]
    mean = f" · mean {sum(points) / len(points):.1f} of {sum(worth.values()):g} points" \
        if points else ""
    return document("The class", f"{handed_in} of {len(students)} students handed in{mean}", [
        *(f"<p class='bad'>{text(note)}</p>" for note in notes or ()),
        f"<figure><figcaption>Students by their share of the points</figcaption>"
        f"{distribution(points, sum(worth.values()))}</figure>" if worth else "",
        _students_by_exercise(rows, worth, pages, rubric), f"<figure>{picture}</figure>",
        *_where_it_struggles([one for row in rows for one in row.records])])


def _points(row) -> float:
    return sum(each["points"] for each in exercises_of(row).values())


def _students_by_exercise(rows, worth, pages, rubric) -> str:
    by_hand = [number for number in worth if is_to_read(number)]
    head = ["student", "points", "late", "minutes",
            *(f"<a href='#e{number}' title='{text(title_of(number))}'>{number}</a>"
              for number in worth), *(f"{number} {TO_READ}" for number in by_hand)]
    to_read = TO_READ.replace(" ", "&nbsp;")
    to_read = f"<a href='{text(rubric)}'>{to_read}</a>" if rubric else to_read
    lines = []
    for row in rows:
        found = exercises_of(row)
        name = f"<span style='white-space: nowrap'>{text(row.label)}</span>"
        if id(row) in pages:
            name = f"<a href='{text(pages[id(row)])}'>{name}</a>"
        notes = [*row.remark, *(why for _, why in row.unreadable)]
        if notes:
            name += f"<br><i>{text('; '.join(notes))}</i>"
        late = "; ".join(f"{_notebooks.number(which) or which} by {words}"
                         for which, words in row.late)
        seconds = sum(each["seconds"] for each in found.values())
        lines.append([name, f"{_points(row):g}", text(late), f"{seconds / 60:.1f}",
                      *(_sign(number, found.get(number)) for number in worth),
                      *(to_read if number in found else "–" for number in by_hand)])
    caption = ("✓ passed, ✗ not passed, – not handed in or still waiting; minutes that the checks "
               "took")
    return "<h2>Students by exercise</h2>" + _WIDE.format(table(caption, head, lines))


def _sign(number, each) -> str:
    """✓ ✗ –, with its colour, and with the outcome in words for who cannot see them."""
    if each is None:
        kind, sign, words = "plain", "–", "not handed in"
    elif each["outcome"] in (PASSED, WAITING):
        passed = each["outcome"] == PASSED
        kind, sign = ("good", "✓") if passed else ("plain", "–")
        words = each["outcome"]
    else:
        kind, sign = "bad", "✗"
        first = each["sentence"].split("\n")[0]
        words = f"{each['outcome']}: {first}"
    words = text(f"{title_of(number)}: {words}")
    return f"<span class='{kind}' role='img' aria-label='{words}' title='{words}'>{sign}</span>"


def distribution(points: list[float], of: float) -> str:
    """An SVG: how many students have 0 to 10 % of the points, 10 to 20 %, and so on."""
    bins = Counter(min(9, int(10 * each / of)) for each in points) if of else Counter()
    most, wide, high = max(bins.values(), default=1), 760, 130
    words = "; ".join(f"{10 * tenth} to {10 * tenth + 10} %: {bins[tenth]}" for tenth in range(10))
    lines = []
    for tenth in range(10):
        x, tall = 20 + 72 * tenth, high * bins[tenth] / most
        lines.append(f"<rect x='{x}' y='{30 + high - tall:.1f}' width='64' height='{tall:.1f}' "
                     "fill='#3b6fb6'/>"
                     f"<text x='{x + 32}' y='{24 + high - tall:.1f}' text-anchor='middle'>"
                     f"{bins[tenth] or ''}</text>"
                     f"<text x='{x + 32}' y='{high + 48}' text-anchor='middle'>"
                     f"{10 * tenth}–{10 * tenth + 10} %</text>")
    return _svg(f"Students by their share of the points. {words}", wide, high + 60, "".join(lines))


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
        if each["number"] == number and each["outcome"] not in (PASSED, WAITING, FORGED):
            first = each["sentence"].split("\n")[0]
            kind = re.sub(r"\d[\d.,e+-]*", "#", first)
            kinds[kind] += 1
            examples[kind] = min(first, examples.get(kind, first))
    return sorted(((often, examples[kind]) for kind, often in kinds.items()),
                  key=lambda pair: (-pair[0], pair[1]))


def _where_it_struggles(done):
    """Yields a section for each notebook, with its exercises and their wrong answers."""
    found, names = counts(done), lessons.titles(ROOT)
    for lesson in sorted({one["lesson"] for one in done}):
        yield f"<h2>{text(names.get(lesson, lesson))}</h2>"
        for number in (each for each in found if any(
                each == one["number"] for record in done if record["lesson"] == lesson
                for one in record["exercises"])):
            passed = f"{found[number][PASSED]} of {found[number].total()} passed"
            yield f"<h3 id='e{number}'>{text(title_of(number))}: {passed}</h3>"
            if wrong := wrong_answers(done, number):
                yield table("Wrong answers, the most frequent first", [
                    "how often", "the check says"],
                    [[text(often), text(example)] for often, example in wrong[:_MOST]])


def outcomes_picture(done: list[dict]) -> str:
    """An SVG with a bar for each exercise, divided by outcome."""
    found = counts(done)
    wide, high, left = 1000, 26, 330
    lines = []
    for row, (number, outcomes) in enumerate(found.items()):
        y, x, total = 40 + high * row, float(left), outcomes.total()
        name = title_of(number)
        name = name if len(name) <= _TITLE else f"{name[:_TITLE - 1]}…"
        lines.append(f"<text x='{left - 8}' y='{y + 14}' text-anchor='end'>{text(name)}</text>")
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
    return _svg(words, wide, 50 + high * len(found), f"{''.join(legend)}{''.join(lines)}")


def _svg(words, wide, high, inside) -> str:
    return (f"<svg xmlns='http://www.w3.org/2000/svg' role='img' viewBox='0 0 {wide} {high}' "
            "font-family='sans-serif' font-size='13' fill='currentColor'>"
            f"<title>{html.escape(words)}</title>{inside}</svg>\n")
