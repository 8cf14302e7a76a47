"""On a rank: a thread that tells the caller what the main thread is doing."""

import os
import pickle
import sys
import threading
import time
from dataclasses import dataclass

from labs.workers import collective_matching, source_lines

HEARTBEAT = 0.5  # seconds
_COLLECTIVES = {"all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
                "all_gather_single", "all_gather_object", "all_gather_coalesced", "gather",
                "scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
                "all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "send", "recv",
                "broadcast_object_list", "gather_object", "scatter_object_list",
                "batch_isend_irecv", "new_group", "init_process_group"}


class Watch(threading.Thread):
    """Sends a heartbeat, answers `where`, and ends the process when the caller is gone."""

    def __init__(self, channel):
        super().__init__(name="labs-watch", daemon=True)
        self.channel = channel
        self.main = threading.main_thread().ident

    def run(self):
        try:
            while True:
                if not self.channel.connection.poll(HEARTBEAT):
                    self.channel.send("alive", self.progress())
                elif self.channel.connection.recv() == "where":
                    self.channel.send("where", self._where())
        except (EOFError, OSError):
            os._exit(1)

    def _frame(self):
        return sys._current_frames()[self.main]

    def progress(self):
        return Progress(*_counts(), _call(self._frame()))

    def _where(self):
        frame, progress, pending = self._frame(), self.progress(), _pending()
        where = {"call": progress.call, "number": progress.number, "since": None,
                 "stack": source_lines.stack_of(frame)}
        if pending:
            where.update(call=progress.call or pending["profiling_name"].split(":")[-1],
                         number=pending["collective_seq_id"],
                         since=time.time() - pending["time_created_ns"] / 1e9)
        return where


@dataclass(frozen=True)
class Progress:
    """How far a rank has come in the default group.

    issued, done: collectives (None where torch does not tell). call: the torch.distributed
    function that the main thread is in, or None.
    """

    issued: int = None
    done: int = None
    call: str = None

    @property
    def waiting(self) -> bool:
        return self.call is not None or (self.issued or 0) > (self.done or 0)

    @property
    def number(self):
        """The number of the collective it waits in, from 1; None if it is not one of all ranks."""
        if self.done is not None and (self.issued or 0) > self.done:
            return self.done + 1
        return None

    def can_never_be_joined_by(self, finished) -> bool:
        """Whether a rank that has returned, `finished`, left before the collective we wait in."""
        return (self.number is not None and finished.issued is not None
                and finished.issued < self.number)


def _call(frame):
    """The outermost torch.distributed call that `frame` is inside of, or None."""
    found = None
    while frame is not None:
        name = frame.f_code.co_name
        if name in _COLLECTIVES and frame.f_code.co_filename.endswith("distributed_c10d.py"):
            found = collective_matching.plain(name)
        frame = frame.f_back
    return found


def _recorder(collectives):
    """The flight recorder's present state; private in torch and moving, so anything may fail."""
    try:
        from torch._C import _distributed_c10d as c10d

        return pickle.loads(c10d._dump_fr_trace(collectives, False, True))
    except Exception:
        return {}


def _counts():
    """(issued, done) collectives of the default group, or (None, None) if torch does not tell."""
    groups = _recorder(False).get("pg_status")
    if groups is None:
        return None, None
    status = groups.get("0", {})  # absent until the first collective; -1 means none
    issued, done = (status.get(f"last_{what}_collective", 0) for what in ("enqueued", "completed"))
    return max(issued, 0), max(done, 0)


def _pending():
    """The oldest collective of the default group that has not finished, or None."""
    entries = [e for e in _recorder(True).get("entries", ())
               if e.get("pg_id") == 0 and not e.get("retired") and e.get("state") != "completed"]
    return min(entries, key=lambda entry: entry["record_id"], default=None)
