"""On a rank: a thread that reports to the caller what the main thread is doing."""

import dis
import os
import sys
import threading
import time
import types
from dataclasses import dataclass

from labs.workers import activity, flight_recorder, slow_link, source_lines
from labs.workers.activity import ActivityLog
from labs.workers.collective_matching import COMPARED, without_variant
from labs.workers.waits import MainThreadWaits

INTERVAL = 0.5  # seconds between two heartbeats
_WAITING_CALLS = {*COMPARED, "all_gather_coalesced", "monitored_barrier", "send", "recv",
                  "batch_isend_irecv", "new_group", "init_process_group"}
_C10D = f"{os.sep}distributed_c10d.py"
# Files of torch whose calls wait inside C++ for collectives that C++ or a compiled graph has
# issued: the backward of DDP, functional collectives.
_CALLERS_OF_CPP = tuple(os.path.join("torch", *part) for part in (
    ("autograd", ""), ("distributed", ""), ("nn", "parallel", ""), ("_ops.py",))) + (
    "torchinductor_",)
# DDP verifies its parameters here, in the first collective of many a program
_CONNECTS = os.path.join("torch", "distributed", "utils.py")
_LOOKS_AT_NUMBERS = ("CALL", "TO_BOOL", "POP_JUMP", "BINARY_SUBSCR", "STORE_SUBSCR", "FORMAT_")


class Heartbeat(threading.Thread):
    """Sends a heartbeat, answers `where`, and ends the process when the caller is gone."""

    def __init__(self, channel, backend: str = ""):
        super().__init__(name="labs-heartbeat", daemon=True)
        self.channel = channel
        self.has_nccl = "nccl" in backend
        self.main = threading.main_thread().ident
        self.waits = MainThreadWaits()
        self.waits.install()
        self.activity = ActivityLog()
        self._instruction, self._instruction_since = None, time.monotonic()

    def run(self):
        while True:
            try:
                # poll() waits in C without the interpreter's lock: the thread costs the main thread
                # nothing.
                if not self.channel.connection.poll(INTERVAL):
                    self.activity.update()
                    self.channel.send("heartbeat", self.progress())
                elif self.channel.connection.recv() == "where":
                    self.channel.send("position", self._position())
            except (EOFError, OSError):
                # The caller is gone. sys.exit in a thread would end the thread only.
                os._exit(1)
            except Exception:  # the main thread changes what is looked at, meanwhile
                # One beat is left out. A thread that ended here would leave the caller with the
                # rank's last state for ever, so that a hang would look like work.
                time.sleep(INTERVAL)

    def progress(self) -> "Progress":
        """How far the rank has come by now."""
        main, pending = self._snapshot(), flight_recorder.oldest_pending()
        counts = flight_recorder.counts()
        self._note_instruction(main, counts)
        collective, since = self._wait(main, pending)
        now = time.monotonic()
        quiet_since = max(since, self.activity.gloo_idle_since) if since else None
        if since and slow_link.is_moving():
            quiet_since = now
        return Progress(counts, collective, flight_recorder.number(pending) if collective else None,
                        since, quiet_since, self.activity.starved, now,
                        connecting=bool(collective) and self._may_connect(main, pending),
                        at_a_glance=collective or self._at_a_glance(main, pending),
                        place=main.place)

    def final_progress(self) -> "Progress":
        """How far the rank has come when its function has returned."""
        return Progress(flight_recorder.counts(), sent=time.monotonic(),
                        issued=flight_recorder.last_issued())

    def _snapshot(self):
        return Snapshot.of(sys._current_frames()[self.main])

    def _note_instruction(self, snapshot, counts):
        """Notes since when the main thread has been at this instruction, and nothing was done."""
        at = snapshot.frame_id, snapshot.instruction, counts
        if at != self._instruction:
            self._instruction, self._instruction_since = at, time.monotonic()

    def _wait(self, main, pending) -> tuple[str | None, float | None]:
        """What the main thread waits in for other ranks, and since when (monotonic seconds); None
        and None while it works, sleeps, reads or writes."""
        waits = self.waits
        name = _collective(main) or _pending_name(pending)
        began = waits.began  # read once: the main thread may leave its wait at any time
        if began is not None and (pending or not waits.needs_pending):
            return _collective(main) or waits.name or name, began
        if since := waits.polling_since:
            return name, since
        # Inside C++, which notes nothing: it waits if it has made one call for some time, while
        # nothing else ran in this process. A GPU's driver is never idle, nor is NCCL while it
        # connects, but then torch tells.
        since = self._instruction_since
        if not (flight_recorder.is_on_gpu(pending) or self._may_connect(main, pending)):
            since = max(since, self.activity.idle_since)
        if (self._may_wait_in_cpp(main, pending)
                # Two heartbeats: one look may meet a call that waits for nobody.
                and time.monotonic() - since > 2 * INTERVAL):
            return name, since
        return None, None

    def _at_a_glance(self, main, pending) -> str | None:
        """What the main thread waits in now, as far as one look tells: it sleeps in a call of C++
        that may wait. Wrong at times, so no rank is stopped for it, but right where each wait is
        too short for `_wait`, as in the backward of DDP beside a slower rank."""
        if self._may_wait_in_cpp(main, pending) and activity.main_thread_sleeps():
            return _collective(main) or _pending_name(pending)
        return None

    def _may_wait_in_cpp(self, main, pending) -> bool:
        """Whether the main thread is in a call of C++ that may wait for other ranks: a function of
        torch.distributed makes it; or a collective has not finished that such a call may wait for.
        """
        file = main.code.co_filename
        if file.endswith(_C10D):
            return _collective(main) is not None
        if flight_recorder.is_on_gpu(pending):
            return _may_wait_for_gpu(main)
        return self._may_connect(main, pending) or (
            pending is not None and any(part in file for part in _CALLERS_OF_CPP))

    def _may_connect(self, main, pending) -> bool:
        """Whether the main thread may be in the first collective of a group over NCCL, in which its
        ranks connect. The flight recorder learns of that collective only afterwards."""
        if not self.has_nccl or pending is not None or self.waits.began is not None:
            return False
        file = main.code.co_filename
        return file.endswith(_C10D) and _collective(main) is not None or file.endswith(_CONNECTS)

    def _position(self) -> dict:
        """Where the main thread is: those fields of an `Outcome`. Unlike `progress` it takes a call
        of C++ that may wait for one that waits: no rank is stopped for that."""
        main, pending = self._snapshot(), flight_recorder.oldest_pending()
        collective, since = self._wait(main, pending)
        if not collective and self._may_wait_in_cpp(main, pending):
            collective = _collective(main) or _pending_name(pending)
            since = self._instruction_since
        return {"collective": collective or "",
                "number": flight_recorder.number(pending) if collective else None,
                "seconds": time.monotonic() - since if since else 0.0,
                "stack": main.stack}


