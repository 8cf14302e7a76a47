"""A rank's connection to the process that called `launch`."""

import os
import threading

_channel = None


class Channel:
    """Messages to the caller: (kind, content) pairs, from any thread."""

    def __init__(self, connection, rank: int):
        self.connection = connection
        self.rank = rank
        self._lock = threading.Lock()
        self._owner = os.getpid()

    @property
    def is_ours(self) -> bool:
        """Whether this process is the rank, and not one that the rank has forked."""
        return os.getpid() == self._owner

    def send(self, kind: str, content=None) -> None:
        """Sends one message; from a process that the rank has forked, nothing. A DataLoader's
        worker, for example, inherits the lock, perhaps while the heartbeat has it, which then is
        never released; and its bytes would meet the rank's own in the pipe."""
        if not self.is_ours:
            return
        with self._lock:
            self.connection.send((kind, content))

    def activate(self) -> None:
        """Makes this the channel that `report` uses."""
        global _channel
        _channel = self


def report(step: int | None = None, total: int | None = None, **metrics: float) -> None:
    """Sends numbers from rank 0 to the caller: a progress bar now, a series in the result.

    step counts from 0; total is the number of steps, if known; each metric is a number or a
    one-element tensor. On other ranks, in processes that a rank has forked, and outside a launch,
    it does nothing.
    """
    if _channel is None or _channel.rank != 0:
        return
    _channel.send("report", (step, total, {name: float(value) for name, value in metrics.items()}))
