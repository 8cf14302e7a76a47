"""On a rank: a thread that reports to the caller what the main thread is doing."""

import dis
import os
import pickle
import sys
import threading
import time
from dataclasses import dataclass

from labs.workers import slow_link, source_lines
from labs.workers.activity import ActivityLog
from labs.workers.collective_matching import COMPARED, without_variant
from labs.workers.waits import MainThreadWaits

INTERVAL = 0.5  # seconds between two heartbeats
RECORDED = 256  # collectives that the flight recorder keeps
_WAITING_CALLS = {*COMPARED, "all_gather_coalesced", "monitored_barrier", "send", "recv",
                  "batch_isend_irecv", "new_group", "init_process_group"}
_C10D = f"{os.sep}distributed_c10d.py"
# Files of torch whose calls wait inside C++ for collectives that C++ or a compiled graph has
# issued: the backward of DDP, functional collectives.
_CALLERS_OF_CPP = tuple(os.path.join("torch", *part) for part in (
    ("autograd", ""), ("distributed", ""), ("nn", "parallel", ""), ("_ops.py",))) + (
    "torchinductor_",)


class Heartbeat(threading.Thread):
    """Sends a heartbeat, answers `where`, and ends the process when the caller is gone."""

    def __init__(self, channel):
        super().__init__(name="labs-heartbeat", daemon=True)
        self.channel = channel
        self.main = threading.main_thread().ident
        self.waits = MainThreadWaits()
        self.waits.install()
        self.activity = ActivityLog()
        self._instruction, self._instruction_since = None, time.monotonic()

    def run(self):
        try:
            while True:
                if not self.channel.connection.poll(INTERVAL):
                    self.activity.update()
                    self.channel.send("heartbeat", self.progress())
                elif self.channel.connection.recv() == "where":
                    self.channel.send("position", self._position())
        except (EOFError, OSError):
            os._exit(1)

    def progress(self) -> "Progress":
        """How far the rank has come by now."""
        frame, pending, counts = self._frame(), _oldest_pending(), _counts()
        self._note_instruction(frame, counts)
        collective, since = self._wait(frame, pending)
        now = time.monotonic()
        quiet_since = max(since, self.activity.gloo_idle_since) if since else None
        if since and slow_link.is_moving():
            quiet_since = now
        return Progress(counts, collective, _number(pending) if collective else None, since,
                        quiet_since, self.activity.starved, now)

    def final_progress(self) -> "Progress":
        """How far the rank has come when its function has returned."""
        return Progress(_counts(), sent=time.monotonic(), issued=_last_issued())

    def _frame(self):
        return sys._current_frames()[self.main]

    def _note_instruction(self, frame, counts):
        """Notes since when the main thread has been at this instruction, and nothing was done."""
        at = id(frame), frame.f_lasti, counts
        if at != self._instruction:
            self._instruction, self._instruction_since = at, time.monotonic()

    def _wait(self, frame, pending) -> tuple[str | None, float | None]:
        """What the main thread waits in for other ranks, and since when (monotonic seconds); None
        and None while it works, sleeps, reads or writes."""
        waits = self.waits
        name = _collective(frame) or (_name(pending) if pending else "a collective")
        began = waits.began  # read once: the main thread may leave its wait at any time
        if began is not None and (pending or not waits.needs_pending):
            return _collective(frame) or waits.name or name, began
        if since := waits.polling_since:
            return name, since
        # Inside C++, which notes nothing: it waits if it has made one call for some time, while
        # nothing else ran in this process. A GPU's driver is never idle, but NCCL tells.
        since = self._instruction_since
        if not _is_on_gpu(pending):
            since = max(since, self.activity.idle_since)
        if _may_wait_in_cpp(frame, pending) and time.monotonic() - since > 2 * INTERVAL:
            return name, since
        return None, None

    def _position(self) -> dict:
        """Where the main thread is: those fields of an `Outcome`. Unlike `progress` it takes a call
        of C++ that may wait for one that waits: no rank is stopped for that."""
        frame, pending = self._frame(), _oldest_pending()
        collective, since = self._wait(frame, pending)
        if not collective and _may_wait_in_cpp(frame, pending):
            collective, since = _collective(frame) or _name(pending), self._instruction_since
        return {"collective": collective or "", "number": _number(pending) if collective else None,
                "seconds": time.monotonic() - since if since else 0.0,
                "stack": source_lines.stack_of(frame)}


