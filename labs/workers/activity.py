"""On a rank: how busy its threads are, so that work, and waiting for a core, can be told from
waiting for other ranks."""

import os
import threading
import time
from dataclasses import dataclass

IDLE_SHARE = 0.05  # of the time: threads that are busy less are idle
RAN_SHARE = 0.01  # of the time: what a thread that works runs, on any crowded machine
_HAS_PROC = os.path.exists("/proc/self/schedstat")
GLOO = ("gloo_tcp_loop", "pt_gloo_runloo")  # Linux cuts names after 15 characters


@dataclass(frozen=True)
class Busy:
    """Seconds in which threads ran or waited for a core, since the process began; on a crowded
    machine most of it is waiting. gloo: its threads that move data. gloo_ran: each of these,
    without waiting. others, others_ran: of all threads but the one that calls. starved: what of
    the main thread's was waiting for a core. at: monotonic seconds."""

    gloo: float
    gloo_ran: dict[int, float]
    others: float
    others_ran: dict[int, float]
    starved: float
    at: float


def measure() -> Busy:
    """The present values; where Linux's /proc is missing, the processor time of the process, from
    which gloo's cannot be told."""
    now = time.monotonic()
    if not _HAS_PROC:
        others = time.process_time() - time.thread_time()
        return Busy(0.0, {}, others, {0: others}, 0.0, now)
    own, main = threading.get_native_id(), os.getpid()
    gloo = others = starved = 0.0
    gloo_ran, others_ran = {}, {}
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread == own:
            continue
        ran, delayed = schedule(thread)
        others += ran + delayed
        others_ran[thread] = ran
        if thread == main:
            starved = delayed
        elif _name(thread).startswith(GLOO):
            gloo += ran + delayed
            gloo_ran[thread] = ran
    return Busy(gloo, gloo_ran, others, others_ran, starved, now)


def main_thread_sleeps() -> bool:
    """Whether the main thread neither runs nor waits for a core just now; False where the system
    does not tell."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/stat") as file:
            return file.read().rpartition(") ")[2][0] == "S"
    except OSError:
        return False


def schedule(thread: int, process: int | str = "self") -> tuple[float, float]:
    """(seconds that a thread ran, seconds that it waited for a core); zeros once it has ended."""
    try:
        with open(f"/proc/{process}/task/{thread}/schedstat") as file:
            ran, delayed, _ = file.read().split()
    except OSError:
        return 0.0, 0.0
    return int(ran) / 1e9, int(delayed) / 1e9


def _name(thread) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read()
    except OSError:
        return ""


class ActivityLog:
    """Since when threads have been idle, from one call of `update` to the next."""

    def __init__(self):
        self.last = self.first = measure()
        self.gloo_idle_since = self.idle_since = self.last.at

    def update(self) -> None:
        now, before = measure(), self.last
        span = now.at - before.at
        # Idle ones wake to look for data, too. On a crowded machine they wait for a core before:
        # those of many groups together so long that they would never be idle (15 threads on 2 cores
        # with a load of 10: up to 26 %), although each ran for 0.4 % of the time at most.
        if (now.gloo - before.gloo > IDLE_SHARE * span
                and _most(now.gloo_ran, before.gloo_ran) > RAN_SHARE * span):
            self.gloo_idle_since = now.at
        if (now.others - before.others > IDLE_SHARE * span
                and _most(now.others_ran, before.others_ran) > RAN_SHARE * span):
            self.idle_since = now.at
        self.last = now

    @property
    def starved(self) -> float:
        """Seconds that the main thread has waited for a core, since this log began."""
        return self.last.starved - self.first.starved


def _most(now, before) -> float:
    """Seconds that the busiest thread has run since `before`."""
    return max((seconds - before.get(thread, 0.0) for thread, seconds in now.items()), default=0.0)
