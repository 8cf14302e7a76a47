"""The ranks of one launch, seen from the caller: start them, listen to them, end them."""

import contextlib
import os
import pickle
import signal
import time
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import wait

from labs.workers import failures, start, worker
from labs.workers.calls import Ledger
from labs.workers.failures import Outcome, RankFailed, RanksStuck
from labs.workers.progress import Progress
from labs.workers.screen import Screen
from labs.workers.watch import Progress as RankProgress

PROOF = 1.0  # seconds that a deadlock must look certain before it is called one
_number = count()


@dataclass
class Member:
    """One rank: its process, its two lines to us, and the last we heard of it."""

    rank: int
    process: object
    connection: object
    output: object
    progress: RankProgress = RankProgress()
    changed: float = 0.0  # monotonic seconds when `progress` last changed
    heard: float = 0.0  # monotonic seconds when it last said anything
    result: bytes = None
    outcome: Outcome = None  # set once it has returned, failed or died
    where: dict = None

    @property
    def settled(self) -> bool:
        return self.outcome is not None


class Crew:
    """Runs a packed function on the ranks of a plan; `run` gives the results or raises."""

    def __init__(self, plan, payload: bytes, options):
        self.plan, self.payload, self.options = plan, payload, options
        self.members = []
        self.ledger = Ledger()
        self.screen = Screen(plan.ranks, options.quiet)
        self.progress = Progress(options.quiet)
        self.rendezvous = os.path.join(start.private_directory(),
                                       f"rendezvous-{os.getpid()}-{next(_number)}")

    def run(self) -> list:
        """What the function returned on each rank. Raises RankFailed, RanksStuck, Interrupted."""
        try:
            self._start()
            while not all(m.settled and m.outcome.kind == "returned" for m in self.members):
                self._listen(timeout=0.05)
                self.screen.show()
                self._judge()
            return [pickle.loads(member.result) for member in self.members]
        except KeyboardInterrupt:
            raise Interrupted(self._outcomes()) from None
        finally:
            self._end()

    def _start(self):
        environment = {**os.environ, **self.options.environment}
        for rank in range(self.plan.ranks):
            connection, theirs = start.context().Pipe()
            output, their_output = start.context().Pipe(duplex=False)
            orders = worker.Orders(
                rank, self.plan.ranks, self.plan.backend, self.plan.devices[rank],
                self.plan.threads, self.rendezvous, self.options.verify, environment)
            process = start.start(worker.main, (orders, theirs, their_output))
            theirs.close()
            their_output.close()
            now = time.monotonic()
            self.members.append(Member(rank, process, connection, output, changed=now, heard=now))
        for member in self.members:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                member.connection.send_bytes(self.payload)

    # listening

    def _listen(self, timeout):
        """Takes in whatever the ranks say within `timeout` seconds."""
        sources = {}
        for member in self.members:
            sources[member.output] = (self._read_output, member)
            if member.connection:
                sources[member.connection] = (self._receive, member)
            if not member.settled:
                sources[member.process.sentinel] = (self._bury, member)
        for source in wait([s for s in sources if s], timeout):
            handle, member = sources[source]
            handle(member)

    def _read_output(self, member):
        if member.output and not self.screen.read(member.rank, member.output.fileno()):
            member.output.close()
            member.output = None

    def _receive(self, member):
        try:
            kind, content = member.connection.recv()
        except (EOFError, OSError):
            member.connection = None
            return
        member.heard = time.monotonic()
        getattr(self, f"_on_{kind}")(member, content)

    def _on_alive(self, member, progress):
        if progress != member.progress:
            member.progress, member.changed = progress, time.monotonic()

    def _on_call(self, member, call):
        self.ledger.enter(member.rank, call)

    def _on_where(self, member, where):
        member.where = where

    def _on_report(self, member, content):
        self.progress.take(*content)

    def _on_returned(self, member, content):
        member.progress, member.result = content
        member.outcome = Outcome(member.rank, "returned", number=member.progress.issued)

    def _on_failed(self, member, content):
        try:
            error = pickle.loads(content.pop("error"))
        except Exception:
            error = None
        member.outcome = Outcome(member.rank, "failed", error, **content)

    def _bury(self, member):
        """A process ended without a word, or its last words are still in the line."""
        while member.connection and not member.settled and member.connection.poll():
            self._receive(member)
        if not member.settled:
            member.process.join(1)
            member.outcome = Outcome(member.rank, "died", exit_code=member.process.exitcode,
                                     at=failures.now())

    # judging

    def _judge(self):
        """Raises when the launch can no longer succeed."""
        if self.ledger.mismatch:
            raise RanksStuck("the ranks are not in the same collective", self._calls(),
                             "All must call the same ones, in the same order, on the same shapes.")
        root = failures.root_cause([m.outcome for m in self.members if m.settled])
        if root is not None:
            # victims are often heard first: give the one to blame the time to speak
            patience = 0.5 if root.is_victim or root.kind == "died" else 0.1
            if (all(m.settled for m in self.members) or failures.now() - root.at > patience):
                outcomes = self._outcomes()
                raise RankFailed(failures.root_cause(outcomes), outcomes)
        elif why := self._deadlock():
            raise RanksStuck(why, self._outcomes())

    def _deadlock(self):
        """Why the ranks will not get on, in words, or None while they may."""
        now, limit = time.monotonic(), self.options.hang_after
        waiting = [m for m in self.members if not m.settled and m.progress.waiting]
        returned = [m for m in self.members if m.settled]
        for member in waiting:
            if now - member.changed > limit:
                return f"no progress in a collective for {limit:g} s"
            if now - member.changed > PROOF and any(
                    member.progress.can_never_be_joined_by(other.progress) for other in returned):
                return "deadlock"
        patience = max(limit, 10)
        silent = [m.rank for m in self.members if not m.settled and now - m.heard > patience]
        return f"rank {silent[0]} has not answered for {patience:g} s" if silent else None

    def _calls(self) -> list:
        """What each rank calls where they disagree; a rank that has called nothing yet is asked."""
        calls, deadline = self.ledger.mismatch, time.monotonic() + 0.3
        while len(calls) < len(next(iter(calls.values())).members) and time.monotonic() < deadline:
            self._listen(0.05)
        return [Outcome(rank, "calls", call=str(calls[rank]), stack=[calls[rank].place])
                if rank in calls else outcome for rank, outcome in enumerate(self._outcomes())]

    def _outcomes(self) -> list:
        """What became of every rank by now; those still running are asked where they are."""
        running = [m for m in self.members if not m.settled]
        for member in running:
            member.where = None
            with contextlib.suppress(OSError, AttributeError):
                member.connection.send("where")
        deadline = time.monotonic() + 0.4
        while time.monotonic() < deadline and any(
                m.where is None and not m.settled for m in running):
            self._listen(0.05)
        return [member.outcome or _whereabouts(member) for member in self.members]

    # ending

    def _end(self):
        """Kills every rank with its children, shows what is left of the output, tidies up."""
        for member in self.members:
            with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
                os.killpg(member.process.pid, signal.SIGKILL)
            member.process.kill()
        for member in self.members:
            member.process.join(5)
            member.process.close()
            while member.output and member.output.poll():
                self._read_output(member)
            for line in (member.output, member.connection):
                if line:
                    line.close()
        self.screen.finish()
        self.progress.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.rendezvous)


class Interrupted(KeyboardInterrupt):
    """The student interrupted the cell; outcomes says where each rank was."""

    def __init__(self, outcomes):
        self.outcomes = outcomes
        super().__init__("\n".join(["interrupted; all ranks were stopped",
                                    *failures.grouped(outcomes)]))

    def _render_traceback_(self):
        return [str(self)]


def _whereabouts(member) -> Outcome:
    if member.where is None:
        kind = "starting" if member.progress == RankProgress() else "silent"
        return Outcome(member.rank, kind)
    where = dict(member.where)
    since = where.pop("since")
    where["since"] = time.monotonic() - member.changed if since is None else since
    return Outcome(member.rank, "waits" if where["call"] else "computes", **where)
