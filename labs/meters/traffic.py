"""Counts what a rank communicates: kind, elements and bytes of every collective, in order."""

import contextlib
import time
from dataclasses import dataclass

import torch
from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode

# torch's internal names of the collectives, and which argument counts: a reduce-scatter by what
# goes in, an all-gather by what comes out, so that both move (N-1)/N of the counted bytes.
_KINDS = {
    "allreduce_": ("all_reduce", 0), "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0), "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 0), "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1), "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1), "alltoall_base_": ("all_to_all", 1),
    "gather_": ("gather", 1), "scatter_": ("scatter", 1), "barrier": ("barrier", None),
    "send": ("send", 0), "recv_": ("recv", 0),
}


@dataclass(frozen=True)
class Call:
    """One collective: kind, logical elements and bytes, whether it was asynchronous, and when
    (seconds on `time.perf_counter`)."""

    kind: str
    elements: int
    bytes: int
    asynchronous: bool
    at: float


@dataclass(frozen=True)
class Mark:
    """Something that happened between the calls."""

    what: str
    at: float


class Traffic(TorchDispatchMode):
    """`with Traffic() as traffic:` counts the collectives of this rank, those that torch's C++
    issues included. Logical bytes: what the algorithm asks for, not what the wire carries."""

    def __init__(self):
        super().__init__()
        self.events = []  # calls and marks, in the order in which they happened

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _record(self, func, args, kwargs):
        name = func._schema.name.removeprefix("c10d::")
        kind, position = _KINDS.get(name, (name, None))
        tensors = _flat(args[position]) if position is not None else []
        self.events.append(Call(kind, sum(t.numel() for t in tensors),
                                sum(t.numel() * t.element_size() for t in tensors),
                                _asynchronous(func, args, kwargs), time.perf_counter()))

    def mark(self, what: str) -> None:
        """Notes that something happened, at its place between the calls."""
        self.events.append(Mark(what, time.perf_counter()))

    @property
    def calls(self) -> list:
        return [event for event in self.events if isinstance(event, Call)]

    def of(self, *kinds) -> list:
        """The calls of these kinds."""
        return [call for call in self.calls if call.kind in kinds]

    @property
    def bytes(self) -> int:
        """Logical bytes of all calls."""
        return sum(call.bytes for call in self.calls)


@contextlib.contextmanager
def around_waits(before=None, after=None):
    """Inside, each wait for a collective that is under way calls before(work) when it begins and
    after(work) when it is over."""
    original = c10d.Work.wait

    def wait(self, *args, **kwargs):
        if before:
            before(self)
        result = original(self, *args, **kwargs)
        if after:
            after(self)
        return result

    c10d.Work.wait = wait
    try:
        yield
    finally:
        c10d.Work.wait = original


def _asynchronous(func, args, kwargs) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name.lower() in ("asyncop", "async_op"):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            return bool(argument.default_value if given is None else given)
    return False


def _flat(value) -> list:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)]
