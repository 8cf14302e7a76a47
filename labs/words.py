"""Articles, plurals and lists for messages: the one place that knows these rules of English."""

from collections.abc import Collection


def with_article(noun: str) -> str:
    """The noun after its indefinite article: `a str`, `an int`, `an FSDPModule`."""
    spelled = noun[:2].isupper() and noun[0] in "FHLMNRSX"  # read letter by letter: "an LSTM"
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


def named_ranks(ranks: Collection[int]) -> str:
    """The ranks by number, in ascending order: `rank 3`, `ranks 0 and 2`, `ranks 0–3`; of more than
    8 that are not consecutive the first two and the last."""
    first, last, count = min(ranks), max(ranks), len(ranks)
    if count > 2 and count == last - first + 1:
        return f"ranks {first}–{last}"
    if count > 8:
        return f"ranks {first}, {sorted(ranks)[1]}, … {last} ({count} of them)"
    return f"{plural('rank', count)} {listed(sorted(ranks))}"
