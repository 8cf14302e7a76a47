"""What a cell of the workbook may not be: too long, too wide, too wordy, or plotting."""

import html
import re

MAX_WORDS = 80
MAX_HINT_WORDS = 120
MAX_LINES = 16
MAX_SCRIPT_LINES = 135  # of a cell that writes a script: a whole file, most of it given
MAX_SCRIPT_GAP_LINES = 20
# What JupyterLab shows without scrolling beside its file browser, in a window of 1280 pixels.
MAX_COLUMNS = 101
HINT = re.compile(r"<details>(.*?)</details>", re.DOTALL)
# A link beside words; a table's cell may be one link, and code has a font of its own.
PLAIN_LINK = re.compile(r"(?<![*!\w`])\[(?!`)[^\[\]]+\]\(https?://[^)\s]+\)(?!\*)")
IN_A_CELL = re.compile(r"(?<=\|) *\[[^\[\]]+\]\([^)\s]+\) *(?=\|)")  # a table's
TABLE_HEAD = re.compile(r"^\|(.*)\|\n\|[-:| ]+\|$", re.MULTILINE)
PLOTTING = re.compile(r"^\s*(import|from)\s+matplotlib\b|\bplt\.|^\s*%matplotlib\b")


def count_words(markdown):
    """Words a reader sees in a text cell.

    Headings, tables, code and link texts count; link targets, HTML tags, HTML comments and
    styles do not; a formula, `$...$` or `$$...$$`, is one word. Something without a letter or a
    digit ('|', '---', '→') is no word.
    """
    text = re.sub(r"<!--.*?-->|<style.*?</style>", " ", markdown, flags=re.DOTALL)
    text = re.sub(r"\$\$.+?\$\$|\$(?=\S)[^$\n]+(?<=\S)\$(?!\d)", " formula ", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)|\]\[[^\]]*\]", "] ", text)
    text = html.unescape(re.sub(r"</?[a-zA-Z][^<>]*>", " ", text))
    return sum(any(map(str.isalnum, word)) for word in text.split())


def lint(cell):
    """Yields one sentence for each thing wrong with the cell."""
    if cell.kind == "markdown":
        yield from _lint_text(cell)
    elif cell.kind == "code":
        yield from _lint_code(cell)


def _lint_text(cell):
    """A folded hint counts by itself: it is read only by who opens it."""
    words = count_words(HINT.sub(" ", cell.source))
    if words > MAX_WORDS:
        yield cell.problem(0, f"{words} words; a text cell has at most {MAX_WORDS}.")
    for link in PLAIN_LINK.findall(IN_A_CELL.sub(" ", cell.source)):
        yield cell.problem(0, f"{link!r} stands in a sentence, where only a colour tells a link "
                              "apart: write *[text](address)*.")
    for head in TABLE_HEAD.findall(cell.source):
        if not all(name.strip() for name in head.split("|")):
            yield cell.problem(0, f"the table |{head}| has a column without a name, which a screen "
                                  "reader cannot say.")
    for hint in HINT.findall(cell.source):
        if count_words(hint) > MAX_HINT_WORDS:
            yield cell.problem(
                0, f"a hint of {count_words(hint)} words; it has at most {MAX_HINT_WORDS}."
            )


def _lint_code(cell):
    shown = cell.solution_lines()
    most = MAX_SCRIPT_LINES if cell.script else MAX_LINES
    if len(shown) > most:
        what = "a script's cell" if cell.script else "a code cell"
        yield cell.problem(
            shown[most][0] - cell.line, f"{len(shown)} lines; {what} has at most {most}."
        )
    for region in cell.regions if cell.script else ():
        if len(region.lines) > MAX_SCRIPT_GAP_LINES:
            yield cell.problem(region.begin, f"{len(region.lines)} lines; a gap in a script has at "
                                             f"most {MAX_SCRIPT_GAP_LINES}.")
    for number, text in shown:
        if len(text) > MAX_COLUMNS:
            yield cell.problem(number - cell.line, f"a line of {len(text)} characters; a line of "
                                                   f"code has at most {MAX_COLUMNS}.")
        if PLOTTING.search(text.split("# ")[0]):
            yield cell.problem(
                number - cell.line,
                f"plotting code, {text.strip()!r}, belongs in "
                "labs/; let the cell end with an object that "
                "draws itself.",
            )
