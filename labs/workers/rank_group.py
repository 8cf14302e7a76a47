"""The ranks of one launch, seen from the caller: start them, listen to them, stop them."""

import os
import selectors
import time
from collections.abc import Callable

from labs.words import named_ranks, wrapped
from labs.workers import hang_rules, outcomes, processes, source_lines, worker
from labs.workers.collective_matching import Announcement, CollectiveLog
from labs.workers.devices import Plan
from labs.workers.failures import Interrupted, RanksStuck, failure
from labs.workers.outcomes import Kind, Outcome
from labs.workers.output import LaunchOutput, ProgressBars
from labs.workers.processes import deferred
from labs.workers.rank_handle import RankHandle
from labs.workers.rank_pipe import RankPipe


class RankGroup:
    """Runs a packed function on the ranks of a plan; `run` returns the results or raises."""

    def __init__(self, plan: Plan, packed: bytes, options):
        self.plan, self.packed, self.options = plan, packed, options
        self.handles: list[RankHandle] = []
        self.collectives = CollectiveLog()
        self.output = LaunchOutput(plan.ranks, options.quiet)
        self.progress = ProgressBars(options.quiet)
        self.stall_notice = hang_rules.StallNotice()
        self.began = time.monotonic()
        self.asked = 0.0  # when `_ask_whether_others_wait` last asked

    def run(self) -> list:
        """What the function returned on each rank. Raises RankFailed, RanksStuck, Interrupted."""
        try:
            with processes.rendezvous() as rendezvous:
                self._start(rendezvous)
                while not all(h.settled and h.outcome.kind is Kind.RETURNED for h in self.handles):
                    self._listen(timeout=0.05)
                    self.output.show()
                    self._note_suspended()
                    self._raise_if_failed_or_stuck()
                    self._notify_if_stalled()
                return [handle.value() for handle in self.handles]
        except KeyboardInterrupt:
            raise Interrupted(self._outcomes()) from None
        finally:
            with deferred():
                self._stop()

    def _start(self, rendezvous):
        environment = {**os.environ, **self.options.environment}
        port = processes.free_port()
        for rank in range(self.plan.ranks):
            self._start_rank(worker.RankConfig(
                rank, self.plan.ranks, self.plan.backend, self.plan.devices[rank],
                self.plan.threads, rendezvous, port, self.options.verify,
                self.options.memory_limit, self.options.link, environment))
        for handle in self.handles:
            handle.send_function(self.packed)

    def _start_rank(self, config):
        connection, theirs = processes.context().Pipe()
        output, their_output = processes.context().Pipe(duplex=False)
        handle = RankHandle(config.rank, RankPipe(connection), output)
        # In the list before it is started: an interrupt may come at any moment, and stops these.
        self.handles.append(handle)
        try:
            handle.process = processes.start(worker.main, (config, theirs, their_output))
        finally:
            theirs.close()
            their_output.close()
        handle.changed = handle.heard = time.monotonic()

    # listening

    def _listen(self, timeout: float):
        """Takes in whatever the ranks send within `timeout` seconds, and continues sending what
        they have not read yet."""
        with selectors.PollSelector() as selector:
            for handle in self.handles:
                self._register(selector, handle)
            for source, events in selector.select(timeout):
                act, handle = source.data
                with deferred():  # after half a message nothing more could be read from the pipe
                    act(handle, events)

    def _register(self, selector, handle):
        read, write = selectors.EVENT_READ, selectors.EVENT_WRITE
        if handle.output:
            selector.register(handle.output, read, (self._read_output, handle))
        if handle.connection:
            events = read | write if handle.connection.has_unsent else read
            selector.register(handle.connection, events, (self._send_and_receive, handle))
        if handle.process and not handle.settled:
            selector.register(handle.process.sentinel, read, (self._on_exit, handle))

    def _listen_until(self, condition: Callable[[], bool], seconds: float):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self._listen(0.05)

    def _read_output(self, handle, *_):
        if handle.output and not self.output.read(handle.rank, handle.output.fileno()):
            handle.output.close()
            handle.output = None

    def _send_and_receive(self, handle, events):
        if handle.connection and events & selectors.EVENT_WRITE:
            handle.connection.flush()
        if handle.connection and events & selectors.EVENT_READ:
            self._receive(handle)

    def _receive(self, handle):
        try:
            message = handle.connection.receive()
        except (EOFError, OSError):
            handle.connection = None
            return
        handle.heard, handle.has_spoken = time.monotonic(), True
        if message is None:  # only a part of it is here
            return
        kind, content = message
        if kind == "collective":
            self.collectives.add(handle.rank, content)
        elif kind == "report":
            self.progress.add(*content)
        elif kind == "warning":
            self.output.add_warning(handle.rank, *content)
        else:
            getattr(handle, f"on_{kind}")(content)
        if kind == "result_piece":
            arriving = [h.result for h in self.handles if h.result]
            self.progress.show_arrival(sum(r.received for r in arriving),
                                       sum(r.total for r in arriving))

    def _on_exit(self, handle, *_):
        """Its process has ended: before it reported anything, if no message is left to read."""
        while handle.connection and not handle.settled and handle.connection.has_arrived():
            self._receive(handle)
        if not handle.settled:
            self._read_remaining_output(handle)
            handle.on_exit(self._printed(handle), self.options.memory_limit)

    def _read_remaining_output(self, handle):
        deadline = time.monotonic() + 1  # a child that it left behind may print for ever
        while handle.output and handle.output.poll() and time.monotonic() < deadline:
            self._read_output(handle)

    def _printed(self, handle) -> str:
        return self.output.by_rank[handle.rank].ending

    # deciding

    def _raise_if_failed_or_stuck(self):
        """Raises when the launch can no longer succeed."""
        if mismatch := self.collectives.mismatch:
            raise RanksStuck("the ranks are not in the same collective",
                             self._mismatched_outcomes(mismatch.by_rank), mismatch.sentence,
                             code="collectives_differ")
        if any(h.settled and h.outcome.kind.is_failure for h in self.handles):
            self._ask_whether_others_wait()
            if hang_rules.first_failure(self.handles):
                raise failure(self._outcomes())
        if stuck := hang_rules.stuck_reason(self.handles, self.options.hang_after):
            code, reason = stuck
            raise RanksStuck(reason, self._outcomes(), code=code)
        if hang_rules.timed_out(self.handles, self.options.timeout):
            raise self._timeout()

    def _ask_whether_others_wait(self):
        """Asks those that still run, at most ten times a second."""
        if time.monotonic() - self.asked > 0.1:
            self.asked = time.monotonic()
            for handle in self.handles:
                if not handle.settled:
                    handle.ask_position()

    def _timeout(self) -> RanksStuck:
        timeout, found = self.options.timeout, self._outcomes()
        busy = [o.rank for o in found if o.kind in (Kind.COMPUTING, Kind.UNRESPONSIVE)]
        loop = f": is there a loop on {named_ranks(busy)} that never ends?" if busy else "."
        return RanksStuck(f"not done after {timeout:g} s", found,
                          f"That is the timeout={timeout:g} of this launch{loop}",
                          code="timed_out")

    def _note_suspended(self):
        for handle in self.handles:
            handle.note_suspended()

    def _notify_if_stalled(self):
        """Shows where the ranks are when nothing has happened that looks like progress."""
        arriving = [h.heard for h in self.handles if h.result and not h.settled]
        last_sign = max(self.began, self.output.changed, self.progress.changed, *arriving,
                        *(h.changed for h in self.handles))
        if self.stall_notice.is_due(last_sign):
            quiet = time.monotonic() - last_sign
            lines = "; ".join(outcomes.summary(self._outcomes(disturb=False)))
            self.output.show_notice(wrapped(
                f"nothing new for {quiet:.0f} s: {lines}. Interrupt the cell if that is not meant; "
                "launch(..., timeout=60) would stop it by itself."))

    def running_line(self) -> str:
        """What each rank does, for the line of a launch that takes long; "" before that. Another
        thread than the launch's calls it."""
        if time.monotonic() - self.began < hang_rules.STALL_NOTICE:
            return ""
        if processes.server_starts():
            return "the process that ranks are forked from imports torch"
        found = [handle.last_known() for handle in list(self.handles)]
        return outcomes.summary_now(found + self._not_started(found))

    # how each rank ended

    def _outcomes(self, disturb: bool = True) -> list[Outcome]:
        """How every rank has ended by now; those still running are asked where they are. disturb:
        also by a signal, for ranks that will be stopped: it may end a call of C that they are in.
        """
        for handle in self.handles:
            handle.ask_position()
        asked = [handle for handle in self.handles if handle.has_function]
        self._listen_until(lambda: all(h.position or h.settled for h in asked), seconds=0.4)
        self._note_suspended()
        silent = [handle for handle in self.handles if handle.silent and not handle.suspended_since]
        found = [handle.present_outcome() for handle in self.handles]
        for handle in silent if disturb else ():
            found[handle.rank] = self._unresponsive_outcome(handle)
        return found + self._not_started(found)

    def _not_started(self, found) -> list[Outcome]:
        return [Outcome(rank, Kind.STARTING) for rank in range(len(found), self.plan.ranks)]

    def _unresponsive_outcome(self, handle) -> Outcome:
        """Where a rank is that answers nothing. The signal that makes it print its stack may also
        end the call that blocks it, so what it sends from now on no longer describes the hang."""
        handle.ask_for_stack()

        def stack():
            return source_lines.parse_stack_dump(self._printed(handle))

        self._listen_until(stack, seconds=0.5)
        return Outcome(handle.rank, Kind.UNRESPONSIVE, stack=stack())

    def _mismatched_outcomes(self, announced: dict[int, Announcement]) -> list[Outcome]:
        """What each rank is about to call; of a rank that has announced nothing, where it is."""
        members = next(iter(announced.values())).members
        self._listen_until(lambda: len(announced) == len(members), seconds=0.3)
        found = self._outcomes()
        for rank, call in announced.items():
            kind = Kind.OUT_OF_COLLECTIVES if call.place.is_ours else Kind.MISMATCHED
            found[rank] = Outcome(rank, kind, collective=str(call), number=call.number,
                                  stack=[call.place])
        return found

    # the end

    def _stop(self):
        """Kills every rank with its children, shows what is left of the output, tidies up."""
        for handle in self.handles:
            handle.kill()
        for handle in self.handles:
            self._read_remaining_output(handle)
            handle.close()
        self.output.finish()
        self.progress.close()
