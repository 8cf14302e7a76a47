"""Published bubble rates with the measured times they belong to, from a CSV or JSON file of rows.

zero_bubble_table_9.csv has those of the Zero Bubble paper (arXiv 2401.10241): the times in
milliseconds of its table 9, the rates of its table 5, for four models whose stages each have so
many layers, one a chunk when interleaved: 3, 4, 3 and 2.

A row has p, m, virtual_stages (chunks a rank; only 1F1B-I uses them), T_F, T_B, T_W, T_comm (in any
one unit), schedule and bubble_rate (a share of the step; left empty where none is published). Field
names may be spelled in other ways, and a row may have a column for each schedule instead of the
last two.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labs.predictions.pipelines.formulas import INTERLEAVED, KINDS, Kind
from labs.predictions.pipelines.simulate import Times

ROWS = Path(__file__).with_name("zero_bubble_table_9.csv")
MOST_ACTIONS = 3_000_000  # of a row, which take a minute
_SPELLINGS = {
    "p": ("ranks", "stages", "pp", "pipeline_stages"), "m": ("micro_batches", "n"),
    "virtual_stages": ("v", "chunks", "vpp"), "T_F": ("F",), "T_B": ("B",), "T_W": ("W",),
    "T_comm": ("comm", "transfer"), "schedule": (), "bubble_rate": ("bubble", "published")}
_SCHEDULES = {"interleaved": "1F1B-I", "interleaved1f1b": "1F1B-I", "1f1binterleaved": "1F1B-I"}


class RowsError(ValueError):
    """The file of rows cannot be used; one sentence names the row and the field."""


@dataclass(frozen=True)
class PublishedBubble:
    """A row. times: of all layers of a rank, for each rank the same. bubble: as published."""

    id: str
    kind: Kind
    ranks: int
    micro_batches: int
    chunks: int
    times: Times
    bubble: float | None


def load_published_bubbles(path: str | Path = ROWS) -> list[PublishedBubble]:
    """Every row of the file, in its order. Raises RowsError."""
    rows = _rows(path)
    return [bubble for number, row in enumerate(rows, 1)
            for bubble in _bubbles({_plain(name): value for name, value in row.items()},
                                   f"row {number} of {path}")]


def _rows(path) -> list[dict]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RowsError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RowsError(f"{path} is no text file") from None
    rows = _json_rows(text, path) if text.lstrip()[:1] in ("{", "[") else _csv_rows(text)
    if not rows:
        raise RowsError(f"{path} has no rows: expected CSV with the columns "
                        f"{', '.join(_SPELLINGS)}, or JSON with a list of such rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise RowsError(f"row {number} of {path} is not an object with named fields")
    return rows


def _json_rows(text, path) -> list:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise RowsError(f"{path} is not JSON: {error}") from None
    rows = content.get("rows") if isinstance(content, dict) else content
    return rows if isinstance(rows, list) else []


def _csv_rows(text) -> list[dict]:
    header = text.lstrip().partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    return [{(name or "").strip(): value for name, value in row.items()}
            for row in csv.DictReader(io.StringIO(text.lstrip()), delimiter=delimiter)]


def _bubbles(row, where) -> Iterator[PublishedBubble]:
    """The row as one bubble rate; or as several, if it has a column for each schedule."""
    columns = [(kind, row[name]) for name in row if (kind := _kind(name))]
    nested = [value for value in row.values() if isinstance(value, dict)]
    if nested and not columns:  # {"schedule": {"1F1B": 0.24, ...}}
        row = {**row, **{_plain(name): rate for rates in nested for name, rate in rates.items()}}
        columns = [(kind, row[name]) for name in row if (kind := _kind(name))]
    if columns and (nested or not _find(row, "schedule")[0]):
        for kind, published in columns:
            yield _bubble(row, where, kind, published)
        return
    name = _required(row, "schedule", where)
    kind = _kind(_plain(str(name)))
    if not kind:
        raise RowsError(f"{where}: schedule is {name!r:.40}; known are {', '.join(KINDS)}")
    yield _bubble(row, where, kind, _required(row, "bubble_rate", where, may_be_empty=True))


def _bubble(row, where, kind, published) -> PublishedBubble:
    ranks, micro_batches = (_whole(row, field, where) for field in ("p", "m"))
    chunks = _whole(row, "virtual_stages", where) if kind is INTERLEAVED else 1
    if kind is INTERLEAVED and micro_batches % ranks:
        raise RowsError(f"{where}: m is {micro_batches}, but the interleaved order needs a "
                        f"multiple of p = {ranks}")
    if 3 * ranks * micro_batches * chunks > MOST_ACTIONS:
        raise RowsError(f"{where}: p, m and virtual_stages make more than {MOST_ACTIONS:,} actions")
    times = Times(*(_number(row, field, where) for field in ("T_F", "T_B", "T_W", "T_comm")))
    if not times.F + times.B + times.W:
        raise RowsError(f"{where}: T_F, T_B and T_W are all 0")
    own = row.get("id") or row.get("model") or where.partition(" of ")[0]
    return PublishedBubble(str(own), kind, ranks, micro_batches, chunks, times,
                           _share(published, where))


def _whole(row, field, where) -> int:
    number = _number(row, field, where)
    if number < 1 or number != int(number):
        raise RowsError(f"{where}: {field} is {number:g}; expected a whole number of at least 1")
    return int(number)


def _number(row, field, where) -> float:
    value = _required(row, field, where)
    number = _parsed(value)
    if number is None or number < 0:
        raise RowsError(f"{where}: {field} is {value!r:.40}; expected a number of at least 0")
    return number


def _share(value, where) -> float | None:
    if _is_empty(value):
        return None
    number = _parsed(value)
    if number is None or not 0 <= number < 1:
        raise RowsError(f"{where}: bubble_rate is {value!r:.40}; expected a share of the step, "
                        "from 0 to 1")
    return number


def _parsed(value) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _required(row, field, where, may_be_empty=False):
    name, value = _find(row, field)
    if name is None:
        raise RowsError(f"{where} has no {field}")
    if _is_empty(value) and not may_be_empty:
        raise RowsError(f"{where}: {field} is empty")
    return value


def _find(row, field) -> tuple[str | None, object]:
    """The field under any of its spellings: (its name in the row, its value); None if missing."""
    for name in (field, *_SPELLINGS[field]):
        if _plain(name) in row:
            return _plain(name), row[_plain(name)]
    return None, None


def _is_empty(value) -> bool:
    return value is None or isinstance(value, str) and not value.strip()


def _kind(plain_name) -> Kind | None:
    """The schedule that a plain name means."""
    known = {_plain(name): kind for name, kind in KINDS.items()}
    return known.get(plain_name) or KINDS.get(_SCHEDULES.get(plain_name, ""))


def _plain(name) -> str:
    """`T_comm`, `t comm` and `TComm` are one field."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())
