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

import leftovers
import psutil
import torch.distributed as dist
import torch.multiprocessing as mp
from faults import deeds

STARTERS = ("forkserver", "resource_tracker")  # they stay until their notebook ends


# the launchers


def ours(deed, options):
    from labs import launch

    return launch(deed, **{"ranks": 2, **options})


def mp_spawn(deed, options):
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_met_in_a_file, (deed.__name__, 2, directory), nprocs=2)


def notebook_launcher(deed, options):
    from accelerate import notebook_launcher

    notebook_launcher(_met_by_environment, (deed.__name__,), num_processes=2,
                      use_port=str(_free_port()))


def elastic_launch(deed, options):
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", max_restarts=0)
    elastic_launch(config, _recorded)(deed.__name__)


PEERS = (mp_spawn, notebook_launcher, elastic_launch)


def _met_in_a_file(rank, name, ranks, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank,
                            world_size=ranks)
    getattr(deeds, name)()
    dist.destroy_process_group()


def _met_by_environment(name):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    getattr(deeds, name)()
    dist.destroy_process_group()


def _recorded(name):
    from torch.distributed.elastic.multiprocessing.errors import record

    record(_met_by_environment)(name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# what became of it


def run(launcher, faults, directory) -> None:
    """Runs the faults one after the other, and writes a line about each to `directory`/told."""
    printed = os.open(f"{directory}/printed", os.O_RDWR | os.O_CREAT)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    if launcher is ours:
        _attempt(launcher, deeds.next_launch, {})  # the fork server imports torch once
    with open(f"{directory}/told", "w", buffering=1) as told:
        for fault in faults:
            start = os.lseek(printed, 0, os.SEEK_END)
            row = _outcome(launcher, fault, lambda start=start: _text(printed, start),
                           f"{directory}/ended")
            told.write(json.dumps({"fault": fault.name, **row}) + "\n")


def _outcome(launcher, fault, text, ended) -> dict:
    handlers = _handlers()
    began = time.monotonic()
    _attempt(launcher, fault.deed, fault.options)
    seconds = time.monotonic() - began
    named = is_named(fault, text(), launcher is ours)
    in_time = seconds < (fault.within if launcher is ours else 60)
    open(ended, "w").close()
    leftovers.until(lambda: not _children(), 3)
    left = [f"{len(_children())} processes"] if _children() else []
    left += ["a signal handler"] if _handlers() != handlers else []
    return {"named": named, "in_time": in_time, "seconds": seconds, "left": left,
            "next": _attempt(launcher, deeds.next_launch, {})}


def _attempt(launcher, deed, options) -> bool:
    """Whether it went well; shows the student what a cell would."""
    try:
        launcher(deed, options)
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
    line = fault.deed.__code__.co_firstlineno + fault.line - 1 if fault.at else ""
    return (all(piece in text for piece in fault.says)
            and (not fault.at or f"deeds.py line {line}" in text))


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
