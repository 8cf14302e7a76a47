"""Formulas as MathML, which browsers draw themselves: MathJax would come from another host."""

import re

BOX = "<div class='formula' tabindex='0' role='group' aria-label='formula'>{}</div>"
DISPLAY, INLINE = re.compile(r"\$\$(.+?)\$\$", re.DOTALL), re.compile(r"\$([^\s$][^$\n]*?)\$(?!\d)")


def render(text: str) -> str:
    """The Markdown text with its formulas, $…$ and $$…$$, as MathML. One that stands by itself can
    be scrolled, also with the keyboard, where the page is narrow."""
    from latex2mathml.converter import convert

    text = DISPLAY.sub(lambda found: BOX.format(convert(found[1], display="block")), text)
    return INLINE.sub(lambda found: convert(found[1]), text)
