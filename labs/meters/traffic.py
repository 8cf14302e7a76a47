"""Records what a rank communicates: kind, elements and bytes of every collective, in order, and
where each is waited for."""

import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labs.meters.collective_hooks import CollectiveObserver, IssuedCollective
from labs.meters.waits import Waited, WaitObserver

# Counted is the output of these, and the input of all others: then each rank sends (N-1)/N of the
# counted bytes on the mean, two times that for an all-reduce (`passes` of
# labs.predictions.communication.traffic).
_COUNTED_BY_OUTPUT = ("all_gather", "scatter")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as its caller sees it, by whatever API it was called.

    kind: all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all, gather, scatter,
    send, recv or barrier. elements, bytes: logical; the output of an all-gather or a scatter, the
    input of all others. Several tensors in one coalesced call are one call with their sum; an
    object collective is the calls that it is made of. asynchronous: whether the call returned
    before the collective was done, as functional collectives always do: what counts then is where
    it is waited for. at: when it was called, in seconds on `time.perf_counter`. ranks: of its
    process group. members: their numbers among all ranks; empty where they are not known.
    """

    kind: str
    elements: int
    bytes: int
    asynchronous: bool
    at: float
    ranks: int = 0
    members: tuple[int, ...] = ()


# Bytes of a pickled number: 21 of a float, 392 of a tensor with one element (torch 2.13).
_PICKLED_NUMBER = 512


def numbers_sent(calls: Iterable[CollectiveCall]) -> float:
    """How many numbers a rank's collectives communicate. A receive is the other end of a send, and
    not counted again. The bytes of an object collective are a number for each rank's pickle."""
    numbers = 0.0
    for call in calls:
        if call.kind != "recv":
            # Object collectives send pickles as uint8 tensors: one byte an element.
            is_object = call.bytes == call.elements and call.ranks  # uint8
            numbers += call.elements / (_PICKLED_NUMBER if is_object else 1)
    return numbers


@dataclass(frozen=True)
class Mark:
    """An event between two collectives, for example a gradient that is complete. call: the
    collective that it is about, if there is one."""

    what: str
    at: float
    call: CollectiveCall | None = None


class Traffic(CollectiveObserver):
    """`with Traffic() as traffic:` records this rank's collectives, with their logical bytes: what
    the algorithm asks for, not what the wire carries.

    Each is recorded once, whatever API it was called by: `dist.all_gather` with a list, coalesced
    and functional collectives, DTensor, methods of a group or of its backend, torch's C++ (DDP).
    """

    def __init__(self):
        self.events: list[CollectiveCall | Mark] = []  # in the order in which they happened
        self._waits: _WaitMarks | None = None
        self._being_issued: dict[int, CollectiveCall] = {}  # by the id of what is issued

    def before(self, collective: IssuedCollective) -> None:
        counted = (collective.outputs if collective.kind in _COUNTED_BY_OUTPUT
                   else collective.inputs)
        call = CollectiveCall(
            collective.kind, sum(t.numel() for t in counted),
            sum(t.numel() * t.element_size() for t in counted), collective.asynchronous,
            time.perf_counter(), collective.ranks, collective.members)
        self.events.append(call)
        if self._waits:
            self._being_issued[id(collective)] = call

    def after(self, collective: IssuedCollective, work: dist.Work | None) -> None:
        call = self._being_issued.pop(id(collective), None)
        if call and work is not None:
            self._waits.expect(call, work, collective.outputs)

    def mark(self, what: str, call: CollectiveCall | None = None) -> None:
        """Records an event between the calls."""
        self.events.append(Mark(what, time.perf_counter(), call))

    def marked_waits(self) -> WaitObserver:
        """Returns a context manager; while it is open, the first wait for each collective is
        recorded as a Mark "wait KIND", whose call is the collective. Kind and call are missing
        where it was issued before.

        Waits are seen in every API (see labs/meters/waits.py). A poll is none: only where the same
        collective is polled again before anything else has happened, the rank waits. To find that
        in a fast collective too, the first poll of each says that it is not done yet.
        """
        self._waits = _WaitMarks(self)
        return self._waits

    def never_waited_for(self) -> list[CollectiveCall]:
        """The calls so far whose end this rank has not waited for, and has not seen by a poll;
        while `marked_waits` is open."""
        return self._waits.in_flight()

    @property
    def calls(self) -> list[CollectiveCall]:
        """The collectives, in the order in which they were called."""
        return [event for event in self.events if isinstance(event, CollectiveCall)]

    def of(self, *kinds: str) -> list[CollectiveCall]:
        """The calls of these kinds."""
        return [call for call in self.calls if call.kind in kinds]

    @property
    def bytes(self) -> int:
        """Logical bytes of all calls."""
        return sum(call.bytes for call in self.calls)


class _WaitMarks(WaitObserver):
    """Marks the first wait for each collective of a Traffic."""

    def __init__(self, traffic):
        self._traffic = traffic
        # Handles of what is in flight, held so that Python meets the same objects again; dropped
        # with the first wait, because they hold their tensors.
        self._in_flight: list[tuple[CollectiveCall, dist.Work, set[int]]] = []
        self._over = weakref.WeakSet()  # handles that have been waited for
        self._polled = weakref.WeakKeyDictionary()  # handle -> number of events at its last poll

    def __exit__(self, *exception):
        self._in_flight.clear()
        return super().__exit__(*exception)

    def expect(self, call: CollectiveCall, work: dist.Work, outputs: list[torch.Tensor]) -> None:
        """Remembers a collective that has just been issued."""
        self._in_flight.append((call, work, {_address(tensor) for tensor in outputs}))

    def in_flight(self) -> list[CollectiveCall]:
        """The collectives that nobody has waited for yet."""
        return [call for call, _, _ in self._in_flight]

    def wait_begins(self, waited: Waited) -> None:
        found = self._settle(waited)
        if found:
            self._traffic.mark(f"wait {found[0].kind}", found[0])
        elif isinstance(waited, dist.Work) and waited not in self._over:
            self._over.add(waited)
            self._traffic.mark("wait")

    def wait_ended(self, waited: Waited) -> None:
        self._settle(waited)  # where a poll has found it done, nobody had to wait

    def hides_completion(self, work: dist.Work) -> bool:
        if work in self._over:
            return False
        before, now = self._polled.get(work), len(self._traffic.events)
        self._polled[work] = now
        # Polled again with nothing in between: a loop around is_completed() is a wait.
        if before == now:
            self.wait_begins(work)
        return before is None

    def _settle(self, waited):
        """Takes a collective out of those in flight; None if it is not one of them."""
        # the newest first: memory of an older one may have been used again
        for number, found in reversed(list(enumerate(self._in_flight))):
            _, work, addresses = found
            if waited is work or isinstance(waited, torch.Tensor) and _address(waited) in addresses:
                self._over.add(work)
                return self._in_flight.pop(number)
        return None


def _address(tensor) -> int:
    return tensor.untyped_storage().data_ptr()
