"""The main function of a rank's process: join the group, run the function, send back the result."""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta

import cloudpickle

from labs.workers import (
    collective_matching,
    collectives,
    cuda,
    flight_recorder,
    heartbeat,
    memory,
    nccl,
    pickling,
    slow_link,
    source_lines,
    users_groups,
)
from labs.workers.channel import Channel
from labs.workers.outcomes import Kind

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# How long a collective may take before torch ends the rank; by default 10 minutes with NCCL and 30
# with gloo. Here a rank that computes is waited for without limit, and the caller finds hangs.
_NO_TIMEOUT = timedelta(days=1)
# gloo raises a plain RuntimeError when a peer has gone: only these words of it tell.
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe",
              "Connection refused", "Application timeout caused pair closure", "Socket closed",
              "failed to pass monitoredBarrier")

# Warnings of torch about its own work, which no line of a student's can change: (category, how the
# message begins). Shown all the same where a student's own line raises one.
_TORCHS_OWN = (
    # NCCL's barrier, on every rank: the current device is the right one here
    (UserWarning, r"barrier\(\): using the device under current"),
    # NCCL's send and recv: that each pair of ranks connects once
    (UserWarning, r"An unbatched P2P op \(send/recv\) was called"),
    # FSDP2, of each forward of a model that returns views, as those of transformers do: that it
    # would be wrong to change them in place
    (UserWarning, r"FSDP2-wrapped module \(.*\) returned a view tensor"),
)

# torch 2.13 warns that these two were renamed (labs/workers/collectives.py).
_RENAMED = re.compile("(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated")


@dataclass(frozen=True)
class RankConfig:
    """What one rank needs to know before its function. threads: intra-op threads. rendezvous: path
    of the file in which the ranks meet. port: a free one, for what the function may want to start.
    memory_limit: bytes, or None. link: what slows the collectives down, or None."""

    rank: int
    ranks: int
    backend: str
    device: str
    threads: int
    rendezvous: str
    port: int
    verify: bool
    memory_limit: int | None = None
    link: "slow_link.Link | None" = None
    environment: dict[str, str] = field(repr=False, default_factory=dict)


def main(config: RankConfig, connection, output) -> None:
    """Runs the rank. It never returns: a process that ended would close its connections, and the
    other ranks would fail. The caller kills it when all ranks are done."""
    # First, because everything after it may block.
    die_with_caller()
    _redirect(output)
    # After _redirect: the dumps go to the caller through descriptor 2, which was replaced there.
    _enable_stack_dumps()
    channel = Channel(connection, config.rank)
    channel.activate()
    try:
        # Received as bytes and unpacked only when the process group is up: unpacking imports
        # modules that may ask for the rank, and an exception in it is reported like one of the
        # function.
        packed = connection.recv_bytes()
        thread = heartbeat.Heartbeat(channel, config.backend)
        # Before the group is joined, so that a rank that waits there for others is seen to wait.
        thread.start()
        _join_group(config, channel)
        channel.send("began")
        fn, args = pickling.unpack(packed)
        del packed  # it may be large, and the memory limit counts from here
        if config.memory_limit:
            memory.limit(config.memory_limit, config.device)
        with slow_link.slow_link(config.link) if config.link else contextlib.nullcontext():
            result = pickling.pack_result(fn(*args))
        _flush()
        pickling.send_result(channel, thread.final_progress(), result)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are outcomes too
        # Before anything is allocated here: under a limit that was reached, str(error) could fail.
        memory.lift()
        _flush()
        # no destroy_process_group here: after an error it can deadlock
        channel.send("exception", _outcome_fields(error, config))
    # The connections stay open until the caller kills this process.
    threading.Event().wait()


