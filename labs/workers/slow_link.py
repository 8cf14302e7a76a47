"""A slow link for ranks on gloo: each collective takes latency + bytes / bandwidth of real time.

gloo moves bytes with the cores that the model computes on, so on a CPU a hidden collective slows
down what hides it. A GPU's link works without the GPU. Here every rank gets one link that does: its
collectives pass one after the other, each stays in flight for its time while the cores are free,
and a caller who asked for async_op=True continues meanwhile.

Every collective passes it that reaches an operator of torch (`labs.workers.collective_kernels`).
Sends, receives and what is called on a backend itself pass beside it. On GPUs nothing is slowed
down.
"""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.profiler import record_function

from labs.workers import devices
from labs.workers.collective_kernels import IssuedCollective, around_collectives

LABEL = "link:"  # of a collective in flight in a trace, before its kind
_WHOLE_IN_INPUTS = ("reduce_scatter", "all_to_all", "gather")  # elsewhere: in the outputs
_ONE_RANKS_PART = ("gather", "scatter")  # every rank gives only its part of the whole


@dataclass(frozen=True)
class Link:
    """What a rank's link carries. bytes_per_second: in one direction. latency: seconds that each
    collective takes in addition to its bytes."""

    bytes_per_second: float = math.inf
    latency: float = 0.0

    def __post_init__(self):
        if not self.bytes_per_second > 0 or not self.latency >= 0:
            raise ValueError(f"{self}: bytes_per_second must be above 0, and latency 0 or more")

    def __str__(self):
        return (f"{self.bytes_per_second / 1e6:.3g} MB/s, {1e3 * self.latency:.3g} ms latency, "
                "slow on purpose")

    def seconds(self, kind: str, nbytes: int, ranks: int) -> float:
        """Returns how long a collective of `nbytes` (full tensor) among `ranks` is in flight."""
        return self.latency + link_bytes(kind, nbytes, ranks) / self.bytes_per_second


def link_bytes(kind: str, nbytes: int, ranks: int) -> float:
    """Returns the bytes that a rank sends in a ring collective on a full tensor of `nbytes`: an
    all-reduce is a reduce-scatter and an all-gather, and each of these sends all parts but one."""
    share = (ranks - 1) / ranks
    return nbytes * {"all_reduce": 2 * share, "broadcast": float(ranks > 1),
                     "reduce": float(ranks > 1), "barrier": 0.0}.get(kind, share)


@dataclass
class Usage:
    """What passed the link while `slow_link` was open. bytes: those that this rank sent."""

    collectives: int = 0
    bytes: float = 0.0


@contextlib.contextmanager
def slow_link(link: Link) -> Iterator[Usage]:
    """On a rank: while open, the collectives of CPU tensors take their time on this link. All ranks
    must open it between the same collectives. Yields a count of what passes. Does nothing on a rank
    that has a GPU: there the real link is used."""
    usage = Usage()
    if devices.device().type != "cpu":
        yield usage
        return
    carrier = _the_link()
    before = carrier.link, carrier.usage
    with contextlib.nullcontext() if carrier.link else around_collectives(_slowed, innermost=True):
        carrier.link, carrier.usage = link, usage
        try:
            yield usage
        finally:
            carrier.link, carrier.usage = before


def read_label(label: str) -> tuple[str, int, int]:
    """Returns (name, elements, bytes) of a collective from its label in a trace."""
    name, rest = label.split(" of ")
    return (name, *(int(part.split()[0]) for part in rest.split(", ")))


def is_slow() -> bool:
    """Returns whether the collectives of this rank pass a slow link now."""
    return _carrier is not None and _carrier.link is not None


def is_moving() -> bool:
    """Returns whether a collective of this rank is on a slow link now: then waiting is no hang."""
    return _carrier is not None and _carrier.is_moving


