"""A host's link to the switch: how it is shaped by `tc`, and the kernel's counters of its bytes."""

import contextlib
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_FRAME = 9_100  # bytes of the largest frame, with its headers, rounded up


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a host sent and received over its link, with all headers, as the kernel counts
    them in /sys/class/net/eth0/statistics."""

    sent: int = 0
    received: int = 0

    def __sub__(self, earlier: "LinkBytes") -> "LinkBytes":
        return LinkBytes(self.sent - earlier.sent, self.received - earlier.received)

    def __str__(self):
        return f"{self.sent:,} bytes sent, {self.received:,} received"


def link_bytes(pid: int | str = "self") -> LinkBytes:
    """Returns what passed eth0 so far on the host of a process. On a host, without an argument:
    that host's own. Raises OSError where the process has ended."""
    # The same counters as in /sys/class/net, but readable from outside the host too.
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            fields = numbers.split()
            return LinkBytes(sent=int(fields[8]), received=int(fields[0]))
    raise OSError(f"process {pid} is on no host: it has no link eth0")


def set_bandwidth(bandwidth: str) -> None:
    """On a host of two: what it sends passes its link with this bandwidth from now on, as
    "50mbit". Each host does so for its own direction. Raises ValueError where that is no bandwidth,
    RuntimeError where `tc` refuses: on no host, or on one whose link was given no bandwidth."""
    shape = token_bucket(read_bandwidth(bandwidth))
    done = subprocess.run(["tc", "qdisc", "change", "dev", "eth0", "root", *shape.split()],
                          capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the bandwidth of eth0 cannot be changed: {done.stderr.strip()}")


def read_bandwidth(text: str) -> float:
    """Returns bits per second of `200mbit`, `1gbit` or `500kbit`, as `tc` writes them."""
    return _number_with_unit(text, ("bit", "kbit", "mbit", "gbit"), "bandwidth", "200mbit")


def read_latency(text: str) -> float:
    """Returns seconds of `1ms`, `50us` or `0.1s`."""
    return _number_with_unit(text, ("us", "ms", "s"), "latency", "1ms")


def token_bucket(bits_per_second: float) -> str:
    """The arguments of `tc` that limit what an interface sends.

    The bucket holds what passes in 0.25 ms, or one frame if that is more. With the usual large one
    (256 kB) whatever is smaller than the bucket would pass at once, as if the link had no limit.
    """
    burst = max(_FRAME + 1_000, round(bits_per_second / 8 * 0.25e-3))
    return f"tbf rate {bits_per_second:.0f}bit burst {burst} latency 400ms"


def _number_with_unit(text, units, what, example) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip().lower()) if text else None
    with contextlib.suppress(KeyError):
        if match and match[2] in units and float(match[1]) > 0:
            return float(match[1]) * _UNITS[match[2]]
    raise ValueError(f"{what}={text!r}: give a number above 0 and one of {', '.join(units)}, "
                     f"like {example!r}")
