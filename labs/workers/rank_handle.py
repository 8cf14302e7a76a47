"""One rank, seen from the caller: its process, its two pipes, and what it last reported."""

import contextlib
import os
import pickle
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from labs.workers import heartbeat, memory, nccl, source_lines
from labs.workers.failures import LaunchError
from labs.workers.heartbeat import Progress
from labs.workers.outcomes import Kind, Outcome
from labs.workers.pickling import IncomingResult
from labs.workers.rank_pipe import RankPipe

# Seconds that a killed process may take to go: the driver waits for its kernels, and frees its
# memory, which the next launch needs.
GONE_AFTER = 30


@dataclass
class RankHandle:
    """The rank's state. Times are monotonic seconds; a pipe that was closed is None."""

    rank: int
    connection: RankPipe | None
    output: Connection | None
    process: BaseProcess | None = None  # until it has been started
    has_function: bool = False
    began: float | None = None  # when its function began
    progress: Progress = Progress()
    changed: float = field(default_factory=time.monotonic)  # when it last got further
    heard: float = field(default_factory=time.monotonic)  # when it last sent anything
    suspended_since: float | None = None  # since when a signal keeps its process from running
    result: IncomingResult | None = None
    outcome: Outcome | None = None  # set once it has returned, failed or died
    position: dict | None = None  # its answer to `ask_position`
    has_spoken: bool = False  # whether anything has come from it
    _looked: float = 0.0  # when `note_suspended` last looked

    @property
    def settled(self) -> bool:
        return self.outcome is not None

    # what it sends: one method for each kind of message

    def on_began(self, _) -> None:
        self.began = self.changed = time.monotonic()

    def on_heartbeat(self, progress: Progress) -> None:
        if self.result:
            return  # what it said when it returned stays
        if progress.is_further_than(self.progress):
            self.changed = time.monotonic()
        self.progress = progress

    def on_position(self, position: dict) -> None:
        self.position = position

    def on_result_sizes(self, content: tuple[Progress, list[int]]) -> None:
        self.progress, sizes = content
        self.result = IncomingResult(sizes)

    def on_result_piece(self, piece: bytes) -> None:
        self.result.add(piece)
        if self.result.complete:
            self.outcome = Outcome(self.rank, Kind.RETURNED, issued=self.progress.issued)

    def on_exception(self, content: dict) -> None:
        """content: fields of an Outcome, the error pickled (None if it could not be)."""
        try:
            error = pickle.loads(content.pop("error"))
        except Exception:  # of the student's class: unpickling it may raise anything
            error = None
        self.outcome = Outcome(self.rank, error=error, **content)

    def on_exit(self, printed: str, memory_limit: int | None = None) -> None:
        """Its process ended before it reported anything; what C++ printed tells where."""
        self.process.join(1)
        code, oom = self.process.exitcode, memory.oom_info_of_dead(printed, memory_limit)
        # NCCL's watchdog ends a rank whose peer has gone by an abort.
        is_victim = code == -signal.SIGABRT and nccl.lost_peer(printed)
        kind = (Kind.OUT_OF_MEMORY_IN_CPP if oom else Kind.LOST_CONNECTION if is_victim else
                Kind.KILLED if code is not None and code < 0 else Kind.PROCESS_EXITED)
        self.outcome = Outcome(self.rank, kind, exit_code=code, failed_at=time.time(),
                               message=printed, oom=oom,
                               stack=source_lines.parse_stack_dump(printed))

    def value(self):
        """What it returned. Raises LaunchError where that cannot be read here."""
        try:
            return self.result.value()
        except Exception as error:
            raise LaunchError(f"what rank {self.rank} returned arrived, but cannot be read in this "
                              f"process ({type(error).__name__}: {error}). Return numbers, "
                              "tensors, lists or dicts.") from None

    # what we ask

    def send_function(self, packed: bytes) -> None:
        """Sends what it is to run. Where its process has ended already, `on_exit` will tell."""
        self.connection.send_bytes(packed)
        self.has_function = True

    def ask_position(self) -> None:
        self.position = None
        # Before it has its function it would take the question for it.
        if self.has_function and self.connection and not self.connection.has_unsent:
            with contextlib.suppress(OSError):
                self.connection.send("where")

    def ask_for_stack(self) -> None:
        """Makes it print its stack although it answers nothing (see worker._enable_stack_dumps)."""
        if self.process and self.process.pid:
            with contextlib.suppress(ProcessLookupError, AttributeError):
                os.kill(self.process.pid, signal.SIGUSR1)

    @property
    def silent(self) -> bool:
        """Whether it sends no heartbeat either: C++ code holds its interpreter."""
        return not self.settled and time.monotonic() - self.heard > 3 * heartbeat.INTERVAL

    def note_suspended(self) -> None:
        """Notes whether a signal has stopped its process, if that sends no heartbeat. Looks once in
        each interval at most: the caller asks after whatever it receives from any rank."""
        now = time.monotonic()
        if not self.silent or self.process is None:
            self.suspended_since = None
        elif now - self._looked > heartbeat.INTERVAL:
            self._looked = now
            suspended = _is_suspended(self.process.pid)
            self.suspended_since = (self.suspended_since or now) if suspended else None

    def present_outcome(self) -> Outcome:
        """How it ended, or where it is."""
        if self.settled:
            return self.outcome
        if self.suspended_since is not None:
            return self._suspended_outcome()
        if self.position is None:
            return Outcome(self.rank, Kind.STARTING if self.progress == Progress()
                           else Kind.UNRESPONSIVE)
        kind = Kind.WAITING if self.position["collective"] else Kind.COMPUTING
        return Outcome(self.rank, kind, **self.position)

    def last_known(self) -> Outcome:
        """How it ended, or what it did at its last heartbeat. Asks nothing, and may be called
        from any thread."""
        outcome, progress = self.outcome, self.progress
        if outcome is not None:
            return outcome
        if self.result is not None:  # its result is arriving
            return Outcome(self.rank, Kind.RETURNED)
        if self.suspended_since is not None:
            return self._suspended_outcome()
        if self.began is None or progress.place is None:  # no heartbeat yet
            return Outcome(self.rank, Kind.STARTING)
        return Outcome(self.rank, Kind.WAITING if progress.at_a_glance else Kind.COMPUTING,
                       collective=progress.at_a_glance or "", stack=[progress.place])

    def _suspended_outcome(self) -> Outcome:
        place = self.progress.place
        return Outcome(self.rank, Kind.SUSPENDED, stack=[place] if place else [])

    # the end

    def kill(self) -> None:
        """Ends it with its children."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            # The rank is the leader of its own session (worker.die_with_caller), so its children
            # die with it.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def close(self) -> None:
        if self.process is not None:
            self.process.join(GONE_AFTER)
            with contextlib.suppress(ValueError):  # the driver still frees its GPU's memory
                self.process.close()
        for pipe in (self.output, self.connection):
            if pipe:
                pipe.close()


def _is_suspended(process_id) -> bool:
    """Whether SIGSTOP, or a signal like it, has stopped a process, and none has continued it. One
    that a debugger has stopped does not count: somebody is at work there."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return psutil.Process(process_id).status() == psutil.STATUS_STOPPED
    return False
