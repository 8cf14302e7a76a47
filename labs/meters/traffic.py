"""Records what a rank communicates: kind, elements and bytes of every collective, in order."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest import mock

from torch._C import _distributed_c10d as c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch's internal names of the collectives, and which argument is counted: the input of a
# reduce-scatter, the output of an all-gather, so that both move (N-1)/N of the counted bytes.
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
class CollectiveCall:
    """One collective as its caller sees it.

    elements, bytes: logical, of the whole tensor. asynchronous: whether the call returned before
    the collective was done. at: when it was called, in seconds on `time.perf_counter`.
    """

    kind: str
    elements: int
    bytes: int
    asynchronous: bool
    at: float


@dataclass(frozen=True)
class Mark:
    """An event between two collectives, for example a gradient that is complete."""

    what: str
    at: float


class Traffic(TorchDispatchMode):
    """`with Traffic() as traffic:` records this rank's collectives, with their logical bytes: what
    the algorithm asks for, not what the wire carries.

    A dispatch mode sees every operator of the namespace c10d, so also the collectives that torch's
    C++ issues (DDP's reducer), which a patch of torch.distributed's functions would miss.
    """

    def __init__(self):
        super().__init__()
        self.events: list[CollectiveCall | Mark] = []  # in the order in which they happened

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self._record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _record(self, func, args, kwargs):
        name = func._schema.name.removeprefix("c10d::")
        kind, position = _KINDS.get(name, (name, None))
        tensors = tree_leaves(args[position]) if position is not None else []
        self.events.append(CollectiveCall(
            kind, sum(t.numel() for t in tensors),
            sum(t.numel() * t.element_size() for t in tensors),
            _asynchronous(func, args, kwargs), time.perf_counter()))

    def mark(self, what: str) -> None:
        """Records an event between the calls."""
        self.events.append(Mark(what, time.perf_counter()))

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


def hook_waits(before: Callable[[c10d.Work], None] | None = None,
               after: Callable[[c10d.Work], None] | None = None) -> AbstractContextManager:
    """Returns a context manager; while it is open, each `Work.wait()` calls before(work) when it
    begins and after(work) when it has returned."""
    original = c10d.Work.wait

    def wait(self, *args, **kwargs):
        if before:
            before(self)
        result = original(self, *args, **kwargs)
        if after:
            after(self)
        return result

    return mock.patch.object(c10d.Work, "wait", wait)


def _asynchronous(func, args, kwargs) -> bool:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name.lower() in ("asyncop", "async_op"):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            return bool(argument.default_value if given is None else given)
    return False
