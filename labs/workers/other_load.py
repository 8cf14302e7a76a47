"""What other programs use of this machine's cores, said before seconds are measured: with it a
picture may show another machine's lesson, for example no gain from overlap."""

import os
import time

from labs.workers import cores
from labs.workers.progress import OFF

SAMPLE = 0.25  # seconds in which the cores are watched
NEEDED = 0.75  # of the cores that this process may use: with fewer of them free, it says so
EVERY = 60.0  # seconds in which it says so once
_next = 0.0


def used_by_others(seconds: float = SAMPLE) -> float:
    """Returns how many cores other programs use at the moment; watches for so many seconds."""
    import psutil

    own = psutil.Process()
    began, busy, ours = time.monotonic(), _busy(psutil), _seconds_of(psutil, own)
    time.sleep(seconds)
    passed = time.monotonic() - began
    # The process that ranks are forked from may still import torch: that is no other program.
    ours = _seconds_of(psutil, own) - ours
    return max(0.0, (_busy(psutil) - busy - ours) / passed)


def name_load(measured: bool = True) -> None:
    """Prints a sentence where other programs leave this process too few cores for honest seconds.
    measured: False: say so of a whole run, and not of what is measured now. Prints nothing where
    outputs are compared or kept."""
    global _next
    if os.environ.get(OFF) == "0" or time.monotonic() < _next:
        return
    others, available, total = used_by_others(), cores.available(), os.cpu_count() or 1
    if total - others >= NEEDED * available:
        return
    _next = time.monotonic() + EVERY
    what = "the seconds measured now" if measured else "the seconds that it measures"
    print(f"○ This machine is busy: other programs use {min(others, total):.1f} of its {total} "
          f"cores. Bytes and calls are right all the same, but {what} are too long, and overlap "
          "may not show: end those programs, or run this again later.", flush=True)


def _busy(psutil) -> float:
    """Seconds that all cores have worked, for anybody."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # guests' seconds are counted in user and nice, too
    return sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)


def _seconds_of(psutil, own) -> float:
    """Seconds that this process and those below it have worked."""
    found = 0.0
    for process in [own, *own.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        found += times.user + times.system
    return found
