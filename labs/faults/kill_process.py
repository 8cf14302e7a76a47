"""A process that writes one version after the other until it is killed with SIGKILL, at a moment
that it cannot know."""

import contextlib
import itertools
import os
import select
import signal
import struct
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_VERSION = struct.Struct("<q")
_READY = -1
SYNCS = ("fsync", "fdatasync", "sync")
# Before each of these, a process is in a state of its own; pathlib and shutil call them too.
STEPS = ("fsync", "fdatasync", "replace", "rename", "link", "remove", "unlink", "truncate")
MAX_CALLS = 40  # calls of STEPS
STARTS = 20.0  # seconds that a process may take until it writes, on a busy machine


@dataclass(frozen=True)
class Killed:
    """What a killed process said: `acknowledged`, the last version whose write had returned (None
    if none had), and `raised`, the traceback of the write that ended it before the kill."""

    acknowledged: int | None
    raised: str = ""


def kill_while(write: Callable[[int], None], first: int, after: float) -> Killed:
    """Runs write(first), write(first + 1), … in a forked process and kills it `after` seconds.

    For a process without threads that matter: only what `write` needs works in the fork. Nothing is
    left of it, whatever `write` does. Nothing is synced: the kernel keeps what a killed process has
    written, and on a busy disk the kills would nearly all come while it waits for a sync.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads: gloo's are of no use to a fork that only
        # writes files.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _write_until_killed(write, first, reading, writing)
    os.close(writing)
    try:
        # The clock begins when the process says that it is ready: a fork may wait for a core.
        data = _read(reading, STARTS, enough=_VERSION.size)
        time.sleep(after if data else 0)
        os.kill(pid, signal.SIGKILL)
        data += _read(reading, STARTS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
    return _said(data)


def kill_at_steps(write: Callable[[], None]) -> Iterator[str]:
    """Runs write() in forked processes: the first is killed at its first call of one of STEPS, the
    next at its second one, and so on until one meets no kill. Yields each call's name, when its
    process is dead and the call has not been made."""
    for number in range(MAX_CALLS):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            _kill_at(number, write, writing)
        os.close(writing)
        try:
            name = _read(reading, STARTS).decode()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reading)
        if not name:
            return
        yield name


def _kill_at(number, write, writing):
    """In the fork. Never returns."""
    calls = itertools.count()

    def counted(name, function):
        def called(*args, **options):
            # The name is written before the kill: the parent yields it when the process is dead.
            if next(calls) == number:
                os.write(writing, name.encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return None if name in SYNCS else function(*args, **options)
        return called

    try:
        for name in filter(lambda name: hasattr(os, name), STEPS):
            setattr(os, name, counted(name, getattr(os, name)))
        write()
    finally:
        os._exit(0)


def _write_until_killed(write, first, reading, writing):
    """In the fork. Never returns: what follows is the other process's."""
    os.close(reading)
    try:
        for name in filter(lambda name: hasattr(os, name), SYNCS):
            setattr(os, name, lambda *_: None)
        os.write(writing, _VERSION.pack(_READY))
        version = first
        while True:
            write(version)
            os.write(writing, _VERSION.pack(version))
            version += 1
    except BaseException:
        os.write(writing, _VERSION.pack(-2) + traceback.format_exc()[-2000:].encode())
    finally:
        os._exit(1)


def _read(reading, seconds, enough=None) -> bytes:
    """What arrives until the pipe is closed, or until so many bytes are there."""
    data, until = b"", time.monotonic() + seconds
    while enough is None or len(data) < enough:
        ready, _, _ = select.select([reading], [], [], max(0.0, until - time.monotonic()))
        piece = os.read(reading, 65536) if ready else b""
        if not piece:
            break
        data += piece
    return data


def _said(data) -> Killed:
    acknowledged, raised = None, ""
    for at in range(0, len(data) - _VERSION.size + 1, _VERSION.size):
        # -1: ready; -2: a traceback follows; others: the version whose write has returned
        [version] = _VERSION.unpack_from(data, at)
        if version == -2:
            raised = data[at + _VERSION.size:].decode(errors="replace")
            break
        acknowledged = version if version >= 0 else acknowledged
    return Killed(acknowledged, raised)
