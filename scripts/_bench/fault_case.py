"""One fault through one launcher, in a process of its own, as a notebook would meet it."""

import contextlib
import json
import os
import re
import signal
import socket
import tempfile
import time
import traceback

import leaks
import psutil
import torch.distributed as dist
import torch.multiprocessing as mp
from faults import faulty

STARTERS = ("forkserver", "resource_tracker")  # they stay until their notebook ends


# the launchers


def ours(function, options):
    from labs import launch

    return launch(function, **{"ranks": 2, **options})


def mp_spawn(function, options):
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_rendezvous_by_file, (function.__name__, 2, directory), nprocs=2)


def notebook_launcher(function, options):
    from accelerate import notebook_launcher

    notebook_launcher(_rendezvous_by_environment, (function.__name__,), num_processes=2,
                      use_port=str(_free_port()))


def elastic_launch(function, options):
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", max_restarts=0)
    elastic_launch(config, _recorded)(function.__name__)


PEERS = (mp_spawn, notebook_launcher, elastic_launch)


def _rendezvous_by_file(rank, name, ranks, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank,
                            world_size=ranks)
    getattr(faulty, name)()
    dist.destroy_process_group()


def _rendezvous_by_environment(name):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    getattr(faulty, name)()
    dist.destroy_process_group()


def _recorded(name):
    from torch.distributed.elastic.multiprocessing.errors import record

    record(_rendezvous_by_environment)(name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# what it left, and what it showed


def run(launcher, faults, directory) -> None:
    """Runs the faults one after the other, and writes a line about each to `directory`/rows."""
    printed = os.open(f"{directory}/printed", os.O_RDWR | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    if launcher is ours:
        _attempt(launcher, faulty.next_launch, {})  # the fork server imports torch once
    with open(f"{directory}/rows", "w", buffering=1) as rows:
        for fault in faults:
            start = os.lseek(printed, 0, os.SEEK_END)
            row = _outcome(launcher, fault, lambda start=start: _text(printed, start),
                           f"{directory}/ended")
            rows.write(json.dumps({"fault": fault.name, **row}) + "\n")


def _outcome(launcher, fault, text, ended) -> dict:
    handlers = _handlers()
    began = time.monotonic()
    _attempt(launcher, fault.function, fault.options)
    seconds = time.monotonic() - began
    named = is_named(fault, text(), launcher is ours)
    in_time = seconds < (fault.within if launcher is ours else 60)
    open(ended, "w").close()
    leaks.until(lambda: not _children(), 3)
    left = [f"{len(_children())} processes"] if _children() else []
    left += ["a signal handler"] if _handlers() != handlers else []
    return {"named": named, "in_time": in_time, "seconds": seconds, "left": left,
            "next": _attempt(launcher, faulty.next_launch, {})}


def _attempt(launcher, function, options) -> bool:
    """Whether the launch succeeded; shows the student what a cell would."""
    try:
        launcher(function, options)
        return True
    except BaseException as error:
        if show := getattr(error, "_render_traceback_", None):
            print("\n".join(show()), flush=True)
        else:
            traceback.print_exc()
        return False


def is_named(fault, text, is_ours) -> bool:
    """Whether what a student sees tells the cause."""
    if not is_ours:
        return all(re.search(piece, text) for piece in fault.peers)
    line = fault.function.__code__.co_firstlineno + fault.line - 1 if fault.guilty_line else ""
    return (all(piece in text for piece in fault.message_parts)
            and (not fault.guilty_line or f"faulty.py line {line}" in text))


def _text(file, start) -> str:
    return os.pread(file, 100_000_000, start).decode("utf-8", "replace")


def _handlers():
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


def _children() -> list:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (child.status() != psutil.STATUS_ZOMBIE
                    and not any(name in " ".join(child.cmdline()) for name in STARTERS)
                    or child.parent() and child.parent().pid != os.getpid()):
                found.append(child)
    return found
