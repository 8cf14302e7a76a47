"""Sees where this process waits for collectives, by whatever API.

Seen are `wait` and `synchronize` of a Work, `wait` of its future and of futures made from that by
`then` or collect_all, `wait_tensor` and so each use of an AsyncCollectiveTensor, and polls by
`is_completed` or `done`. What C++ waits for by itself, as DDP's reducer does, is not.
"""

import contextlib
import weakref
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch._C import DispatchKey

# what is waited for: the handle, or the output of a functional collective
Waited = dist.Work | torch.Tensor

_BLOCKING = ("wait", "synchronize", "block_current_stream")


class WaitObserver:
    """`with observer:` calls its methods for every wait of this process."""

    def __enter__(self):
        if not _observers:
            _hooks.enter_context(_installed())
        _observers.append(self)
        return self

    def __exit__(self, *exception):
        _observers.remove(self)
        if not _observers:
            _hooks.close()

    def wait_begins(self, waited: Waited) -> None:
        """Called before a wait for `waited`."""

    def wait_ended(self, waited: Waited) -> None:
        """Called when the wait is over."""

    def hides_completion(self, work: dist.Work) -> bool:
        """Called where `work` is polled; True makes the poll say that it is not done yet."""
        return False


_observers: list[WaitObserver] = []
_hooks = contextlib.ExitStack()
# Future -> the handles it belongs to. Weak: a future keeps its result's memory.
_works: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    library = torch.library.Library("_c10d_functional", "IMPL")
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        # At BackendSelect, and with `redispatch`, for the reason in
        # labs/workers/collective_kernels.py.
        library.impl("wait_tensor", _wait_tensor, "BackendSelect", with_keyset=True)
        for name in _BLOCKING:
            if hasattr(dist.Work, name):
                _replace(stack, dist.Work, name, _blocking, lambda work: [work])
        _replace(stack, dist.Work, "is_completed", _polling, lambda work: [work])
        _replace(stack, torch._C.Future, "wait", _blocking, _works_of)
        _replace(stack, torch._C.Future, "done", _polling, _works_of)
        _replace(stack, torch._C.Future, "then", _deriving, _works_of)
        _replace(stack, dist.Work, "get_future", _deriving, lambda work: [work])
        _replace(stack, torch._C, "_collect_all", _deriving,
                 lambda futures: [work for future in futures for work in _works_of(future)])
        yield


def _replace(stack, owner, name, wrapper, works_of):
    changed = wrapper(getattr(owner, name), works_of)
    stack.enter_context(mock.patch.object(owner, name, changed))


def _works_of(future) -> list[dist.Work]:
    return _works.get(future, [])


def _blocking(original, works_of):
    def wait(self, *args, **kwargs):
        with _waiting(works_of(self)):
            return original(self, *args, **kwargs)

    return wait


def _polling(original, works_of):
    def poll(self):
        works = works_of(self)
        hidden = [o.hides_completion(work) for work in works for o in tuple(_observers)]
        if any(hidden) or not original(self):
            return False
        for work in works:
            _tell("wait_ended", work)
        return True

    return poll


def _deriving(original, works_of):
    def derive(self, *args, **kwargs):
        future = original(self, *args, **kwargs)
        _works[future] = works_of(self)
        return future

    return derive


def _wait_tensor(keyset, tensor):
    with _waiting([tensor]):
        return torch.ops._c10d_functional.wait_tensor.default.redispatch(
            keyset.remove(DispatchKey.BackendSelect), tensor)


@contextlib.contextmanager
def _waiting(waited):
    for one in waited:
        _tell("wait_begins", one)
    yield
    for one in waited:
        _tell("wait_ended", one)


def _tell(event, waited):
    for observer in tuple(_observers):
        getattr(observer, event)(waited)
