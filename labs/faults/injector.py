"""When a fault happens: on a rank, in a step. After the EventInjector of torchft's tests."""

import os
import signal
from collections.abc import Callable, Hashable
from typing import Any


def killed() -> None:
    """Ends this process by SIGKILL, as a machine that is switched off, or out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


class FaultInjector:
    """Plans faults by rank and step, and runs them where they are due.

    step: a number; or, where several jobs take turns on a rank, (step, turn). It can be sent to
    ranks, as long as its faults can.
    """

    def __init__(self):
        self._faults: dict[tuple[int | None, Hashable], list[Callable[[], Any]]] = {}

    def fail_at(self, rank: int | None, step: Hashable,
                fault: Callable[[], Any] = killed) -> "FaultInjector":
        """Plans a fault for a rank, or, for None, for every rank; returns this injector. Several
        for one step run in the order in which they were planned."""
        self._faults.setdefault((rank, step), []).append(fault)
        return self

    def check(self, rank: int, step: Hashable) -> None:
        """On a rank, at the beginning of a step: runs what was planned for it, once each."""
        for due in ((rank, step), (None, step)):
            for fault in self._faults.pop(due, []):
                fault()
