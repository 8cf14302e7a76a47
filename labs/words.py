"""Articles, plurals and lists for messages: the one place that knows these rules of English."""

import textwrap
from collections.abc import Collection

LINE = 88  # characters of a line that a notebook shows in full in a window of 1280 pixels


def with_article(noun: str) -> str:
    """The noun after its indefinite article: `a str`, `an int`, `an FSDPModule`."""
    # read letter by letter: "an LSTM"
    spelled = noun[:2].isupper() and noun[0] in "FHLMNRSX" or noun == "ndarray"
    return f"{'an' if noun[0] in 'AEIOaeiou' or spelled else 'a'} {noun}"


def plural(noun: str, number: float) -> str:
    """The noun as it stands after this number: `rank` after 1, `ranks` after 0 or 2."""
    return noun if number == 1 else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """The number and its noun: `1 rank`, `4 ranks`."""
    return f"{number} {plural(noun, number)}"


def listed(items: Collection) -> str:
    """The items as a list in a sentence: `0`, `0 and 2`, `0, 2 and 5`."""
    *most, last = map(str, items)
    return f"{', '.join(most)} and {last}" if most else last


def wrapped(text: str, width: int = LINE) -> str:
    """The text in lines of at most `width` characters, broken between words. JupyterLab breaks what
    a cell prints in the middle of a word. A continued line is indented as the first one is; words
    that are longer stay in one piece."""
    lines = []
    for line in text.split("\n"):
        indent = line[:len(line) - len(line.lstrip())]
        lines += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False,
                               break_on_hyphens=False, replace_whitespace=False,
                               drop_whitespace=True) or [line]
    return "\n".join(lines)


def format_distinct(one: float, other: float, digits: int = 10) -> tuple[str, str]:
    """Two different numbers with so many digits, or as many more as separate them; integers have
    them all."""
    for enough in range(digits, 18):
        texts = tuple(f"{number:,}" if isinstance(number, int) else f"{number:,.{enough}g}"
                      for number in (one, other))
        if texts[0] != texts[1]:
            break
    return texts


def times(one: float, other: float) -> str:
    """How many times `other` it is, for a sentence: `4x`, `0.5x`, `1.004x`; with as many digits as
    separate it from once, so that two different numbers are never `1x` each other."""
    for digits in range(2, 18):
        text = f"{one / other:.{digits}g}"
        if text != "1":
            break
    return f"{text}x"


def to_within(difference: float) -> str:
    """How far two results are apart, for a verdict: `to 3e-08`, or `bit for bit`."""
    return f"to {difference:.0e}" if difference else "bit for bit"


def named_ranks(ranks: Collection[int]) -> str:
    """The ranks by number, in ascending order: `rank 3`, `ranks 0 and 2`, `ranks 0–3`; of more than
    8 that are not consecutive the first two and the last."""
    first, last, count = min(ranks), max(ranks), len(ranks)
    if count > 2 and count == last - first + 1:
        return f"ranks {first}–{last}"
    if count > 8:
        return f"ranks {first}, {sorted(ranks)[1]}, … {last} ({count} of them)"
    return f"{plural('rank', count)} {listed(sorted(ranks))}"