def die_with_caller() -> None:
    """Starts a session of its own, ignores Ctrl-C, and asks to be killed when the fork server ends
    (which ends with the caller): a process that is blocked in gloo's C++ would not notice."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setsid"):
        os.setsid()
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # While a rank holds this pipe open, the fork server does not notice that its caller has ended.
    # Private names of multiprocessing.
    with contextlib.suppress(ImportError, AttributeError, OSError):
        from multiprocessing.forkserver import _forkserver

        if _forkserver._forkserver_alive_fd is not None:
            os.close(_forkserver._forkserver_alive_fd)
            _forkserver._forkserver_alive_fd = None


def _redirect(output):
    """Sends everything that this process prints, C++ included, to the caller, line by line. Over a
    pipe it appears in the cell under every front end; ipykernel's own capture of what child
    processes print is off under nbval."""
    # The descriptors are replaced, not only sys.stdout, so that C++'s output is caught too.
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stdin = _NoKeyboard()


def _enable_stack_dumps():
    """Makes a crash print the stack of every thread, and SIGUSR1 too. faulthandler does it in C, so
    it works also while C++ code holds the interpreter."""
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


def _join_group(config, channel):
    """Sets environment, threads and device of this rank, and initializes its process group."""
    os.environ.clear()  # the fork server has the environment of the time when it was started
    os.environ.update(config.environment)
    os.environ.update(_torchruns_variables(config), LABS_RANK=str(config.rank),
                      LABS_DEVICE=config.device)
    # Loopback only, so that no rank listens on the network; NCCL takes a plain "lo" for a prefix of
    # names. The flight recorder, which tells where a rank waits, is off unless it has a buffer.
    os.environ.update(
        GLOO_SOCKET_IFNAME=LOOPBACK, NCCL_SOCKET_IFNAME=f"={LOOPBACK}", TP_SOCKET_IFNAME=LOOPBACK,
        OMP_NUM_THREADS=str(config.threads), TORCH_FR_BUFFER_SIZE=str(flight_recorder.RECORDED))
    for name, value in nccl.environment(config.verify).items():
        os.environ.setdefault(name, value)  # of the caller or of launch(environment=...) first
    if config.device == "cpu":
        # As `accelerate launch --cpu` does: without it Accelerator() and TrainingArguments() take
        # each rank for a job of its own, or the machine's GPU.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    import torch
    import torch.distributed as dist

    # A rank of the fork server has torch already: OMP_NUM_THREADS comes too late for it.
    torch.set_num_threads(config.threads)
    if config.device != "cpu":
        cuda.use(config.device)
    _forward_warnings(channel)
    multiprocessing.set_start_method(None, force=True)  # for a DataLoader: the platform's default
    sys.dont_write_bytecode = True  # a .pyc would hide a second edit of a module within a second
    dist.init_process_group(config.backend, rank=config.rank, world_size=config.ranks,
                            store=dist.FileStore(config.rendezvous, config.ranks),
                            timeout=_NO_TIMEOUT)
    # After init_process_group: from then on another call of it is refused.
    users_groups.install(config.ranks)
    collectives.add_new_names()  # before they are announced
    if config.verify:
        collective_matching.announce_collectives(channel)


def _torchruns_variables(config) -> dict[str, str]:
    """What torchrun sets on one node, but for those that say that torchrun did it."""
    numbers = {"RANK": config.rank, "LOCAL_RANK": config.rank, "ROLE_RANK": config.rank,
               "WORLD_SIZE": config.ranks, "LOCAL_WORLD_SIZE": config.ranks,
               "ROLE_WORLD_SIZE": config.ranks, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1,
               "MASTER_PORT": config.port}
    return {"MASTER_ADDR": "127.0.0.1", "ROLE_NAME": "default",
            **{name: str(number) for name, number in numbers.items()}}


def _forward_warnings(channel):
    """Sends Python warnings to the caller, which shows the same one of several ranks once."""
    usual = warnings.showwarning

    def show(message, category, filename, lineno, file=None, line=None):
        # a DataLoader's worker warns as usual: its stderr is the rank's
        if file is not None or not channel.is_ours:
            return usual(message, category, filename, lineno, file, line)
        place = source_lines.Place(filename, lineno, "")
        if _RENAMED.search(str(message)):  # torch names its own logger's line, not the caller's
            place = source_lines.caller_of_torch(sys._getframe(1))
            if not place.is_students:  # DeepSpeed and Accelerate call the old names
                return None
        if not place.is_students and _is_torchs_own(category, str(message)):
            return None
        channel.send("warning", (f"{category.__name__}: {message}", place))

    warnings.showwarning = show


def _is_torchs_own(category, message) -> bool:
    return any(issubclass(category, kind) and re.match(words, message)
               for kind, words in _TORCHS_OWN)


def _outcome_fields(error, config) -> dict:
    """An exception as fields of an Outcome, itself pickled where that is possible."""
    try:
        message = str(error)
    except Exception as another:
        message = f"(its message cannot be shown: {type(another).__name__})"
    # None where the exception cannot be pickled: its type, message and stack are sent in any case.
    packed = None
    with contextlib.suppress(Exception):
        packed = cloudpickle.dumps(error)
    stack = source_lines.traceback_of(error)
    oom = memory.oom_info(error, message, config.memory_limit)
    return {"kind": _kind(error, message, oom), "error": packed,
            "error_type": type(error).__name__, "message": message, "oom": oom,
            "stack": [place for place in stack if place.filename != __file__] or stack,
            "traceback": "".join(traceback.format_exception(error)), "failed_at": time.time()}


def _kind(error, message, oom) -> Kind:
    if isinstance(error, SystemExit):
        return Kind.CALLED_EXIT
    if isinstance(error, pickling.CannotSend):
        return Kind.CANNOT_SEND
    # A lost connection goes before a oom: it is a consequence of another rank's end.
    if lost_connection(message):
        return Kind.LOST_CONNECTION
    return Kind.OUT_OF_MEMORY if oom else Kind.RAISED


def lost_connection(message: str) -> bool:
    """Whether an exception's message says that another rank had gone."""
    return nccl.lost_peer(message) or any(words in message for words in _PEER_GONE)


def _flush():
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
