"""Links from the bold terms of a page to their entries in the glossary."""

import functools
import re

from _book.pages import ROOT

ENTRY = re.compile(r"^- \*\*(?P<names>.+?)\*\*: ", re.MULTILINE)
# A term in bold that is not a link already.
BOLD = re.compile(r"(?<!\[)\*\*(?P<term>[^*\n]+(?:\n[^*\n]+)?)\*\*(?!\])")


def with_anchors(text: str) -> str:
    """The glossary with an anchor at each entry."""
    return ENTRY.sub(lambda found: f'- <span id="{_anchor(found["names"])}"></span>'
                                   f'**{found["names"]}**: ', text)


def link_terms(text: str, glossary: str) -> str:
    """The Markdown text with each bold term of the glossary linked to its entry. glossary: the way
    to the glossary's page."""
    def linked(found):
        anchor = _anchors().get(_normal(found["term"]))
        return f"[{found[0]}]({glossary}#{anchor})" if anchor else found[0]

    return BOLD.sub(linked, text)


@functools.cache
def _anchors():
    """Term, as `_normal` writes it → its entry's anchor."""
    text = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8")
    return {_normal(name): _anchor(found["names"]) for found in ENTRY.finditer(text)
            for entry in found["names"].split(", ")
            # "flat (tensor)" is "flat" and "flat tensor"
            for name in (re.sub(r" \(.+\)", "", entry), re.sub(r"[()]", "", entry))}


def _anchor(names):
    # Ψ, B and b are three entries: a letter keeps its case.
    first = names.split(", ")[0]
    first = first if len(first) == 1 else first.lower()
    return "term-" + re.sub(r"[^\w]+", "-", first).strip("-")


def _normal(term):
    term = " ".join(term.split()).strip("`.,:; ")
    if len(term) == 1:
        return term
    term = term.lower()
    return term[:-1] if term.endswith("s") and not term.endswith("ss") else term
