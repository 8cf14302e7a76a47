"""Sees every collective of this process as it is issued, by whatever API and on whatever thread:
those that reach an operator of torch, and those that are called on a Backend object itself, whose
methods are replaced."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from labs.workers.collective_kernels import (
    OPERATORS,
    IssuedCollective,
    around_collectives,
    issued,
)

# Methods of a Backend object that are not called as the operator without its last underscore.
_METHODS = {"send": "send", "barrier": "barrier", "recv_any_source_": "recv_anysource"}


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
    with contextlib.ExitStack() as stack:
        stack.enter_context(around_collectives(_observed))
        for name in OPERATORS:
            method = _METHODS.get(name, name.removesuffix("_"))
            if original := getattr(c10d.Backend, method, None):
                stack.enter_context(mock.patch.object(c10d.Backend, method,
                                                      _method(name, original)))
        yield


def _method(name, original) -> Callable:
    """The method of a Backend object that tells the observers, then runs the original."""
    def method(backend, *args, **kwargs):
        # by keyword they come in any order, and the outputs' names begin so
        named = sorted(kwargs, key=lambda key: (not key.startswith("output"), "tensor" not in key))
        given = (*args, *(kwargs[key] for key in named))
        is_async = all(getattr(value, "asyncOp", True) for value in given)
        return _observed(issued(name, given, backend.size(), is_async),
                         lambda: original(backend, *args, **kwargs))

    return method


def _observed(collective, issue) -> Any:
    for observer in tuple(_observers):
        observer.before(collective)
    result = issue()
    # Operators return (tensors, Work) or the Work alone.
    work = result[-1] if isinstance(result, tuple) else result
    # A kernel gets the Work as a boxed TorchScript object; unbox returns the object that Python
    # has.
    if isinstance(work, torch.ScriptObject):
        work = dist.Work.unbox(work)
    for observer in tuple(_observers):
        observer.after(collective, work)
    return result
