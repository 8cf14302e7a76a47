"""Sees every collective of this process as it is issued, by whatever API and on whatever thread.

All APIs of torch.distributed (functions, lists, coalesced and object collectives, functional
collectives, DTensor, the C++ of DDP) end in an operator of the namespace c10d. Each of these gets a
kernel here that the dispatcher runs before the backend's. A dispatch mode would not do: it is
switched off inside functional collectives, and other threads do not have it. What is called on a
Backend object itself reaches no operator, so those methods are replaced as well.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C import DispatchKey
from torch._C import _distributed_c10d as c10d
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
# Methods of a Backend object that are not called as the operator without its last underscore.
_METHODS = {"send": "send", "barrier": "barrier", "recv_any_source_": "recv_anysource"}
_BLOCKING = ("send", "recv")  # the functions that wait themselves; isend and irecv do not


@dataclass(frozen=True)
class IssuedCollective:
    """One collective at the moment at which it is issued.

    operator: torch's internal name, such as _allgather_base_. outputs, inputs: its tensors; the
    same ones where it works in place. ranks: of its process group. asynchronous: whether the call
    returns before the collective is done.
    """

    operator: str
    kind: str
    outputs: list[torch.Tensor] = field(repr=False)
    inputs: list[torch.Tensor] = field(repr=False)
    ranks: int
    asynchronous: bool


class CollectiveObserver:
    """`with observer:` calls its methods for every collective of this process."""

    def __enter__(self):
        if not _observers:
            _hooks.enter_context(_installed())
        _observers.append(self)
        return self

    def __exit__(self, *exception):
        _observers.remove(self)
        if not _observers:
            _hooks.close()

    def before(self, collective: IssuedCollective) -> None:
        """Called before it is issued; what it raises, the student's call raises."""

    def after(self, collective: IssuedCollective, work: dist.Work | None) -> None:
        """Called when it has been issued. work: its handle, the very object that an asynchronous
        call returns to Python as long as somebody holds it."""


_observers: list[CollectiveObserver] = []
_hooks = contextlib.ExitStack()


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    library = torch.library.Library("c10d", "IMPL")
    with contextlib.ExitStack() as stack:
        # deregisters the kernels; without it they would stay as long as the process
        stack.callback(library._destroy)
        for name in OPERATORS:
            if operator := getattr(torch.ops.c10d, name, None):  # torch 2.11 lacks some
                library.impl(name, _kernel(operator.default), "BackendSelect", with_keyset=True)
            method = _METHODS.get(name, name.removesuffix("_"))
            if original := getattr(c10d.Backend, method, None):
                stack.enter_context(mock.patch.object(c10d.Backend, method,
                                                      _method(name, original)))
        yield


def _kernel(operator) -> Callable:
    """A kernel of the operator that tells the observers, then runs the backend's. BackendSelect is
    the last key before the backend's own: autograd and dispatch modes have had their turn."""
    name = operator._schema.name.removeprefix("c10d::")
    names = [argument.name.lower().replace("_", "") for argument in operator._schema.arguments]

    def kernel(keyset, *args, **kwargs):
        given = dict(zip(names, args, strict=False)) | kwargs
        group = given.get("processgroup")
        return _observed(
            name, args, dist.ProcessGroup.unbox(group).size() if group is not None else 1,
            bool(given.get("asyncop", True)) and name != "monitored_barrier_",
            lambda: operator.redispatch(keyset.remove(DispatchKey.BackendSelect), *args, **kwargs))

    return kernel


def _method(name, original) -> Callable:
    """The method of a Backend object that tells the observers, then runs the original."""
    def method(backend, *args, **kwargs):
        # by keyword they come in any order, and the outputs' names begin so
        named = sorted(kwargs, key=lambda key: (not key.startswith("output"), "tensor" not in key))
        given = [*args, *(kwargs[key] for key in named)]
        is_async = all(getattr(value, "asyncOp", True) for value in given)
        return _observed(name, given, backend.size(), is_async and name != "monitored_barrier_",
                         lambda: original(backend, *args, **kwargs))

    return method


def _observed(name, args, ranks, asynchronous, issue) -> Any:
    kind, outputs, inputs = OPERATORS[name]
    collective = IssuedCollective(
        name, kind, [] if outputs is None else _tensors(args[outputs]),
        [] if inputs is None else _tensors(args[inputs]), ranks,
        asynchronous and not (kind in _BLOCKING and _inside_blocking_call()))
    for observer in tuple(_observers):
        observer.before(collective)
    result = issue()
    work = result[-1] if isinstance(result, tuple) else result
    if isinstance(work, torch.ScriptObject):
        work = dist.Work.unbox(work)
    for observer in tuple(_observers):
        observer.after(collective, work)
    return result


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
