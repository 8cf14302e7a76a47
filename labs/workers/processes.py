"""Starts fresh processes fast: a fork server that has imported the third-party packages once."""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
import unittest.mock
from itertools import count
from multiprocessing import util

import torch.multiprocessing as mp

from labs.workers.failures import LaunchError
from labs.workers.interrupts import held

PRELOAD = ["labs.workers.forkserver_cleanup", "labs.workers.forkserver_preload"]

_lock = threading.RLock()
_number = count()


def start_method() -> str:
    """`forkserver`, or `spawn` where the platform has none or LABS_START_METHOD says so."""
    chosen = os.environ.get("LABS_START_METHOD")
    available = multiprocessing.get_all_start_methods()
    return chosen or ("forkserver" if "forkserver" in available else "spawn")


def context():
    """The multiprocessing context that ranks are started from."""
    return mp.get_context(start_method())


def warm_up() -> None:
    """Starts the fork server and returns at once; the imports go on in the background."""
    if start_method() != "forkserver":
        return
    # No preloaded module may touch the CUDA driver, or the workers could not use it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ["LABS_HOME"] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from multiprocessing import forkserver

    with _lock, _main_hidden(), held():
        private_directory()
        context().set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


def start(target, args):
    """A started process running `target(*args)`; it will not import the caller's script."""
    warm_up()
    with _lock, _main_hidden(), _unbroken():
        process = context().Process(target=target, args=args)
        process.start()
    return process


@contextlib.contextmanager
def _unbroken():
    """Keeps interrupts out while a process is asked for: half asked for, it would wait for the
    other half for ever. They may come while the fork server, which may still import, is waited for.
    """
    from multiprocessing import forkserver

    with held() as released:
        answer = forkserver.read_signed

        def read_signed(fd):
            with released():
                return answer(fd)

        with unittest.mock.patch.object(forkserver, "read_signed", read_signed):
            yield


def private_directory() -> str:
    """This process's directory for sockets and rendezvous files: mode 0700, gone when the process
    is. Where /tmp is full it is made elsewhere."""
    try:
        return util.get_temp_dir()
    except OSError:
        return _elsewhere()


def _elsewhere() -> str:
    usual, tempfile.tempdir = tempfile.tempdir, None
    try:
        for tempfile.tempdir in ("/dev/shm", "/var/tmp", os.path.expanduser("~"), os.getcwd()):
            with contextlib.suppress(OSError):
                return util.get_temp_dir()
    finally:
        tempfile.tempdir = usual
    raise LaunchError(f"there is no room left in {tempfile.gettempdir()}, nor anywhere else where "
                      "ranks could meet: delete something there")


@contextlib.contextmanager
def rendezvous():
    """The path of an empty file in which ranks meet; on Linux it is in memory, on no disk."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("rendezvous")
        try:
            yield f"/proc/{os.getpid()}/fd/{file}"
        finally:
            os.close(file)
        return
    path = os.path.join(private_directory(), f"rendezvous-{os.getpid()}-{next(_number)}")
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


@contextlib.contextmanager
def _main_hidden():
    """multiprocessing would run the caller's script again in each worker to import it as main;
    functions of main travel by value, so nothing needs that."""
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__")
              if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)
