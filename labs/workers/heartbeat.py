"""On a rank: a thread that reports to the caller what the main thread is doing."""

import os
import pickle
import sys
import threading
import time
from dataclasses import dataclass

from labs.workers import source_lines
from labs.workers.collective_matching import COMPARED, without_variant

INTERVAL = 0.5  # seconds between two heartbeats
_WAITING_CALLS = {*COMPARED, "all_gather_coalesced", "monitored_barrier", "send", "recv",
                  "batch_isend_irecv", "new_group", "init_process_group"}


class Heartbeat(threading.Thread):
    """Sends a heartbeat, answers `where`, and ends the process when the caller is gone."""

    def __init__(self, channel):
        super().__init__(name="labs-heartbeat", daemon=True)
        self.channel = channel
        self.main = threading.main_thread().ident

    def run(self):
        try:
            while True:
                if not self.channel.connection.poll(INTERVAL):
                    self.channel.send("heartbeat", self.progress())
                elif self.channel.connection.recv() == "where":
                    self.channel.send("position", self._position())
        except (EOFError, OSError):
            os._exit(1)

    def progress(self) -> "Progress":
        return Progress(*_counts(), _collective(self._frame()))

    def _frame(self):
        return sys._current_frames()[self.main]

    def _position(self) -> dict:
        """Where the main thread is: those fields of an `Outcome`; seconds None where unknown."""
        frame, progress, pending = self._frame(), self.progress(), _oldest_pending()
        position = {"collective": progress.collective or "", "number": progress.number,
                    "seconds": None, "stack": source_lines.stack_of(frame)}
        if pending:
            name = progress.collective or pending["profiling_name"].split(":")[-1]
            position.update(collective=name, number=pending["collective_seq_id"],
                            seconds=time.time() - pending["time_created_ns"] / 1e9)
        return position


@dataclass(frozen=True)
class Progress:
    """How far a rank has come in the default group.

    issued, done: collectives (None where torch does not tell). collective: the torch.distributed
    function that the main thread is in, or None.
    """

    issued: int | None = None
    done: int | None = None
    collective: str | None = None

    @property
    def waiting(self) -> bool:
        return self.collective is not None or (self.issued or 0) > (self.done or 0)

    @property
    def number(self) -> int | None:
        """The number of the collective it waits in, from 1; None if it is not one of all ranks."""
        if self.done is not None and (self.issued or 0) > self.done:
            return self.done + 1
        return None

    def can_never_be_joined_by(self, finished: "Progress") -> bool:
        """Whether a rank that has returned, `finished`, left before the collective we wait in."""
        return (self.number is not None and finished.issued is not None
                and finished.issued < self.number)


def _collective(frame) -> str | None:
    """The outermost torch.distributed call that `frame` is inside of, or None."""
    calls = [place.function for place in source_lines.stack_of(frame)
             if place.function in _WAITING_CALLS
             and place.filename.endswith("distributed_c10d.py")]
    return without_variant(calls[0]) if calls else None


def _flight_recorder(collectives: bool) -> dict:
    """The flight recorder's present state; empty where torch has changed it. The function is
    private, but the only way to learn, while the main thread is blocked in C++, which collective
    it waits in."""
    try:
        from torch._C import _distributed_c10d as c10d

        stacks, only_active = False, True
        return pickle.loads(c10d._dump_fr_trace(collectives, stacks, only_active))
    except Exception:
        return {}


def _counts() -> tuple[int | None, int | None]:
    """(issued, done) collectives of the default group, or (None, None) if torch does not tell."""
    groups = _flight_recorder(False).get("pg_status")
    if groups is None:
        return None, None
    status = groups.get("0", {})  # absent until the first collective; -1 means none
    issued, done = (status.get(f"last_{what}_collective", 0) for what in ("enqueued", "completed"))
    return max(issued, 0), max(done, 0)


def _oldest_pending() -> dict | None:
    """The oldest collective of the default group that has not finished, or None."""
    entries = [entry for entry in _flight_recorder(True).get("entries", ())
               if entry.get("pg_id") == 0 and not entry.get("retired")
               and entry.get("state") != "completed"]
    return min(entries, key=lambda entry: entry["record_id"], default=None)