@dataclass(frozen=True)
class Snapshot:
    """Where a thread was. code, instruction: of its innermost frame, and the offset in it; frame_id
    tells one frame from another. stack: outermost first.

    It holds no frame: one that another thread holds keeps its locals alive after it has returned,
    so that tensors would be freed later, and in another order, than without a heartbeat.
    """

    code: types.CodeType
    instruction: int
    frame_id: int
    stack: list[source_lines.Place]

    @classmethod
    def of(cls, frame: types.FrameType) -> "Snapshot":
        return cls(frame.f_code, frame.f_lasti, id(frame), source_lines.stack_of(frame))

    @property
    def place(self) -> source_lines.Place:
        """The innermost line of the student's, or of a library that it calls; of ours where it runs
        nothing else."""
        return next(reversed(source_lines.students(self.stack)), self.stack[-1])


@dataclass(frozen=True)
class Progress:
    """How far a rank has come.

    counts: collectives and messages issued and done in each process group. collective: what the
    main thread waits in for other ranks, or None. number: its number in the default group, from 1;
    None if it is not one of all ranks. since: when that wait began; quiet_since: since when nothing
    has been moved meanwhile either. starved: seconds that the main thread has waited for a core.
    issued: how many collectives a rank that has returned had called in the default group (None:
    unknown). sent: when this was sent. connecting: the ranks of a group may just be connecting, so
    the wait may be work. at_a_glance: what it waits in, also where that may be wrong. place: the
    line that the main thread is at. Times are monotonic seconds, the same clock on all ranks.
    """

    counts: tuple = ()
    collective: str | None = None
    number: int | None = None
    since: float | None = None
    quiet_since: float | None = None
    starved: float = 0.0
    sent: float = 0.0
    issued: int | None = None
    connecting: bool = False
    at_a_glance: str | None = None
    place: source_lines.Place | None = None

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


def _may_wait_for_gpu(main) -> bool:
    """Whether the instruction that `main` is at may wait for the GPU: a call, or one that looks
    at a tensor's numbers, as `if loss > 1`, `x[mask]` and `f"{loss}"` do."""
    return dis.opname[main.code.co_code[main.instruction]].startswith(_LOOKS_AT_NUMBERS)


def _pending_name(pending) -> str:
    return flight_recorder.name(pending) if pending else "a collective"


def _collective(main) -> str | None:
    """The outermost torch.distributed call that `main` is inside of, or None."""
    calls = [place.function for place in main.stack
             if place.function in _WAITING_CALLS
             and place.filename.endswith("distributed_c10d.py")]
    return without_variant(calls[0]) if calls else None