def proportional_link(step: Callable[[], object], share: float, latency_share: float = 0.0,
                      repeat: int = 5) -> Link:
    """On each rank: returns a link on which the bytes of `step()` take `share` of the seconds that
    the step computes: an effect then has the same size on every machine.

    latency_share: the share of the computing that one collective's latency takes, in addition. Runs
    the step `repeat` + 1 times, the first one to warm up. All ranks get the same link.
    """
    step()
    seconds = []
    with slow_link(Link()) as usage:
        for _ in range(repeat):
            # CPU time, so that neither a wait for the others nor another program counts.
            began = time.thread_time()
            step()
            seconds.append(time.thread_time() - began)
    # (2,): seconds of CPU time of the median step, bytes of one step
    found = torch.tensor([sorted(seconds)[repeat // 2], usage.bytes / repeat], dtype=torch.float64)
    dist.all_reduce(found)  # the mean over the ranks: every rank must have the same link
    computes, nbytes = (found / dist.get_world_size()).tolist()
    return Link(nbytes / (share * computes) if nbytes else math.inf, latency_share * computes)


@dataclass
class _Collective:
    """One collective that waits for the link or is on it."""

    label: str
    seconds: float
    work: dist.Work
    outputs: list[torch.Tensor]
    done: torch.futures.Future


class _LinkThread(threading.Thread):
    """A rank's link: takes one collective after the other, waits until gloo is done with it, sleeps
    as long as its bytes take, and completes it. link: None while it is not in use."""

    def __init__(self):
        super().__init__(name="labs-link", daemon=True)
        self.link: Link | None = None
        self.is_moving = False  # whether a collective's bytes are on their way
        self.usage = Usage()
        self.waiting: queue.SimpleQueue[_Collective] = queue.SimpleQueue()

    def send(self, one: IssuedCollective, work: dist.Work) -> dist.Work:
        """Puts a collective that gloo has begun on the link, and returns the handle of its end."""
        kind, ranks = one.kind, one.ranks
        tensors = one.inputs if kind in _WHOLE_IN_INPUTS else one.outputs
        parts = ranks if kind in _ONE_RANKS_PART else 1
        elements = parts * sum(tensor.numel() for tensor in tensors)
        nbytes = parts * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.usage.collectives += 1
        self.usage.bytes += link_bytes(kind, nbytes, ranks)
        done = torch.futures.Future()
        self.waiting.put(_Collective(f"{LABEL}{kind} of {elements} elements, {nbytes} bytes",
                                     self.link.seconds(kind, nbytes, ranks), work, one.outputs,
                                     done))
        # Private, but the only Work for which C++ can wait (DDP's reducer, wait_tensor) and which
        # Python completes. Of a subclass of Work in Python, C++ sees wait() and get_future() only,
        # and only while somebody keeps the object.
        return c10d._create_work_from_future(done.then(_outputs_or_raise))

    def run(self):
        while True:
            self._carry(self.waiting.get())

    def _carry(self, one: _Collective):
        result = one.outputs
        # gloo's own label ends with gloo's work: this one is what `labs.meters.trace_file` reads.
        with record_function(one.label):
            try:
                one.work.wait()
                self.is_moving = True
                time.sleep(one.seconds)
                self.is_moving = False
            except RuntimeError as error:  # a peer has gone
                result = error
        one.done.set_result(result)


def _outputs_or_raise(done: torch.futures.Future) -> list[torch.Tensor]:
    """What torch calls when a collective is done. An exception that is raised here reaches those
    who wait; Future.set_exception would tell only those who hold the same object in Python."""
    result = done.value()
    if isinstance(result, Exception):
        raise result
    return result


_carrier: _LinkThread | None = None  # a rank's only one, from its first use on


def _the_link() -> _LinkThread:
    global _carrier
    if _carrier is None:
        _carrier = _LinkThread()
        _carrier.start()
        _complete_wait()
    return _carrier


def _slowed(collective: IssuedCollective, issue):
    result = issue()
    if collective.kind in ("send", "recv") or collective.operator == "monitored_barrier_":
        return result
    *outputs, work = result if isinstance(result, tuple) else (result,)
    slowed = _carrier.send(collective, dist.Work.unbox(work)).boxed()
    return (*outputs, slowed) if outputs else slowed


def _complete_wait():
    """Makes `Work.wait` raise the error of a collective that failed, and take a timeout: for a Work
    that is made of a future, torch does neither."""
    original = dist.Work.wait

    def wait(self, *args, **kwargs):
        timeout = args[0] if args else kwargs.get("timeout")
        try:
            done = original(self, *args, **kwargs)
        except RuntimeError as error:
            if "FutureWrappingWork::wait() with finite timeout" not in str(error):
                raise
            done = _wait_at_most(self, timeout) and original(self)
        with contextlib.suppress(NotImplementedError):
            _future(self).value()  # raises what happened
        return done

    dist.Work.wait = wait


def _wait_at_most(work, timeout: timedelta) -> bool:
    deadline = time.monotonic() + timeout.total_seconds()
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"a collective was not complete after {timeout}")
        time.sleep(1e-3)
    return True


def _future(work) -> torch.futures.Future:
    try:
        return work.get_future()
    except RuntimeError as error:  # gloo's send, receive and reduce-scatter have none
        raise NotImplementedError from error
