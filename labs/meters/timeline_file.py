"""Chrome trace files, as torch.profiler writes them, read one event at a time.

A trace of a few steps with stacks has hundreds of megabytes: it is read in pieces, and nothing of
it is kept here, so memory does not grow with the file.
"""

import gzip
import json
import re
import zlib
from pathlib import Path

PIECE = 1 << 20  # characters read at once
_BEGINS = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_HEADER = 1 << 22  # characters in which the events must begin
_LONGEST = 1 << 24  # characters that one event may take
_decoder = json.JSONDecoder(strict=False)


class TraceError(ValueError):
    """A file that is no trace, or not all of one; the message says what to do."""


def read_events(path, header: dict = None):
    """Yields the events of a trace file (.json or .json.gz) as dictionaries, in the file's order.

    header, if given, gets what stands before the events: "distributedInfo" with rank, world size
    and backend. Bytes that are no UTF-8 (FSDP2's labels with stacks have some) are replaced.
    Raises TraceError where the file is foreign or cut off, and FileNotFoundError.
    """
    path = Path(path)
    try:
        with _opened(path) as file:
            yield from _events(file, path.name, {} if header is None else header)
    except (EOFError, zlib.error):
        raise TraceError(f"{path.name} ends in the middle of its compressed data: copy it again, "
                         "or record it again") from None
    except gzip.BadGzipFile as error:
        raise TraceError(f"{path.name} is damaged ({error}): copy it again, or record it "
                         "again") from None


def _opened(path):
    with open(path, "rb") as file:
        packed = file.read(2) == b"\x1f\x8b"  # whatever its name says
    return (gzip.open if packed else open)(path, "rt", encoding="utf-8", errors="replace")


def _events(file, name, header):
    text, at = _first(file, name, header)
    number = 0
    while True:
        at = _BETWEEN.match(text, at).end()
        if text.startswith("]", at):
            return
        try:
            event, at = _decoder.raw_decode(text, at)
        except ValueError:
            text, at = text[at:], 0
            more = file.read(PIECE)
            if not more or len(text) > _LONGEST:
                raise _cut_off(name, number, text, at_end=not more) from None
            text += more
            continue
        if not isinstance(event, dict):
            raise TraceError(f"{name} is no trace: its event {number} is {event!r}")
        number += 1
        yield event


def _first(file, name, header):
    """(text, position of the first event in it)."""
    text = ""
    while not (found := _BEGINS.search(text)):
        more = file.read(PIECE)
        if not more or len(text) > _HEADER:
            raise _foreign(name, text)
        text += more
    if "distributedInfo" in text[:found.start()]:
        begin = text.index("{", text.index('"distributedInfo"'))
        header["distributedInfo"] = _decoder.raw_decode(text, begin)[0]
    return text, found.end()


def _foreign(name, text) -> TraceError:
    if not text:
        return TraceError(f"{name} is empty: the run that wrote it did not end its profiler")
    return TraceError(f"{name} is no trace of torch.profiler: it has no traceEvents")


def _cut_off(name, number, rest, at_end) -> TraceError:
    if not at_end or (rest and not rest.startswith("{")):
        return TraceError(f"{name} is damaged: after event {number:,} stands {rest[:20]!r}")
    return TraceError(f"{name} ends in the middle, after {number:,} events: the copy, or the "
                      "disk, was too short; record it again")
