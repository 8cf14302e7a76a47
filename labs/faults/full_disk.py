"""A disk that is full: a small one in memory, which only one process sees; or, where the system
refuses that, a limit on the size of files."""

import contextlib
import ctypes
import os
import pickle
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

_NEW_USER, _NEW_MOUNTS, _RECURSIVE, _PRIVATE = 0x10000000, 0x20000, 0x4000, 0x40000  # Linux's flags
SMALL_DISK, LIMITED_FILES = "a disk of {:.1f} MB", "a limit of {:.1f} MB on the size of files"


def on_full_disk(fn: Callable[[Callable[[], AbstractContextManager]], Any], folder: str,
                 size: int, room: int) -> tuple[Any, str]:
    """Runs fn(full) in a forked process that has a disk of `size` bytes at `folder`; returns what
    fn returned, and in words which kind of full disk it was. Raises what fn raised.

    `with full():` is where fn must meet the full disk. On the small disk it changes nothing: fn
    fills it. Where the system refuses such a disk, no file can become larger than `room` bytes
    inside. Disk and files are gone with the process.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        pid = os.fork()
    # A fork, so that a mount or a limit, which a process cannot take back, ends with it.
    if not pid:
        os.close(reading)
        _in_the_fork(fn, folder, size, room, writing)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            data = pipe.read()
    finally:
        os.waitpid(pid, 0)
    # The fork ended before it wrote anything: it was killed, or pickling raised.
    if not data:
        raise OSError("the process with the full disk has ended without a word")
    raised, value, kind = pickle.loads(data)
    if raised is not None:
        raise raised
    return value, kind


def _in_the_fork(fn, folder, size, room, writing):
    """Never returns: what follows is the other process's."""
    try:
        raised = value = None
        has_disk = _mount(folder, size)
        kind = SMALL_DISK.format(size / 1e6) if has_disk else LIMITED_FILES.format(room / 1e6)
        try:
            value = fn(contextlib.nullcontext if has_disk else lambda: no_room_beyond(room))
        except Exception as error:
            raised = error
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps((raised, value, kind)))
    finally:
        # Not sys.exit: handlers and threads of the parent are no business of this copy.
        os._exit(0)


def _mount(folder, size) -> bool:
    """Mounts a file system of `size` bytes in memory, in namespaces of this process's own; False
    where the system refuses."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_MOUNTS):  # root may; an ordinary user needs a user namespace
        if libc.unshare(_NEW_USER | _NEW_MOUNTS):
            return False
        try:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"0 {user} 1")
            _write("/proc/self/gid_map", f"0 {group} 1")
        except OSError:  # without them no file could be made on the new disk
            return False
    # private: or the machine would see the new disk too
    if libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None):
        return False
    return not libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode())


def _write(path, text):
    with open(path, "w") as file:
        file.write(text)


@contextlib.contextmanager
def no_room_beyond(size: int) -> Iterator[None]:
    """In the block, no file of this process can become larger than `size` bytes: writing more
    raises OSError, as on a full disk. Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
