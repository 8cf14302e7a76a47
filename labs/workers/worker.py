"""What a worker process does: become a rank, run the function, send back what it returned."""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field

import cloudpickle

from labs.workers import collective_matching, memory, pickling, results, source_lines
from labs.workers.channel import Channel
from labs.workers.heartbeat import Watch

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Orders:
    """What one rank needs to know. rendezvous: path of the file the ranks meet in."""

    rank: int
    ranks: int
    backend: str
    device: str
    threads: int
    rendezvous: str
    verify: bool
    memory_limit: int = None
    environment: dict = field(repr=False, default_factory=dict)


def main(orders, connection, output):
    """The process's whole life. It never leaves by itself, so that no peer sees it vanish: the
    caller ends it when all ranks are done."""
    _leave_with_caller()
    _redirect(output)
    _tell_stack()
    channel = Channel(connection, orders.rank)
    channel.open()
    try:
        fn_and_args = connection.recv_bytes()
        watch = Watch(channel)
        watch.start()
        _become(orders, channel)
        fn, args = pickling.unpack(fn_and_args)
        del fn_and_args
        if orders.memory_limit:
            memory.limit(orders.memory_limit, orders.device)
        packed = pickling.pack_result(fn(*args))
        _flush()
        results.send(channel, watch.progress(), packed)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are outcomes too
        memory.lift()
        _flush()
        channel.send("failed", _described(error, orders))
    threading.Event().wait()


def _leave_with_caller():
    """Own session, deaf to Ctrl-C, killed when the fork server goes (it goes with the caller)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    try:  # while a worker holds this end open, the fork server does not notice that we are gone
        from multiprocessing.forkserver import _forkserver

        if _forkserver._forkserver_alive_fd is not None:
            os.close(_forkserver._forkserver_alive_fd)
            _forkserver._forkserver_alive_fd = None
    except (ImportError, AttributeError, OSError):
        pass


def _redirect(output):
    """Everything this process prints, C++ included, goes to the caller, line by line."""
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stdin = _NoKeyboard()


def _tell_stack():
    """A crash, and the caller's question when nothing else is answered, print the stack of every
    thread. C code does it, so it works also while C++ holds the interpreter."""
    faulthandler.enable(file=2)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=2)


class _NoKeyboard:
    def readline(self, *_):
        raise RuntimeError("a rank has no keyboard: ask in the notebook, and pass the answer "
                           "as an argument to launch")

    read = fileno = readline

    def close(self):
        """multiprocessing closes it in children of the rank, such as those of a DataLoader."""


def _become(orders, channel):
    """Environment, threads, device and process group of this rank."""
    os.environ.clear()
    os.environ.update(orders.environment)
    os.environ.update(
        RANK=str(orders.rank), LOCAL_RANK=str(orders.rank), WORLD_SIZE=str(orders.ranks),
        LOCAL_WORLD_SIZE=str(orders.ranks), LABS_RANK=str(orders.rank), LABS_DEVICE=orders.device,
        GLOO_SOCKET_IFNAME=LOOPBACK, NCCL_SOCKET_IFNAME=f"={LOOPBACK}",
        OMP_NUM_THREADS=str(orders.threads), TORCH_FR_BUFFER_SIZE="256")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(orders.threads)
    if orders.device != "cpu":
        torch.cuda.set_device(orders.device)
    _quieten(channel)
    multiprocessing.set_start_method(None, force=True)  # a DataLoader starts its own as elsewhere
    sys.dont_write_bytecode = True  # two edits of a module within a second look alike to it
    dist.init_process_group(orders.backend, rank=orders.rank, world_size=orders.ranks,
                            store=dist.FileStore(orders.rendezvous, orders.ranks))
    if orders.verify:
        collective_matching.tell(channel)


def _quieten(channel):
    # torch 2.13 warns once per rank that these collectives were renamed; 2.11 has no other names.
    warnings.filterwarnings("ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor).*")
    usual = warnings.showwarning

    def show(message, category, filename, lineno, file=None, line=None):
        if file is not None:
            return usual(message, category, filename, lineno, file, line)
        place = source_lines.Place(filename, lineno, "")
        channel.send("warning", (f"{category.__name__}: {message}", place))

    warnings.showwarning = show


def _described(error, orders) -> dict:
    """An exception as plain data, and itself where it can travel."""
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be shown: {type(another).__name__})"
    try:
        packed = cloudpickle.dumps(error)
    except Exception:
        packed = None
    stack = source_lines.traceback_of(error)
    return {"error": packed, "error_type": type(error).__name__, "message": message,
            "shortage": memory.shortage(error, message, orders.memory_limit),
            "stack": [place for place in stack if place.filename != __file__] or stack,
            "traceback": "".join(traceback.format_exception(error)), "at": time.time()}


def _flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
