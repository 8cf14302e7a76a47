"""Formulas as MathML, which browsers draw themselves: MathJax would come from another host."""

import re

DISPLAY, INLINE = re.compile(r"\$\$(.+?)\$\$", re.DOTALL), re.compile(r"\$([^\s$][^$\n]*?)\$(?!\d)")


def render(text: str) -> str:
    """The Markdown text with its formulas, $…$ and $$…$$, as MathML."""
    from latex2mathml.converter import convert

    text = DISPLAY.sub(lambda found: convert(found[1], display="block"), text)
    return INLINE.sub(lambda found: convert(found[1]), text)
