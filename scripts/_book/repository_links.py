"""Turns the links of a file of the repository into links of its page."""

import os
import re
from collections.abc import Callable
from pathlib import PurePosixPath

from _book.pages import ROOT, Page, page_of

# [text](target); a picture's ![…](…) is one, too. The text may hold [brackets] once.
LINK = re.compile(r"(?P<head>!?\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\()"
                  r"(?P<target>[^()\s]+)\)")
FENCE = re.compile(r"^(```|~~~)")
CODE = re.compile(r"(`+)(?:(?!\1).)+?\1", re.DOTALL)


class DeadLink(Exception):
    """A link to a file that the repository does not have; the sentence names both files."""


def rewrite(text: str, page: Page, repository: str | None) -> str:
    """The Markdown text of a page with its relative links turned into links between pages. A link
    to a file that is no page leads to the repository's address; without one it becomes its text.
    Raises DeadLink."""
    return outside_code(text, lambda part: LINK.sub(
        lambda found: _rewritten(found, page, repository), part))


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """The Markdown text with `change` applied to each piece that is not code."""
    done, fenced, block = [], False, []
    for line in text.splitlines(keepends=True):
        if FENCE.match(line.lstrip()):
            done.append(_outside_spans("".join(block), change) if not fenced else "".join(block))
            done.append(line)
            fenced, block = not fenced, []
        else:
            block.append(line)
    rest = "".join(block)
    return "".join(done) + (rest if fenced else _outside_spans(rest, change))


def _outside_spans(text, change):
    """A span `code` is set aside, so that a change may see the text around it as one piece."""
    spans = []

    def set_aside(found):
        spans.append(found[0])
        return f"\0{len(spans) - 1}\0"

    changed = change(CODE.sub(set_aside, text))
    return re.sub("\0(\\d+)\0", lambda found: spans[int(found[1])], changed)


def _rewritten(found, page, repository):
    target, anchor = (found["target"].split("#", 1) + [""])[:2]
    if re.match(r"[a-z]+:", target) or not target:
        return found[0]
    path = os.path.normpath(PurePosixPath(page.source).parent / target)
    other = page_of(path) or page_of(f"{path}/README.md")
    if found["head"].startswith("!"):
        return f"{found['head']}{_relative(f'files/{path}', page)})"
    if other:
        return f"{found['head']}{_relative(other.address, page)}.html{_hash(anchor)})"
    if not (ROOT / path).exists():
        raise DeadLink(f"{page.source} links to {target}, which is not in the repository.")
    if repository:
        return f"{found['head']}{repository}/blob/main/{path}{_hash(anchor)})"
    return found["text"]


def _hash(anchor):
    return f"#{anchor}" if anchor else ""


def _relative(address, page):
    """The way from a page to another address of the site."""
    return os.path.relpath(address, os.path.dirname(page.address) or ".")
