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

from labs.words import counted, with_article
from labs.workers import source_lines

# name of the collective -> the argument whose shape and dtype must be the same on all ranks
COMPARED = {
    "all_reduce": "tensor", "broadcast": "tensor", "reduce": "tensor", "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor", "all_gather_single": "input_tensor",
    "reduce_scatter_tensor": "input", "reduce_scatter_single": "input",
    "reduce_scatter": "output", "gather": "tensor", "scatter": "tensor",
    "all_to_all": "input_tensor_list", "all_to_all_single": "input", "barrier": None,
    "all_gather_object": None, "broadcast_object_list": None, "gather_object": None,
    "scatter_object_list": None,
}
_VARIANTS = {"all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather",
             "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
             "all_to_all_single": "all_to_all"}
_SPLIT = ("all_to_all", "all_to_all_single")  # each pair of ranks must agree on a size


@dataclass(frozen=True)
class Announcement:
    """One collective, as one rank is about to call it.

    group, members: name and ranks of its process group. number: counts from 1 in that group.
    signature: what must be the same on every rank, for example `all_reduce of float32 [2]`. sends,
    receives: of an all-to-all, elements to and from each of the members; empty where unknown.
    """

    group: str
    members: tuple[int, ...]
    number: int
    signature: str
    place: source_lines.Place
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()

    def __str__(self):
        splits = (f" that sends {list(self.sends)} and receives {list(self.receives)} elements"
                  if self.sends else "")
        return self.signature + splits


@dataclass(frozen=True)
class Mismatch:
    """What ranks announced where they disagree, and a sentence that says on what."""

    by_rank: dict[int, Announcement]
    sentence: str = "All must call the same ones, in the same order, on the same shapes."


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
            # Thread-local: another thread's collective is no part of this call.
            if getattr(state, "is_inside", False):  # object collectives are made of others
                return function(*args, **kwargs)
            state.is_inside = True
            try:
                given = _arguments(signature, args, kwargs)
                if _is_known(given.get("group")):
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
    `mismatch` is the first disagreement, or None."""

    def __init__(self):
        self._incomplete = {}
        self.mismatch: Mismatch | None = None

    def add(self, rank: int, announcement: Announcement) -> None:
        """Takes what `rank` is about to call, and compares it with the others' same call."""
        key = (announcement.group, announcement.members, announcement.number)
        by_rank = self._incomplete.setdefault(key, {})
        by_rank[rank] = announcement
        # Invariant: call number n of a group is the same collective on every rank, with the same
        # shape, dtype, operation and root. Catches a rank that skips a collective, on which the
        # others would wait, and one that calls it on another shape, at which gloo aborts the
        # process.
        if len({other.signature for other in by_rank.values()}) > 1:
            self.mismatch = Mismatch(by_rank)
        # Invariant: in an all-to-all each rank expects what every other one sends to it. Shapes may
        # differ.
        elif sentence := _unequal_splits(rank, by_rank):
            self.mismatch = Mismatch(by_rank, sentence)
        elif len(by_rank) == len(announcement.members):
            del self._incomplete[key]


def _unequal_splits(rank: int, by_rank: dict[int, Announcement]) -> str:
    """Where `rank` and another disagree on the elements that one sends the other, as a sentence;
    empty where they agree."""
    for other in by_rank:
        for sender, receiver in ((rank, other), (other, rank)):
            sent = _elements(by_rank[sender].sends, by_rank[sender].members, receiver)
            expected = _elements(by_rank[receiver].receives, by_rank[receiver].members, sender)
            if None not in (sent, expected) and sent != expected:
                return (f"Rank {sender} sends {counted(sent, 'element')} to rank {receiver}, which "
                        f"expects {expected}.")
    return ""


def _elements(splits, members, rank) -> int | None:
    return splits[members.index(rank)] if splits and rank in members else None


def _arguments(signature, args, kwargs) -> dict:
    try:
        given = signature.bind(*args, **kwargs)
    except TypeError:
        return {}  # a wrong call: the function itself will raise
    given.apply_defaults()
    return given.arguments


def _is_known(group) -> bool:
    """Whether torch.distributed knows who is in a group: of rpc's it does not."""
    return group is None or (isinstance(group, dist.ProcessGroup)
                             and group in c10d._world.pg_group_ranks)


def _announcement(counts, name, argument, given) -> Announcement:
    group = given.get("group") or dist.group.WORLD
    title, members = getattr(group, "group_name", ""), dist.get_process_group_ranks(group)
    counts[title] += 1
    # Frame 2 is the caller of `call`: 0 is this function, 1 the wrapper.
    sends, receives = _splits(name, given, len(members))
    return Announcement(title, tuple(members), counts[title],
                        without_variant(name) + _tensor(name, argument, given) + _operation(given),
                        source_lines.calling_place(sys._getframe(2)), sends, receives)


def _tensor(name, argument, given) -> str:
    tensor = given.get(argument)
    if name in _SPLIT:  # shapes may differ from rank to rank: see _splits
        tensor = tensor[0] if isinstance(tensor, list | tuple) and tensor else tensor
        return f" of {_dtype(tensor)}" if isinstance(tensor, torch.Tensor) else ""
    if not isinstance(tensor, torch.Tensor):
        # by its kind alone, which is the same on all ranks: torch refuses it, and says why
        kind = "None" if tensor is None else with_article(type(tensor).__name__)
        return f" of {kind}" if argument in given else ""
    return f" of {_dtype(tensor)} {list(tensor.shape)}"


def _dtype(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _splits(name, given, members) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(elements sent to, elements received from) each rank of the group by an all-to-all; empty for
    others, and where the arguments are wrong, or the splits those of a group of another size: then
    the function itself will raise."""
    try:
        if name == "all_to_all":
            by_way = tuple(tuple(tensor.numel() for tensor in given[f"{way}_tensor_list"])
                           for way in ("input", "output"))
        elif name == "all_to_all_single":
            by_way = tuple(_elements_by_rank(given[way], given[f"{way}_split_sizes"], members)
                           for way in ("input", "output"))
        else:
            return (), ()
        if all(len(each) == members for each in by_way):
            return by_way
    except (AttributeError, KeyError, TypeError, IndexError):
        pass
    return (), ()


def _elements_by_rank(tensor, rows, members) -> tuple[int, ...]:
    """How many elements of a tensor belong to each rank, from the rows of each (None: equal)."""
    rows = rows or [tensor.shape[0] // members] * members
    return tuple(count * tensor[:1].numel() for count in rows)


def _operation(given) -> str:
    root = next((given[name] for name in ("src", "dst", "group_src", "group_dst")
                 if given.get(name) is not None), None)
    return _reduction(given.get("op")) + (f" with root {root}" if root is not None else "")


def _reduction(op) -> str:
    """A reduce operation by its kind and factor: printed, it would show an address."""
    kind, factor = op.__getstate__() if hasattr(op, "op") else (op, None)
    if kind is None or kind == dist.ReduceOp.SUM:
        return ""
    if isinstance(factor, torch.Tensor):
        # to read a GPU's number would wait for its kernels, which may wait for another rank
        factor = factor.tolist() if factor.device.type == "cpu" else "on the GPU"
    times = "" if factor is None else f" of factor {factor}"
    return f" with {str(kind).split('.')[-1]}{times}"
