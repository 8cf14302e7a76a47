"""Words that the field has another term for are not used in notebooks, messages and docstrings."""

import ast
import re

import pytest
from test_notebooks import NAMES, ROOT

# What is not written, as a regular expression -> what stands there instead.
UNUSED = {
    r"anew": "again; reshard",
    r"dear(er|est)?": "expensive",
    r"mend(s|ed|ing)?": "fix",
    r"for a moment": "temporary, temporarily",
    r"travel(s|led|ling)?": "are sent, are communicated, are transferred",
    r"(much|common|other) material|in circulation|often copied": "a link to one place that says it",
    r"patience": "timeout",
    r"dice": "rng",
    r"what became of": "exit status, how it ended",
    r"left to judge by": "step record",
    r"by a hair": "barely",
    r"a matter of digits": "rounding",
    r"heads that (ask|are asked)": "query heads, key and value heads",
    r"norms? of (a )?gradients? that (is|are) not": "global norm",
    r"(gradient|loss|logits) that nobody has": "sharded",
    r"(at|is|are|was) the least": "minimum",
    r"(in|form|forms) (a|no) circle": "cycle",
    r"the (idle )?corners?": "stagger",
    r"whoever": "the process that, if you",
    r"who holds what is": "the same as on a node",
    r"kept share": "goodput",
    r"writes? whole|written whole": "atomic, atomically",
    r"whole (parameters?|weights?|logits)": "full, unsharded",
    r"divided among": "sharded over, split among",
    r"(training|job|run) (goes|went) on": "continues",
}
PATTERN = re.compile("|".join(rf"(?P<w{number}>\b(?:{pattern})\b)"
                              for number, pattern in enumerate(UNUSED)), re.IGNORECASE)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "scripts").rglob("*.md"),
                *(ROOT / "solutions").rglob("*.md")])
CODE = sorted([*(ROOT / "labs").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])


def unused(text):
    """What is written in the text though another word is used for it: (line, words, instead)."""
    for found in PATTERN.finditer(text):
        instead = list(UNUSED.values())[int(found.lastgroup[1:])]
        yield text.count("\n", 0, found.start()) + 1, found[0], instead


def sentences(found, where):
    return [f"{where}:{line}: {words!r}; write: {instead}" for line, words, instead in found]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_uses_the_terms_of_the_field(name):
    """Of its code, too: names, comments and docstrings in cells."""
    path = ROOT / "solutions" / f"{name}.py"
    assert not sentences(unused(path.read_text()), path.name)


def test_pages_use_the_terms_of_the_field():
    assert PAGES and not [line for path in PAGES
                          for line in sentences(unused(path.read_text()), path.name)]


def test_messages_and_docstrings_use_the_terms_of_the_field():
    """Every string of the code is read, whole f-strings in parts."""
    found = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += sentences(((node.lineno + line - 1, words, instead)
                                    for line, words, instead in unused(node.value)),
                                   path.relative_to(ROOT))
    assert not found


@pytest.mark.parametrize("text", [
    "Bytes that travel", "Mend that.", "the ranks wait in a circle", "what became of it",
    "for a moment", "Whoever reads it", "a whole parameter", "divided among ranks",
    "training goes on"])
def test_a_word_that_is_not_used_is_found(text):
    assert len(list(unused(text))) == 1


@pytest.mark.parametrize("text", [
    "a travelogue", "recommended", "amends", "at least", "a whole number"])
def test_a_word_inside_of_another_is_none(text):
    assert not list(unused(text))
