"""Small tables that draw themselves, for numbers that are read one by one."""

import html
from dataclasses import dataclass

from labs.pictures import palette

_CELL = "padding:2px 7px;border:0;font-variant-numeric:tabular-nums;text-align:"
_SIDE = {True: "left;overflow-wrap:anywhere", False: "right;white-space:nowrap"}
_LINE = f"1px solid {palette.RULE}"
_HEAD = f"border-bottom:{_LINE};opacity:0.75;font-weight:600"
_LAST = f"border-top:{_LINE}"


@dataclass(frozen=True)
class Table:
    """A table of texts. head: names of the columns. rows: their cells; the first column is set to
    the left, and `left` more of them. total: the last row is a sum. note: a line below."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple]
    total: bool = False
    note: str = ""
    left: int = 0

    def __repr__(self):
        lines = [self.head, *self.rows]
        widths = [max(len(str(cell)) for cell in column) for column in zip(*lines, strict=True)]
        texts = ["  ".join(f"{str(cell):{'<' if column <= self.left else '>'}{width}}"
                           for column, (cell, width) in enumerate(zip(row, widths, strict=True)))
                 for row in lines]
        return "\n".join([self.title, *map(str.rstrip, texts), *filter(None, [self.note])])

    def _repr_html_(self):
        body = "".join(self._row(row, "td", _LAST if self.total and row is self.rows[-1] else "")
                       for row in self.rows)
        note = f"<div style='opacity:0.75;margin-top:4px'>{html.escape(self.note)}</div>"
        return (f"<b>{html.escape(self.title)}</b><table style='border-collapse:collapse;"
                f"margin:4px 0 0 0'>{self._row(self.head, 'th', _HEAD)}{body}</table>"
                f"{note if self.note else ''}")

    def _row(self, row, tag, style) -> str:
        cells = "".join(
            f"<{tag} style='{_CELL}{_side(tag, column <= self.left)};{style}'>"
            f"{html.escape(str(cell))}</{tag}>" for column, cell in enumerate(row))
        return f"<tr>{cells}</tr>"


def _side(tag, is_left) -> str:
    """Where a cell's text stands; a head may take two lines, or its column would be wider than its
    numbers."""
    return "right" if tag == "th" and not is_left else _SIDE[is_left]
