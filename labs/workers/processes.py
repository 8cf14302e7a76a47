"""Starts fresh processes fast, through a fork server that has imported the third-party packages
once, and keeps interrupts out of the moments in which they would break something."""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing import util
from unittest import mock

import torch.multiprocessing as mp

from labs.workers.failures import LaunchError
from labs.workers.progress import status

PRELOAD = ["labs.workers.forkserver_preload"]
ANSWERS_AFTER = 300.0  # seconds; on a busy machine the server imports torch for a minute

_lock = threading.RLock()
_answered = False  # whether the fork server has started a process
_number = count()


def start_method() -> str:
    """`forkserver`, or `spawn` where the platform has none or LABS_START_METHOD says so."""
    chosen = os.environ.get("LABS_START_METHOD")
    available = multiprocessing.get_all_start_methods()
    return chosen or ("forkserver" if "forkserver" in available else "spawn")


def context() -> multiprocessing.context.BaseContext:
    """The multiprocessing context that ranks are started from."""
    return mp.get_context(start_method())


def warm_up() -> None:
    """Starts the fork server and returns at once; its imports continue in the background."""
    if start_method() != "forkserver":
        return
    # A preloaded module that touched the CUDA driver would leave its context to all forks, which
    # could then not use a GPU: torch must count GPUs through NVML.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ["LABS_HOME"] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from multiprocessing import forkserver, resource_tracker

    with status("starting the process that ranks are forked from"), _lock, _main_hidden(), \
            deferred():
        private_directory()
        with mock.patch.object(util, "spawnv_passfds", _spawn_in_own_session):
            resource_tracker.ensure_running()
        # The server reads the list only when it starts: later calls change nothing.
        context().set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()


def _spawn_in_own_session(path, args, passfds) -> int:
    """In place of multiprocessing's function, for its resource tracker. That process ignores
    SIGTERM, and a kernel that is shut down waits 29 s for such children in its process group."""
    process = subprocess.Popen(args, executable=path, pass_fds=passfds, start_new_session=True)
    process.returncode = 0  # multiprocessing waits for it, not this object
    return process.pid


def start(target: Callable, args: tuple) -> multiprocessing.process.BaseProcess:
    """A started process running `target(*args)`; it will not import the caller's script. Raises
    LaunchError where the fork server has not answered after ANSWERS_AFTER seconds."""
    global _answered
    warm_up()
    process = context().Process(target=target, args=args)
    try:
        with _lock, _main_hidden(), _uninterrupted_request():
            process.start()
            _answered = True
            # Each start asks all processes in this private set whether they have ended. Another
            # thread's may be closed at that moment, and its exit code is there to be read once.
            multiprocessing.process._children.discard(process)
    except BaseException:
        if process.pid:  # interrupted when it had started: the caller knows nothing of it
            process.kill()
        raise
    return process


def server_starts() -> bool:
    """Whether the fork server still imports what ranks share: it has started no process yet."""
    return start_method() == "forkserver" and not _answered


@contextlib.contextmanager
def _uninterrupted_request():
    """Defers interrupts while the fork server is asked for a process: a fork that got half of the
    request would wait for the other half for ever. Only while we wait for the answer, which takes
    seconds if the server still imports torch, an interrupt is raised at once; and a server that
    does not answer is stopped, so that the next request starts another one."""
    from multiprocessing import connection, forkserver

    with deferred() as released:
        read_answer = forkserver.read_signed

        def read_signed(fd):
            with released():
                answered = connection.wait([fd], ANSWERS_AFTER)
            if not answered:
                _stop_server(forkserver._forkserver)
                raise LaunchError("the process that ranks are forked from has not answered for "
                                  f"{ANSWERS_AFTER:g} s, and was stopped: launch again")
            return read_answer(fd)

        with mock.patch.object(forkserver, "read_signed", read_signed):
            yield


def _stop_server(server):
    global _answered
    _answered = False
    with contextlib.suppress(ProcessLookupError):
        os.kill(server._forkserver_pid, signal.SIGKILL)
    with contextlib.suppress(OSError):  # its socket may have gone
        server._stop()


def private_directory() -> str:
    """This process's directory for sockets and rendezvous files: mode 0700, removed when the
    process ends. Where /tmp is full it is made elsewhere. Raises LaunchError if no room is left."""
    with contextlib.suppress(OSError):
        return util.get_temp_dir()
    for directory in ("/dev/shm", "/var/tmp", os.path.expanduser("~"), os.getcwd()):
        with contextlib.suppress(OSError), mock.patch.object(tempfile, "tempdir", directory):
            return util.get_temp_dir()
    raise LaunchError(f"there is no room left in {tempfile.gettempdir()}, nor anywhere else where "
                      "ranks could meet: delete something there")


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """Yields the path of a new folder, which is removed when the block exits. Where this process is
    killed, the fork server removes it."""
    # What was started here may write until it is killed: that must not hide how it ended.
    with tempfile.TemporaryDirectory(dir=private_directory(),
                                     ignore_cleanup_errors=True) as folder:
        yield folder


@contextlib.contextmanager
def rendezvous() -> Iterator[str]:
    """Yields the path of an empty file in which ranks meet; on Linux it is in memory, on no disk.
    A file, because torch's TCP store would listen on all interfaces, without authorization."""
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


def free_port() -> int:
    """A port of the loopback interface on which nothing listens now. It is none of those that the
    system hands out by itself, from 32768 on: another process could get it in the meantime."""
    for port in [*random.sample(range(20_000, 32_768), 20), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise LaunchError("no port of the loopback interface is free")


@contextlib.contextmanager
def _main_hidden():
    """multiprocessing would run the caller's script again in each process to import it as main;
    functions of main are sent by value, so nothing needs that."""
    # Not mock.patch.dict: at its end that clears and refills main, under the feet of other threads.
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__")
              if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


@contextlib.contextmanager
def deferred() -> Iterator[Callable]:
    """Defers SIGINT until the block exits, where KeyboardInterrupt is raised; `with released():`,
    of what it yields, re-enables it inside. Threads other than the main one never get a SIGINT."""
    if threading.current_thread() is not threading.main_thread():
        yield contextlib.nullcontext
        return
    # Not signal.pthread_sigmask: another thread, of which a kernel has many, would take the signal,
    # and Python would run the handler in the main thread all the same.
    received = []

    def defer(*_):
        received.append(True)

    before = signal.signal(signal.SIGINT, defer)
    before = signal.SIG_DFL if before is None else before  # None: a handler installed from C

    @contextlib.contextmanager
    def released():
        signal.signal(signal.SIGINT, before)
        try:
            if received:
                raise KeyboardInterrupt
            yield
        finally:
            signal.signal(signal.SIGINT, defer)

    try:
        yield released
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        raise KeyboardInterrupt
