"""The caller's end of a rank's connection, which never makes the caller wait."""

import contextlib
import os
import struct
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

SOON = 0.05  # seconds that the rest of a message may take to be read in one go
READ_BYTES = 1 << 20  # bytes of one read
_SHORT, _LONG = struct.Struct("!i"), struct.Struct("!Q")  # sizes before a message; -1 before a long


class RankPipe:
    """Sends and receives whole messages, as far as that is possible now; the rest comes later.

    A Connection would wait inside a call for the other end: for ever where the rank is suspended
    before it has read what it is to run, or in the middle of a large result. The rank's end is an
    ordinary Connection, so the bytes are what Connection's private `_send_bytes` makes of a message
    (tests/workers/test_rank_pipe.py compares them).
    """

    def __init__(self, connection: Connection):
        os.set_blocking(connection.fileno(), False)  # the other end has a mode of its own
        self._connection = connection
        self._unsent: deque[memoryview] = deque()
        self._part = bytearray()  # of what is being read
        self._size = None  # of the message that is being read; None: not known yet
        self._is_long = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    # to the rank

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: object) -> None:
        """Sends a message, now or whenever `flush` finds room for it."""
        self.send_bytes(ForkingPickler.dumps(message))

    def send_bytes(self, data: bytes) -> None:
        """Sends what the rank's `recv_bytes` returns. `data` is not copied."""
        size = len(data)
        self._unsent.append(memoryview(
            _SHORT.pack(size) if size < 2**31 else _SHORT.pack(-1) + _LONG.pack(size)))
        self._unsent.append(memoryview(data))
        self.flush()

    def flush(self) -> None:
        """Writes as much as there is room for. What is for a rank that has ended is dropped."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                try:
                    written = os.write(self.fileno(), self._unsent[0])
                except (BrokenPipeError, ConnectionResetError):
                    self._unsent.clear()
                    return
                self._unsent[0] = self._unsent[0][written:]
                if not self._unsent[0]:
                    self._unsent.popleft()

    # from the rank

    def has_arrived(self, seconds: float = 0.0) -> bool:
        """Whether there is something to read, or the end, within so many seconds."""
        return self._connection.poll(seconds)

    def receive(self) -> object | None:
        """The next message, or None while a part of it is still to come. Raises EOFError or OSError
        at the end."""
        while True:
            wanted = self._size if self._size is not None else (
                _LONG.size if self._is_long else _SHORT.size)
            if not self._read_up_to(wanted):
                return None
            data, self._part = self._part, bytearray()
            if self._size is not None:
                self._size, self._is_long = None, False
                # Looked up now: scripts/grade puts a careful one in its place.
                return ForkingPickler.loads(data)
            size, = (_LONG if self._is_long else _SHORT).unpack(data)
            if size == -1:
                self._is_long = True
            else:
                self._size = size

    def _read_up_to(self, size) -> bool:
        """Whether so many bytes of what is being read are here."""
        while len(self._part) < size:
            try:
                data = os.read(self.fileno(), min(size - len(self._part), READ_BYTES))
            except BlockingIOError:
                # A large message comes in many pieces, one right after the other.
                if not self.has_arrived(SOON):
                    return False
                continue
            if not data:
                raise EOFError
            self._part += data
        return True