@dataclass(frozen=True)
class Progress:
    """How far a rank has come.

    counts: collectives and messages issued and done in each process group. collective: what the
    main thread waits in for other ranks, or None. number: its number in the default group, from 1;
    None if it is not one of all ranks. since: when that wait began; quiet_since: since when nothing
    has been moved meanwhile either. starved: seconds that the main thread has waited for a core.
    issued: how many collectives a rank that has returned had called in the default group (None:
    unknown). sent: when this was sent. Times are monotonic seconds, the same clock on all ranks.
    """

    counts: tuple = ()
    collective: str | None = None
    number: int | None = None
    since: float | None = None
    quiet_since: float | None = None
    starved: float = 0.0
    sent: float = 0.0
    issued: int | None = None

    @property
    def waiting(self) -> bool:
        return self.collective is not None

    @property
    def quiet_seconds(self) -> float:
        """How long it has waited, and nothing moved, when this was sent."""
        # A wait may be seen before its beginning is written down.
        return self.sent - self.quiet_since if self.waiting and self.quiet_since else 0.0

    def is_further_than(self, other: "Progress") -> bool:
        """Whether anything has happened since `other`."""
        return (self.counts, self.since) != (other.counts, other.since)

    def can_never_be_joined_by(self, finished: "Progress") -> bool:
        """Whether a rank that has returned, `finished`, left before the collective we wait in."""
        return (self.number is not None and finished.issued is not None
                and finished.issued < self.number)


def _may_wait_in_cpp(frame, pending) -> bool:
    """Whether the main thread is in a call of C++ that may wait for other ranks: a function of
    torch.distributed makes it; or a collective has not finished that such a call may wait for."""
    file = frame.f_code.co_filename
    if file.endswith(_C10D):
        return _collective(frame) is not None
    if _is_on_gpu(pending):  # any line may wait for the GPU
        return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")
    return pending is not None and any(part in file for part in _CALLERS_OF_CPP)


def _is_on_gpu(pending) -> bool:
    """Whether a collective occupies the GPU, where it waits for the other ranks'. NCCL alone says
    that one has started."""
    return pending is not None and pending.get("state") == "started"


def _collective(frame) -> str | None:
    """The outermost torch.distributed call that `frame` is inside of, or None."""
    calls = [place.function for place in source_lines.stack_of(frame)
             if place.function in _WAITING_CALLS
             and place.filename.endswith("distributed_c10d.py")]
    return without_variant(calls[0]) if calls else None


def _flight_recorder(collectives: bool = True, only_active: bool = True) -> dict:
    """The flight recorder's present state; empty where torch has changed it. The function is
    private, but the only way to learn, while the main thread is blocked in C++, which collective
    it waits in."""
    try:
        from torch._C import _distributed_c10d as c10d

        stacks = False
        return pickle.loads(c10d._dump_fr_trace(collectives, stacks, only_active))
    except Exception:
        return {}


def _counts() -> tuple:
    """(group, issued, done) for each process group; empty where torch does not tell."""
    groups = _flight_recorder(collectives=False).get("pg_status", {})
    return tuple((name, status.get("last_enqueued_collective"),
                  status.get("last_completed_collective")) for name, status in groups.items())


def _oldest_pending() -> dict | None:
    """The oldest collective that has not finished, of the default group if one of that has not; or
    None. Messages between two ranks are not recorded."""
    entries = [entry for entry in _flight_recorder().get("entries", ())
               if not entry.get("retired") and entry.get("state") != "completed"]
    return min(entries, key=lambda entry: (entry.get("pg_id") != 0, entry["record_id"]),
               default=None)


def _last_issued() -> int | None:
    """How many collectives this rank has called in the default group; None where that cannot be
    told. `pg_status` would count its messages to single ranks, too."""
    entries = _flight_recorder(only_active=False).get("entries")
    if entries is None:
        return None
    issued = [entry["collective_seq_id"] for entry in entries if entry.get("pg_id") == 0]
    has_forgotten = len(entries) >= RECORDED
    return max(issued, default=None if has_forgotten else 0)


def _name(pending) -> str:
    return pending["profiling_name"].split(":")[-1]


def _number(pending) -> int | None:
    return pending["collective_seq_id"] if pending and pending.get("pg_id") == 0 else None
