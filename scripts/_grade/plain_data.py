"""Values as plain data: what the judge and a submission's process send each other.

A message is JSON and the bytes of its tensors behind it. To read one runs no code of the sender's:
there is no pickle, a class is one that labs defines, and everything has a limit. The JSON is a
value itself where it is None, a bool, a string, a float or a small int; else a list of a kind and
its content, for example ["list", [1, 2]].
"""

import json
import struct
from collections.abc import Callable
from typing import Any

from _grade.plain_kinds import LONGEST, TEXT, Malformed, NotPlain, Shared
from _grade.plain_reader import Reader
from _grade.plain_writer import Writer

_HEAD = struct.Struct(">QQ")  # bytes of JSON, bytes behind it


def pack(value: Any, strict: bool = False, shared: Shared | None = None,
         reads: bool = True) -> bytes:
    """The message of a value. strict: raises NotPlain where a part has no plain form, instead of
    sending the name of its class. shared: of the message that this one answers; its own tensors are
    added. reads: whether generators are read. Raises NotPlain too where it is beyond a limit."""
    writer = Writer(strict, Shared() if shared is None else shared, reads)
    text = json.dumps(writer.value(value), separators=(",", ":")).encode()
    length = sum(map(len, writer.buffers))
    if len(text) > TEXT or len(text) + length > LONGEST:
        raise NotPlain(f"is larger than {LONGEST / 1e6:g} MB")
    return b"".join([_HEAD.pack(len(text), length), text, *writer.buffers])


def read(receive: Callable[[int], bytes], shared: Shared | None = None) -> Any:
    """The value of the next message. receive(n): exactly n bytes. shared: as of `pack`. Raises
    Malformed."""
    text, length = _HEAD.unpack(receive(_HEAD.size))
    if text > TEXT or text + length > LONGEST:
        raise Malformed(f"a message of {text + length:,} bytes")
    text = receive(text)
    data = receive(length)
    try:
        return Reader(data, Shared() if shared is None else shared).value(json.loads(text))
    except Malformed:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError,
            OverflowError, RuntimeError, ArithmeticError) as error:
        raise Malformed(f"a message that cannot be read ({type(error).__name__})") from None


def unpack(message: bytes) -> Any:
    """The value of a complete message. Raises Malformed."""
    place = 0

    def receive(size):
        nonlocal place
        piece = message[place:place + size]
        if len(piece) < size:
            raise Malformed("a message that ends too early")
        place += size
        return piece

    found = read(receive)
    if place != len(message):
        raise Malformed("a message with something behind it")
    return found
