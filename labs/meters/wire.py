"""The bytes that a rank really sends over TCP, as gloo does on a CPU: what an algorithm costs;
labs.meters.traffic counts what it is asked for."""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

# Linux's struct tcp_info: where tcpi_bytes_sent and tcpi_bytes_retrans are, since kernel 4.19
_LENGTH, _OFFSET, _FORMAT = 216, 200, "=QQ"


def sent_bytes() -> int | None:
    """Returns how many bytes this process has sent over the TCP connections that are open now, each
    counted once; None where the system does not say (it is not Linux, or an old one)."""
    if not hasattr(socket, "TCP_INFO"):
        return None
    total, seen = 0, False
    for connection in _connections():
        with contextlib.suppress(OSError):
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LENGTH)
            if len(told) == _LENGTH:
                # TCP counts a segment that it sends again as sent: `again` bytes are taken off.
                sent, again = struct.unpack_from(_FORMAT, told, _OFFSET)
                total, seen = total + sent - again, True
    return total if seen else None


def _connections() -> Iterator[socket.socket]:
    """A copy of each TCP socket of this process, closed after its use."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # one that was closed meanwhile, or is no socket
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.type == socket.SOCK_STREAM and copy.family in (socket.AF_INET,
                                                                       socket.AF_INET6):
                    yield copy
