"""Instructor's notes: each notebook has its page, and what a page names is there."""

import ast
import functools
import json
import re

import _notebooks
import pytest
from _book import pages
from test_notebooks import NAMES, ROOT

NOTES = ROOT / "solutions" / "notes"
SECTIONS = ["What it is for", "Ten-minute demo", "Usual mistakes", "Questions to ask", "Oral check",
            "If time is short"]
OPTIONAL = {"07c_sharding_in_jax", "07d_sharded_muon"}  # short pages
ROW = re.compile(r"^\| (\d+\.\d+) \| .+ \| `(\w+)`.* \| .+\? ?.* \|$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def page_of(name):
    return (NOTES / f"{name}.md").read_text(encoding="utf-8")


def section(name, title):
    """The text of one section of a notebook's page."""
    return page_of(name).split(f"\n## {title}\n")[1].split("\n## ")[0]


@functools.cache
def source_of(name):
    return (ROOT / "solutions" / f"{name}.py").read_text(encoding="utf-8")


@functools.cache
def shown_by(name):
    """All that the executed notebook says: its text, its code, and its outputs as text."""
    notebook = json.loads((ROOT / "solutions" / f"{name}.ipynb").read_text(encoding="utf-8"))
    found = []
    for cell in notebook["cells"]:
        found.append("".join(cell["source"]))
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            found += ["".join(output.get("text", [])), "".join(data.get("text/plain", [])),
                      re.sub("<[^>]+>", " ", "".join(data.get("text/html", [])))]
    return "\n".join(found)


@functools.cache
def codes():
    """(constants of labs that may be the code of a verdict, a regular expression for those that
    are made: each f-string after `code=`, with `.+` for what is inserted)."""
    constants, made = set(), set()
    for path in (ROOT / "labs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                constants.add(node.value)
            elif (isinstance(node, ast.keyword) and node.arg == "code"
                  and isinstance(node.value, ast.JoinedStr)):
                made.add("".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".+"
                                 for part in node.value.values))
    return constants, re.compile("|".join(made))


def is_code(word):
    constants, made = codes()
    return word in constants or made.fullmatch(word)


@functools.cache
def expected_by_tests(package):
    """All that the tests of a notebook's checks say."""
    return "\n".join(path.read_text(encoding="utf-8")
                     for path in (ROOT / "tests" / package).glob("test_*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_its_sections_and_is_short(name):
    text = page_of(name)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS
    assert text.startswith(f"# {_notebooks.number(name)} · ") and len(text.splitlines()) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_each_mistake_has_a_code_that_a_wrong_answer_gets(name):
    """The code is one that labs gives, a test of this notebook's checks expects it, and the
    exercise is one of the notebook."""
    rows = ROW.findall(section(name, "Usual mistakes"))
    lines = [line for line in section(name, "Usual mistakes").splitlines() if line[:3] == "| 0"
             or re.match(r"\| \d", line)]
    assert len(rows) == len(lines) and len(rows) >= (4 if name in OPTIONAL else 8)
    for number, code in rows:
        assert f"### Exercise {number} · " in source_of(name), number
        assert is_code(code), code
        assert re.search(rf"\b{code}\b", expected_by_tests(_notebooks.package(name))), code


def test_a_code_that_no_check_gives_is_found():
    assert is_code("sum_not_mean") and not is_code("sum_not_meant")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_page_names_is_in_the_notebook(name):
    """Calls of the lab, and exercises: "3.4", "(6.17)", "7.1 to 7.3"."""
    for call in re.findall(r"`((?:labs?\.|launch\()[^`]*)`", page_of(name)):
        assert call in source_of(name), call
    number = _notebooks.number(name)
    named = re.findall(rf"(?:exercises? |\bof |In your |\b(?:keep|out|show|give) |\()"
                       rf"({int(number[:2])}\.\d\d?)(?![\d.]| [%×])",
                       section(name, "If time is short") + section(name, "Oral check"))
    assert all(f"### Exercise {one} · " in source_of(name) for one in named), named


@pytest.mark.parametrize("name", NAMES)
def test_the_demo_takes_ten_minutes_and_shows_the_notebooks_numbers(name):
    demo = section(name, "Ten-minute demo")
    rows = [line.split(" | ") for line in demo.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) >= 3 and sum(int(row[0].strip("| ")) for row in rows) == 10
    assert all(len(row) == 4 and "`" in row[1] and "?" in row[2] for row in rows)
    for number in NUMBER.findall(demo):
        number = number.rstrip(",")
        assert len(number) < 3 or number in shown_by(name), number


@pytest.mark.parametrize("name", NAMES)
def test_the_oral_check_has_five_questions(name):
    """Each says what is expected and what a weak answer sounds like; two use the student's own."""
    questions = [" ".join(one.split()) for one in re.split(
        r"^\d\. ", section(name, "Oral check"), flags=re.MULTILINE)[1:]]
    assert len(questions) == 5
    assert all("Expected: " in one and "Weak: " in one for one in questions)
    assert sum(one.startswith(("*(own code)*", "*(own numbers)*")) for one in questions) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_each_question_has_an_answer(name):
    questions = re.findall(r"^- (.+)$", section(name, "Questions to ask"), re.MULTILINE)
    assert 5 <= len(questions) <= 8
    assert all(re.search(r"[?.] \*[^*]+\*$", one) for one in questions)


def test_every_page_is_linked_and_stands_among_the_answers_of_the_book():
    index = (NOTES / "README.md").read_text(encoding="utf-8")
    for path in NOTES.glob("*.md"):
        page = pages.page_of(f"solutions/notes/{path.name}")
        assert page and page.address.startswith("answers/") and page.chapter is None
        assert path.name == "README.md" or f"]({path.name})" in index
    for page in ("book/instructors.md", "SYLLABUS.md"):
        assert "solutions/notes/README.md" in (ROOT / page).read_text(encoding="utf-8")
