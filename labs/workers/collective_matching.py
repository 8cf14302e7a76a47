"""Finds ranks that call different collectives: each announces what it is about to call, and the
caller compares.

torch's own check (TORCH_DISTRIBUTED_DEBUG=DETAIL) puts a barrier before every collective, and in
torch 2.13 crashes DistributedDataParallel; an announcement takes microseconds and waits for nobody.
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

# name of the collective -> the argument whose shape and dtype must be the same on all ranks
COMPARED = {
    "all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor", "all_gather_single": "input_tensor",
    "reduce_scatter_tensor": "input", "reduce_scatter_single": "input",
    "reduce_scatter": "output", "gather": "tensor", "scatter": "tensor", "all_to_all": None,
    "all_to_all_single": None, "barrier": None, "all_gather_object": None,
    "broadcast_object_list": None, "gather_object": None, "scatter_object_list": None,
}
_VARIANTS = {"all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather",
             "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
             "all_to_all_single": "all_to_all"}


@dataclass(frozen=True)
class Announcement:
    """One collective, as one rank is about to call it.

    group, members: name and ranks of its process group. number: counts from 1 in that group.
    signature: what must be the same on every rank, for example `all_reduce of float32 [2]`.
    """

    group: str
    members: tuple[int, ...]
    number: int
    signature: str
    place: source_lines.Place


def without_variant(name: str) -> str:
    """The collective's plain name: all_gather_into_tensor is an all_gather."""
    return _VARIANTS.get(name, name)


def announce_collectives(channel) -> None:
    """On a rank: from now on sends an Announcement to the caller before each collective."""
    counts, state = Counter(), threading.local()

    def announced(name, argument, function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **kwargs):
            if getattr(state, "is_inside", False):  # object collectives are made of others
                return function(*args, **kwargs)
            state.is_inside = True
            try:
                given = _arguments(signature, args, kwargs)
                channel.send("collective", _announcement(counts, name, argument, given))
                return function(*args, **kwargs)
            finally:
                state.is_inside = False

        return call

    for name, argument in COMPARED.items():
        if function := getattr(c10d, name, None):  # torch 2.11 lacks the names that end in _single
            wrapped = announced(name, argument, function)
            # torch.distributed re-exports these functions, and torch's own modules call c10d's
            setattr(c10d, name, wrapped)
            setattr(dist, name, wrapped)


class CollectiveLog:
    """In the caller: the collectives that some ranks of their group have announced, but not all.
    `mismatch` is the first disagreement, rank -> Announcement, or None."""

    def __init__(self):
        self._incomplete = {}
        self.mismatch: dict[int, Announcement] | None = None

    def add(self, rank: int, announcement: Announcement) -> None:
        key = (announcement.group, announcement.members, announcement.number)
        by_rank = self._incomplete.setdefault(key, {})
        by_rank[rank] = announcement
        if len({other.signature for other in by_rank.values()}) > 1:
            self.mismatch = by_rank
        elif len(by_rank) == len(announcement.members):
            del self._incomplete[key]


def _arguments(signature, args, kwargs) -> dict:
    try:
        given = signature.bind(*args, **kwargs)
    except TypeError:
        return {}  # a wrong call: the function itself will raise
    given.apply_defaults()
    return given.arguments


def _announcement(counts, name, argument, given) -> Announcement:
    group = given.get("group") or dist.group.WORLD
    title = getattr(group, "group_name", "")
    counts[title] += 1
    return Announcement(title, tuple(dist.get_process_group_ranks(group)), counts[title],
                        without_variant(name) + _tensor(given, argument) + _operation(given),
                        _calling_line(sys._getframe(2)))


def _tensor(given, argument) -> str:
    tensor = given.get(argument)
    if not isinstance(tensor, torch.Tensor):
        return f" of {tensor!r:.20}" if argument in given else ""
    return f" of {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _operation(given) -> str:
    root = next((given[name] for name in ("src", "dst", "group_src", "group_dst")
                 if given.get(name) is not None), None)
    op = given.get("op")
    op = "" if op in (None, dist.ReduceOp.SUM) else f" with {str(op).split('.')[-1]}"
    return op + (f" with root {root}" if root is not None else "")


def _calling_line(frame) -> source_lines.Place:
    """The student's line that calls; failing that, ours."""
    stack = source_lines.stack_of(frame)[::-1]
    return next((place for place in stack if place.is_students), None) or next(
        (place for place in stack if place.is_ours), stack[0])
