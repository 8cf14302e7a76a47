"""One rank, seen from the caller: its process, its two lines to us, and the last we heard of it."""

import contextlib
import os
import pickle
import signal
import time
from dataclasses import dataclass, field

from labs.workers import memory, source_lines
from labs.workers.failures import LaunchError, Outcome
from labs.workers.heartbeat import HEARTBEAT, Progress
from labs.workers.results import Incoming


@dataclass
class Member:
    """The rank's state. Times are monotonic seconds."""

    rank: int
    connection: object
    output: object
    process: object = None  # until it has been started
    begun: bool = False  # it has its orders
    progress: Progress = Progress()
    changed: float = field(default_factory=time.monotonic)  # when `progress` last changed
    heard: float = field(default_factory=time.monotonic)  # when it last said anything
    result: Incoming = None
    outcome: Outcome = None  # set once it has returned, failed or died
    where: dict = None

    @property
    def settled(self) -> bool:
        return self.outcome is not None

    # what it says: one method for each kind of message

    def alive(self, progress) -> None:
        if progress != self.progress:
            self.progress, self.changed = progress, time.monotonic()

    def returning(self, content) -> None:
        self.progress, sizes = content
        self.result = Incoming(sizes)

    def piece(self, content) -> None:
        self.result.take(content)
        if self.result.complete:
            self.outcome = Outcome(self.rank, "returned", number=self.progress.issued)

    def failed(self, content) -> None:
        try:
            error = pickle.loads(content.pop("error"))
        except Exception:
            error = None
        self.outcome = Outcome(self.rank, "failed", error, **content)

    def died(self, printed: str, allowed=None) -> None:
        """Its process ended without a word; what C++ printed tells where. allowed: its
        memory_limit."""
        self.process.join(1)
        self.outcome = Outcome(self.rank, "died", exit_code=self.process.exitcode, at=time.time(),
                               stack=source_lines.dumped(printed),
                               shortage=memory.last_words(printed, allowed))

    def value(self):
        """What it returned. Raises LaunchError where that cannot be read here."""
        try:
            return self.result.value()
        except Exception as error:
            raise LaunchError(f"what rank {self.rank} returned arrived, but cannot be read in this "
                              f"process ({type(error).__name__}: {error}). Return numbers, "
                              "tensors, lists or dicts.") from None

    # what we ask

    def begin(self, payload: bytes) -> None:
        """Sends what it is to do. A rank that hears nothing but the end of its line gives up."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(payload)
        self.begun = True

    def ask_where(self) -> None:
        self.where = None
        if self.begun:  # before that it would take the question for its orders
            with contextlib.suppress(OSError, AttributeError):
                self.connection.send("where")

    def ask_for_stack(self) -> None:
        """Makes it print its stack although it answers nothing (see worker._tell_stack)."""
        if self.process and self.process.pid:
            with contextlib.suppress(ProcessLookupError, AttributeError):
                os.kill(self.process.pid, signal.SIGUSR1)

    @property
    def silent(self) -> bool:
        """Whether not even its heart beats: C++ code holds its interpreter."""
        return not self.settled and time.monotonic() - self.heard > 3 * HEARTBEAT

    def whereabouts(self) -> Outcome:
        """What became of it by now, or where it is."""
        if self.settled:
            return self.outcome
        if self.where is None:
            return Outcome(self.rank, "starting" if self.progress == Progress() else "silent")
        where = dict(self.where)
        if where["since"] is None:
            where["since"] = time.monotonic() - self.changed
        return Outcome(self.rank, "waits" if where["call"] else "computes", **where)

    # the end

    def kill(self) -> None:
        """Ends it with its children."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def close(self) -> None:
        if self.process is not None:
            self.process.join(5)
            self.process.close()
        for line in (self.output, self.connection):
            if line:
                line.close()
