"""A switch in Python that delivers each frame after a delay, for kernels that have no netem.

`machine` starts it as a script in its own network namespace: `relay.py SECONDS PORT...`. What
passes is exact; the delay is at least SECONDS, and longer when every core is busy.
"""

import contextlib
import ctypes
import errno
import select
import socket
import sys
import time
from collections import deque

# From linux/if_packet.h and linux/prctl.h; Python's socket module has no names for them.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
PR_SET_TIMERSLACK = 29
EVERY_PROTOCOL = 3
HEADER = 10  # bytes before each frame: what the kernel still has to compute or to cut
LARGEST = HEADER + 14 + 65_536
BUFFER = 4 << 20  # bytes that may wait in the kernel; it grants as much as the system allows


def main() -> None:
    """Passes frames on for ever."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)  # nanoseconds; a sleep is else 50 µs longer
    seconds = float(sys.argv[1])
    ports = {port.fileno(): port for port in map(open_port, sys.argv[2:])}
    print("ready", flush=True)
    owners = {}  # hardware address -> the port that it was seen at
    in_flight = deque()  # (when it is due, the port that it came from, the frame)
    while ports:
        pause = max(0.0, in_flight[0][0] - time.monotonic()) if in_flight else None
        for number in select.select(list(ports), [], [], pause)[0]:
            for frame in read_frames(ports, number):
                # An Ethernet frame: 6 bytes of the receiver's address, 6 of the sender's, 2 of
                # type.
                owners[frame[HEADER + 6:HEADER + 12]] = number
                in_flight.append((time.monotonic() + seconds, number, frame))
        while in_flight and in_flight[0][0] <= time.monotonic():
            _, origin, frame = in_flight.popleft()
            deliver(ports, owners, origin, frame)


def open_port(name: str) -> socket.socket:
    """A socket that receives each frame that arrives at a port, also those of 64 kB that the
    kernel would cut into pieces, or whose checksum it would compute, only on a real wire."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        port.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    port.bind((name, EVERY_PROTOCOL))
    port.setblocking(False)
    return port


def read_frames(ports: dict, number: int) -> list[bytes]:
    """What has arrived at a port. Removes the port if its host has gone."""
    frames = []
    try:
        while len(frames) < 64:  # the others get their turn
            frames.append(ports[number].recv(LARGEST))
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno != errno.ENETDOWN:  # only unplugged: that it may be again
            ports.pop(number).close()
    return frames


def deliver(ports: dict, owners: dict, origin: int, frame: bytes) -> None:
    """Sends a frame to the port of its receiver; to all others if that is unknown."""
    owner = owners.get(frame[HEADER:HEADER + 6])
    for number in list(ports) if owner is None else [owner]:
        if number != origin and number in ports:
            with contextlib.suppress(OSError):  # unplugged, or its queue is full: the frame is lost
                ports[number].send(frame)


if __name__ == "__main__":
    main()
