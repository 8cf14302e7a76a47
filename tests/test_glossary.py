"""GLOSSARY.md has every term of the notebooks, and nothing that no notebook and no docstring says.

In a notebook's text bold introduces a term; what is only stressed stands in *italics*.
"""

import functools
import re
from pathlib import Path

import nbformat
import pytest
from _build import build

ROOT = Path(__file__).resolve().parent.parent
ENTRY = re.compile(r"- \*\*(.+?)\*\*: (.+)")
BOLD = re.compile(r"\*\*(.+?)\*\*", re.DOTALL)
SOURCES = sorted((ROOT / "solutions").glob("[0-9]*.py"))
GLOSSARY = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
# Cells of a notebook whose bold words are headings of list items, not terms.
LISTS = ("## How it usually goes wrong", "## What comes next")
# Bold that is no word for a thing: a label, a formula, a link or a duration.
NO_TERM = re.compile(
    r"(?:Notice:|Time|Needs|Core|Optional|In a new kernel)$|.*[=·]|\[|\d+ minutes$")


def entries():
    """Return the entries of the glossary in their order, as written in bold."""
    return [match[1] for match in map(ENTRY.match, GLOSSARY.splitlines()) if match]


def names(entry):
    """Return the names of an entry: 'flat (tensor), flat parameter' has three."""
    for name in entry.split(", "):
        yield re.sub(r" \(.+\)", "", name)
        yield re.sub(r"[()]", "", name)


def normal(term):
    """Return a term without case, quotes and plural: 'Buckets' is 'bucket'."""
    term = term.strip("`.,:; ").lower()
    return term[:-1] if term.endswith("s") and not term.endswith("ss") else term


KNOWN = {normal(name) for entry in entries() for name in names(entry)}


def bold_terms(text):
    """Return the terms that the bold words of a text cell introduce."""
    if text.startswith(LISTS):
        return []
    found = [" ".join(match.split()) for match in BOLD.findall(text)]
    return [term for term in found if not NO_TERM.match(term)]


def text_cells(path):
    """Return the text cells of a notebook's source."""
    lesson = build.read_lesson(ROOT, path.stem)
    return [cell.source for cell in lesson.cells if cell.kind == "markdown"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_each_bold_term_is_in_the_glossary(path):
    terms = {term for text in text_cells(path) for term in bold_terms(text)}
    missing = sorted(term for term in terms if normal(term) not in KNOWN)
    assert not missing, f"GLOSSARY.md lacks {missing}; a word that is only stressed is in *italics*"


@pytest.mark.parametrize(("text", "terms"), [
    ("A **rank** is one of N.", ["rank"]),
    ("**Notice:** the **exposed** part", ["exposed"]),
    ("| **Time** | 45 minutes |", []),
    ("A *stressed* word, and the **2(N−1)/N · S** bytes", []),
    ("in one\n**process\ngroup**", ["process group"]),
    ("## What comes next\n\n**01 Memory math**", [])])
def test_what_counts_as_a_term(text, terms):
    assert bold_terms(text) == terms


@pytest.mark.parametrize("entry", entries())
def test_each_entry_occurs_in_a_notebook_or_in_labs(entry):
    if len(entry) == 1:  # a symbol
        assert re.search(rf"\b{entry}\b", all_text().replace("²", " "))
    else:
        sought = [re.sub(r"\W+", " ", name).lower() for name in names(entry)]
        assert any(re.search(rf"\b{name}s?\b", all_words()) for name in sought)


@functools.cache
def all_text():
    """Return the sources of the notebooks and of labs in one."""
    files = [*SOURCES, *(ROOT / "labs").rglob("*.py")]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


@functools.cache
def all_words():
    """Return their words in small letters, with one space between two."""
    return re.sub(r"\W+", " ", all_text()).lower()


def test_entries_are_in_order_on_one_line_each_and_unique():
    symbols, terms = (re.findall(r"^- .*$", part, re.MULTILINE)
                      for part in GLOSSARY.split("\n## ")[1:])
    for lines in (symbols, terms):
        assert all(ENTRY.match(line) for line in lines)
        written = [ENTRY.match(line)[1] for line in lines]
        assert written == sorted(written, key=lambda name: (name != "Ψ", name.lower()))
    assert len(set(entries())) == len(entries()) == len(symbols) + len(terms)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_both_notebooks_link_to_the_glossary(path):
    for folder in ("notebooks", "solutions"):
        notebook = nbformat.read(ROOT / folder / f"{path.stem}.ipynb", as_version=4)
        assert "](../GLOSSARY.md)" in notebook.cells[0].source
