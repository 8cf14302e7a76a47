"""On a rank: notes when the main thread waits for other ranks, so that waiting can be told from
work, also while it is blocked in C++."""

import functools
import threading
import time
from collections.abc import Callable

import torch
from torch._C import _distributed_c10d as c10d

POLLED_AGAIN = 1.0  # seconds between two polls that belong to one wait
# torch's numbers (c10d::OpType) of what the flight recorder leaves out
_MESSAGES = {12: "send", 13: "recv", 14: "recv"}

_BLOCKING = [(c10d.Work, "wait"), (c10d.Work, "synchronize"), (c10d.Store, "wait"),
             (c10d.Store, "get"), (c10d.Store, "multi_get"), (c10d.Store, "barrier"),
             (c10d.Store, "queue_pop")]
_BLOCKING_IF_PENDING = [(torch._C.Future, "wait")]  # others have futures, too: rpc, for example
_POLLING = [(c10d.Work, "is_completed"), (torch._C.Future, "done")]


class MainThreadWaits:
    """What the main thread waits in.

    began: when the blocking call began that it is in, in monotonic seconds; None if it is in none.
    name: what it waits for, if that is a message or a key of a store, else "". needs_pending:
    whether the call waits for other ranks only if a collective has not finished yet.
    """

    def __init__(self):
        self.began: float | None = None
        self.name = ""
        self.needs_pending = False
        self._first_poll = self._last_poll = None

    @property
    def polling_since(self) -> float | None:
        """Since when it asks again and again whether something is done; None if it does not."""
        if self._last_poll is None or time.monotonic() - self._last_poll > POLLED_AGAIN:
            return None
        return self._first_poll

    def install(self) -> None:
        """From now on notes every wait of the main thread. Replaces methods of torch's classes:
        a thread that is blocked in C++ has no Python frame that would tell what it waits for."""
        for owner, name in _BLOCKING:
            store_call = f"store.{name}" if owner is c10d.Store else ""
            self._replace(owner, name, self._noting_wait, store_call, False)
        for owner, name in _BLOCKING_IF_PENDING:
            self._replace(owner, name, self._noting_wait, "", True)
        for owner, name in _POLLING:
            self._replace(owner, name, self._noting_poll)

    def _replace(self, owner, name, wrapper, *details):
        if function := getattr(owner, name, None):  # torch 2.11 lacks some of the store's
            setattr(owner, name, wrapper(function, *details))

    def _noting_wait(self, function, store_call, needs_pending) -> Callable:
        @functools.wraps(function)
        def wait(*args, **kwargs):
            if self.began is not None or not _in_main_thread():
                return function(*args, **kwargs)
            self.name, self.needs_pending = store_call or _message(args), needs_pending
            self.began = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                self.began = None

        return wait

    def _noting_poll(self, function) -> Callable:
        @functools.wraps(function)
        def poll(*args, **kwargs):
            done = function(*args, **kwargs)
            if _in_main_thread():
                now = time.monotonic()
                if self.polling_since is None:
                    self._first_poll = now
                self._last_poll = None if done else now
            return done

        return poll


def _message(args) -> str:
    try:
        return _MESSAGES.get(args[0]._get_op_type(), "")
    except (IndexError, AttributeError):
        return ""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
