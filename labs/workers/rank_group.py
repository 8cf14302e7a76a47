"""The ranks of one launch, seen from the caller: start them, listen to them, end them."""

import os
import time
from multiprocessing.connection import wait

from labs.workers import failures, hang_rules, processes, source_lines, worker
from labs.workers.collective_matching import Ledger
from labs.workers.failures import Interrupted, Outcome, RanksStuck
from labs.workers.interrupts import held
from labs.workers.output import Screen
from labs.workers.progress import Progress
from labs.workers.rank_handle import Member


class Crew:
    """Runs a packed function on the ranks of a plan; `run` gives the results or raises."""

    def __init__(self, plan, payload: bytes, options):
        self.plan, self.payload, self.options = plan, payload, options
        self.members = []
        self.ledger = Ledger()
        self.screen = Screen(plan.ranks, options.quiet)
        self.progress = Progress(options.quiet)
        self.news = hang_rules.Newscaster()
        self.began = time.monotonic()

    def run(self) -> list:
        """What the function returned on each rank. Raises RankFailed, RanksStuck, Interrupted."""
        try:
            with processes.rendezvous() as meeting:
                self._start(meeting)
                while not all(m.settled and m.outcome.kind == "returned" for m in self.members):
                    self._listen(timeout=0.05)
                    self.screen.show()
                    self._judge()
                return [member.value() for member in self.members]
        except KeyboardInterrupt:
            raise Interrupted(self._outcomes()) from None
        finally:
            with held():
                self._end()

    def _start(self, meeting):
        environment = {**os.environ, **self.options.environment}
        for rank in range(self.plan.ranks):
            self._start_one(worker.Orders(
                rank, self.plan.ranks, self.plan.backend, self.plan.devices[rank],
                self.plan.threads, meeting, self.options.verify, self.options.memory_limit,
                environment))
        for member in self.members:
            member.begin(self.payload)

    def _start_one(self, orders):
        connection, theirs = processes.context().Pipe()
        output, their_output = processes.context().Pipe(duplex=False)
        # known before it is started: an interrupt may come at any moment, and ends all members
        member = Member(orders.rank, connection, output)
        self.members.append(member)
        try:
            member.process = processes.start(worker.main, (orders, theirs, their_output))
        finally:
            theirs.close()
            their_output.close()
        member.changed = member.heard = time.monotonic()

    # listening

    def _listen(self, timeout):
        """Takes in whatever the ranks say within `timeout` seconds."""
        sources = {}
        for member in self.members:
            sources[member.output] = (self._read_output, member)
            if member.connection:
                sources[member.connection] = (self._receive, member)
            if member.process and not member.settled:
                sources[member.process.sentinel] = (self._bury, member)
        for source in wait([s for s in sources if s], timeout):
            handle, member = sources[source]
            with held():  # half a message read would be the end of the conversation
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
        if kind == "call":
            self.ledger.enter(member.rank, content)
        elif kind == "report":
            self.progress.take(*content)
        elif kind == "warning":
            self.screen.warn(member.rank, *content)
        elif kind == "where":
            member.where = content
        else:
            getattr(member, kind)(content)
            if kind == "piece":
                self._show_arrival()

    def _show_arrival(self):
        arriving = [m.result for m in self.members if m.result]
        self.progress.arrived(sum(r.received for r in arriving), sum(r.total for r in arriving))

    def _bury(self, member):
        """A process ended without a word, or its last words are still in the line."""
        while member.connection and not member.settled and member.connection.poll():
            self._receive(member)
        if not member.settled:
            self._drain(member)
            member.died(self._printed(member), self.options.memory_limit)

    def _drain(self, member):
        deadline = time.monotonic() + 1  # somebody it left behind may print for ever
        while member.output and member.output.poll() and time.monotonic() < deadline:
            self._read_output(member)

    def _printed(self, member) -> str:
        return self.screen.reels[member.rank].ending

    # judging

    def _judge(self):
        """Raises when the launch can no longer succeed."""
        if self.ledger.mismatch:
            raise RanksStuck("the ranks are not in the same collective", self._calls(),
                             "All must call the same ones, in the same order, on the same shapes.")
        if hang_rules.to_blame(self.members):
            raise failures.failure(self._outcomes())
        if why := hang_rules.why_stuck(self.members, self.options.hang_after):
            raise RanksStuck(why, self._outcomes())
        timeout = self.options.timeout
        if timeout is not None and time.monotonic() - self.began > timeout:
            raise RanksStuck(f"not done after {timeout:g} s", self._outcomes(),
                             f"That is the timeout={timeout:g} of this launch.")
        if self.news.is_due(self._last_sign()):
            self._tell_news()

    def _last_sign(self) -> float:
        """When something last happened that a student could take for progress."""
        arriving = [m.heard for m in self.members if m.result and not m.settled]
        return max(self.began, self.screen.changed, self.progress.changed, *arriving,
                   *(m.changed for m in self.members))

    def _tell_news(self):
        seconds = time.monotonic() - self._last_sign()
        lines = failures.grouped(self._outcomes())
        self.screen.say(f"nothing new for {seconds:.0f} s: {'; '.join(lines)}. Interrupt the cell "
                        "if that is not meant; launch(..., timeout=60) would stop it by itself.")

    def _calls(self) -> list:
        """What each rank calls where they disagree; a rank that has called nothing yet is asked."""
        calls = self.ledger.mismatch
        members = next(iter(calls.values())).members
        self._listen_until(0.3, lambda: len(calls) == len(members))
        return [Outcome(rank, "calls", call=str(calls[rank]), stack=[calls[rank].place])
                if rank in calls else outcome for rank, outcome in enumerate(self._outcomes())]

    def _outcomes(self) -> list:
        """What became of every rank by now; those still running are asked where they are."""
        for member in self.members:
            member.ask_where()
        asked = [member for member in self.members if member.begun]
        self._listen_until(0.4, lambda: all(m.where or m.settled for m in asked))
        silent = [member for member in self.members if member.silent]
        outcomes = [member.whereabouts() for member in self.members]
        for member in silent:
            outcomes[member.rank] = self._wake(member)
        not_begun = range(len(outcomes), self.plan.ranks)
        return outcomes + [Outcome(rank, "starting") for rank in not_begun]

    def _wake(self, member) -> Outcome:
        """Where a rank is that answers nothing. What wakes it may also set it going again, so
        that what it says from now on is no longer true of the moment."""
        member.ask_for_stack()
        self._listen_until(0.5, lambda: source_lines.dumped(self._printed(member)))
        return Outcome(member.rank, "silent", stack=source_lines.dumped(self._printed(member)))

    def _listen_until(self, seconds, condition):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self._listen(0.05)

    # ending

    def _end(self):
        """Kills every rank with its children, shows what is left of the output, tidies up."""
        for member in self.members:
            member.kill()
        for member in self.members:
            self._drain(member)
            member.close()
        self.screen.finish()
        self.progress.close()
