"""Holds the collectives of all ranks against each other: each rank tells the caller what it is
about to call, and the caller says at once when two ranks do not call the same.

torch's own check (TORCH_DISTRIBUTED_DEBUG=DETAIL) puts a barrier before every collective, and in
torch 2.13 crashes DistributedDataParallel; telling costs a few microseconds and waits for nobody.
"""

import functools
import inspect
import sys
import threading
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from labs.workers import source_lines

# name of the collective -> the argument whose shape and dtype must be alike on all ranks
_ALIKE = {
    "all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor", "all_gather_single": "input_tensor",
    "reduce_scatter_tensor": "input", "reduce_scatter_single": "input",
    "reduce_scatter": "output", "gather": "tensor", "scatter": "tensor", "all_to_all": None,
    "all_to_all_single": None, "barrier": None, "all_gather_object": None,
    "broadcast_object_list": None, "gather_object": None, "scatter_object_list": None,
}
_PLAIN = {"all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather",
          "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
          "all_to_all_single": "all_to_all"}


@dataclass(frozen=True)
class Call:
    """One collective, as one rank calls it. number counts from 1 in its group; like is what must
    be the same on every rank, in words."""

    group: str
    members: tuple
    number: int
    like: str
    place: source_lines.Place

    def __str__(self):
        if self.place.is_ours:
            return "no further collective: it has left your function"
        return f"{self.like} (#{self.number}) at {self.place}"


def plain(name: str) -> str:
    """A collective's name without its variant: all_gather_into_tensor is an all_gather."""
    return _PLAIN.get(name, name)


def tell(channel) -> None:
    """On a rank: from now on every collective is announced to the caller before it begins."""
    counts, inside = Counter(), threading.local()

    def announced(name, argument, function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if getattr(inside, "a_call", False):  # a collective that is made of others
                return function(*args, **kwargs)
            inside.a_call = True
            try:
                channel.send("call", _call(counts, name, argument, signature, args, kwargs))
                return function(*args, **kwargs)
            finally:
                inside.a_call = False

        return call

    for name, argument in _ALIKE.items():
        if function := getattr(c10d, name, None):
            wrapped = announced(name, argument, function)
            setattr(c10d, name, wrapped)
            setattr(dist, name, wrapped)


class Ledger:
    """On the caller's side: what each rank has announced. `mismatch` is the first disagreement,
    a map from rank to Call, or None."""

    def __init__(self):
        self._open = {}
        self.mismatch = None

    def enter(self, rank: int, call: Call) -> None:
        key = (call.group, call.members, call.number)
        calls = self._open.setdefault(key, {})
        calls[rank] = call
        if len({other.like for other in calls.values()}) > 1:
            self.mismatch = calls
        elif len(calls) == len(call.members):
            del self._open[key]


def _call(counts, name, argument, signature, args, kwargs):
    try:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        given = given.arguments
    except TypeError:
        given = {}  # a wrong call: the function itself says so
    group = given.get("group") or dist.group.WORLD
    title = getattr(group, "group_name", "")
    counts[title] += 1
    return Call(title, tuple(dist.get_process_group_ranks(group)), counts[title],
                plain(name) + _tensor(given, argument) + _root(given),
                _place(sys._getframe(2)))


def _tensor(given, argument) -> str:
    tensor = given.get(argument)
    if not isinstance(tensor, torch.Tensor):
        return f" of {tensor!r:.20}" if argument in given else ""
    return f" of {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _root(given) -> str:
    root = next((given[name] for name in ("src", "dst", "group_src", "group_dst")
                 if given.get(name) is not None), None)
    op = given.get("op")
    op = "" if op in (None, dist.ReduceOp.SUM) else f" with {str(op).split('.')[-1]}"
    return op + (f" with root {root}" if root is not None else "")


def _place(frame) -> source_lines.Place:
    """The student's line that calls; failing that, ours."""
    stack = source_lines.stack_of(frame)[::-1]
    return next((place for place in stack if place.is_students), None) or next(
        (place for place in stack if place.is_ours), stack[0])
