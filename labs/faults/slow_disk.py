"""Disks that are slow on purpose: one that waits until it is let go, one of few bytes per second;
and threads that begin late."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import psutil

RELEASE_AFTER = 5.0  # seconds after which what waits to be let go on goes on


class HeldDisk:
    """write(path, data) that ends when the disk has been opened; after RELEASE_AFTER seconds all
    the same.

    started, done: the paths of the writes that have begun, and of those that have ended. at_once:
    the most that were in flight together. in_caller: whether the thread that made this disk wrote
    itself; that is not made to wait. error: what a write raises in place of writing.
    """

    def __init__(self, error: Exception | None = None):
        self.error, self.started, self.done, self.at_once = error, [], [], 0
        self.in_caller, self.not_bytes = False, None
        self._caller, self._lock, self._in_flight = threading.get_ident(), threading.Lock(), 0
        self._is_open, self._begun, self._ended = (threading.Event() for _ in range(3))

    def __call__(self, path, data):
        with self._lock:
            self.started.append(Path(path))
            self._in_flight += 1
            self.at_once = max(self.at_once, self._in_flight)
        self._begun.set()
        try:
            self._write(path, data)
        finally:
            with self._lock:
                self._in_flight -= 1
                self.done.append(Path(path))
            self._ended.set()

    def _write(self, path, data):
        if threading.get_ident() == self._caller:
            self.in_caller = True
        else:
            self._is_open.wait(RELEASE_AFTER)
        if self.error is not None:
            raise self.error
        if not isinstance(data, bytes | bytearray | memoryview):
            self.not_bytes = type(data).__name__
        else:
            Path(path).write_bytes(data)

    def open(self) -> None:
        """Lets all writes continue."""
        self._is_open.set()

    def wait_until_started(self) -> bool:
        """Whether a write has begun by now, or within RELEASE_AFTER seconds."""
        return self._begun.wait(RELEASE_AFTER)

    def wait_until_done(self) -> bool:
        """Whether a write has ended by now, or within RELEASE_AFTER seconds."""
        return self._ended.wait(RELEASE_AFTER)

    @contextlib.contextmanager
    def opening_after(self, seconds: float, before: Callable[[], None] = lambda: None
                      ) -> Iterator[None]:
        """In the block, another thread calls before() and opens the disk after so many seconds."""
        def opens():
            before()
            self.open()

        timer = threading.Timer(seconds, opens)
        timer.start()
        try:
            yield
        finally:
            timer.join()


@contextlib.contextmanager
def late_threads() -> Iterator[threading.Event]:
    """Threads that are started in the block do nothing until the event that it yields is set, or
    RELEASE_AFTER seconds have passed: as where the machine has no core for them."""
    event, start = threading.Event(), threading.Thread.start

    def started(thread):
        run = thread.run

        def late():
            event.wait(RELEASE_AFTER)
            run()

        # On the instance: threading calls self.run() in the new thread.
        thread.run = late
        start(thread)

    with mock.patch.object(threading.Thread, "start", started):
        try:
            yield event
        finally:
            event.set()


class SlowDisk:
    """write(path, data) as the function that it is given, on a disk of `bandwidth` bytes per
    second."""

    def __init__(self, write: Callable, bandwidth: float):
        self._write, self._bandwidth = write, bandwidth

    def __call__(self, path, data):
        ends = time.monotonic() + len(data) / self._bandwidth
        self._write(path, data)
        time.sleep(max(0.0, ends - time.monotonic()))


def resident_bytes() -> int:
    """Bytes of memory that this process really has, mapped files left out where Linux tells."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith("RssAnon")).split()[1])
    return psutil.Process(os.getpid()).memory_info().rss
