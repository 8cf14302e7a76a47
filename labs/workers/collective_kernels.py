"""Runs a Python function around every collective of this process, by whatever API it is called and
on whatever thread.

All APIs of torch.distributed (functions, lists, coalesced and object collectives, functional
collectives, DTensor, the C++ of DDP) end in an operator of the namespace c10d. Each of these gets a
kernel here that the dispatcher runs before the backend's. A dispatch mode would not do: it is
switched off inside functional collectives, and other threads do not have it. What is called on a
Backend object itself reaches no operator.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import DispatchKey
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

# torch's internal name -> kind, and which arguments are the outputs and the inputs. A group of
# collectives that are coalesced is one operator, and one call on the wire.
OPERATORS = {
    "allreduce_": ("all_reduce", 0, 0), "allreduce_coalesced_": ("all_reduce", 0, 0),
    "broadcast_": ("broadcast", 0, 0), "reduce_": ("reduce", 0, 0),
    "allgather_": ("all_gather", 0, 1), "_allgather_base_": ("all_gather", 0, 1),
    "allgather_coalesced_": ("all_gather", 0, 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 1),
    "reduce_scatter_": ("reduce_scatter", 0, 1), "_reduce_scatter_base_": ("reduce_scatter", 0, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 0, 1),
    "alltoall_": ("all_to_all", 0, 1), "alltoall_base_": ("all_to_all", 0, 1),
    "gather_": ("gather", 0, 1), "scatter_": ("scatter", 0, 1),
    "send": ("send", 0, 0), "recv_": ("recv", 0, 0), "recv_any_source_": ("recv", 0, 0),
    "barrier": ("barrier", None, None), "monitored_barrier_": ("barrier", None, None),
}
_BLOCKING = ("send", "recv")  # the functions that wait themselves; isend and irecv do not


@dataclass(frozen=True)
class IssuedCollective:
    """One collective at the moment at which it is issued.

    operator: torch's internal name, such as _allgather_base_. outputs, inputs: its tensors; the
    same ones where it works in place. ranks: of its process group. asynchronous: whether the call
    returns before the collective is done. members: the ranks of its group, numbered as all ranks
    are; empty where the operator does not say. peer: of a send or a receive by an operator, the
    other rank's number in the group. splits: of an all-to-all of one tensor, the rows for each
    rank; empty where they are equal.
    """

    operator: str
    kind: str
    outputs: list[torch.Tensor] = field(repr=False)
    inputs: list[torch.Tensor] = field(repr=False)
    ranks: int
    asynchronous: bool
    members: tuple[int, ...] = ()
    peer: int | None = None
    splits: tuple[int, ...] = ()

    def bytes_to_others(self, rank: int) -> int:
        """Bytes of an all-to-all's input, without the part that `rank` sends to itself."""
        mine, parts = self.members.index(rank), self.inputs
        if len(parts) == 1:
            parts = parts[0].split(list(self.splits) or parts[0].shape[0] // self.ranks)
        return sum(part.nbytes for number, part in enumerate(parts) if number != mine)


# (collective, issue) -> what the operator returns
Around = Callable[[IssuedCollective, Callable[[], Any]], Any]
_around: list[Around] = []  # the outermost last
_kernels = contextlib.ExitStack()


@contextlib.contextmanager
def around_collectives(function: Around, innermost: bool = False) -> Iterator[None]:
    """While open, calls `function(collective, issue)` in place of each collective; it calls
    `issue()`, and returns its result or one like it. innermost: inside of the functions that others
    give, whenever they do."""
    if not _around:
        _kernels.enter_context(_installed())
    _around.insert(0 if innermost else len(_around), function)
    try:
        yield
    finally:
        _around.remove(function)
        if not _around:
            _kernels.close()


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    # "IMPL" adds kernels to operators that exist; the namespace is torch's own.
    library = torch.library.Library("c10d", "IMPL")
    with contextlib.ExitStack() as stack:
        # deregisters the kernels; without it they would stay as long as the process
        stack.callback(library._destroy)
        for name in OPERATORS:
            if operator := getattr(torch.ops.c10d, name, None):  # torch 2.11 lacks some
                library.impl(name, _kernel(operator.default), "BackendSelect", with_keyset=True)
        yield


def _kernel(operator) -> Callable:
    """A kernel of the operator that runs the functions, then the backend's kernel. BackendSelect is
    the last key before the backend's own: autograd and dispatch modes have had their turn."""
    # Argument names differ in spelling from operator to operator (asyncOp, async_op), so they are
    # compared in lower case and without underscores.
    name = operator._schema.name.removeprefix("c10d::")
    names = [argument.name.lower().replace("_", "") for argument in operator._schema.arguments]

    def kernel(keyset, *args, **kwargs):
        # `redispatch` gives the interpreter's lock (GIL) free, the kernels that
        # torch.library.get_kernel returns do not: then a thread of gloo that drops the last tensor
        # of a collective has gloo's lock and waits for Python's, this one has it and waits for
        # gloo's, and the rank stands still for ever.
        issue = partial(operator.redispatch, keyset.remove(DispatchKey.BackendSelect), *args,
                        **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        boxed = given.get("processgroup")
        group = dist.ProcessGroup.unbox(boxed) if boxed is not None else None
        collective = issued(name, args, group.size() if group is not None else 1,
                            bool(given.get("asyncop", True)), _members(group),
                            given.get("dst", given.get("src")))
        for function in tuple(_around):
            # Each wraps what stands before it: the last of the list runs outermost, and first.
            issue = partial(function, collective, issue)
        return issue()

    return kernel


def _members(group) -> tuple[int, ...]:
    """The ranks of a group that torch.distributed made, by their numbers among all ranks."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, AttributeError):  # none, or one that somebody made without torch's registry
        return ()


def issued(operator: str, args: tuple, ranks: int, asynchronous: bool,
           members: tuple[int, ...] = (), peer: int | None = None) -> IssuedCollective:
    """Returns the collective that an operator is called for with these arguments."""
    kind, outputs, inputs = OPERATORS[operator]
    return IssuedCollective(
        operator, kind, [] if outputs is None else _tensors(args[outputs]),
        [] if inputs is None else _tensors(args[inputs]), ranks,
        # monitored_barrier blocks, although its operator has no asyncOp.
        asynchronous and operator != "monitored_barrier_"
        and not (kind in _BLOCKING and _inside_blocking_call()), members, peer,
        _input_splits(args) if operator == "alltoall_base_" else ())


def _input_splits(args) -> tuple[int, ...]:
    """The last list of numbers among an all-to-all's arguments; the output's stands before it."""
    return next((tuple(value) for value in reversed(args) if isinstance(value, list | tuple)
                 and all(isinstance(number, int) for number in value)), ())


def _tensors(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _inside_blocking_call() -> bool:
    """Whether dist.send or dist.recv calls: they reach the same operator as isend and irecv."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _BLOCKING and code.co_filename == distributed_c10d.__file__:
            return True
        frame = frame.f_back
    return False
