"""Hundreds of launches in one live kernel, every other one with a fault: what leaks."""

import sys
from pathlib import Path

from _bench.progress import done, say

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

ROUNDS, RANKS, TURN = 500, 4, 20  # launches, ranks of each, launches in one cell
WARM_UP = 40  # launches before the first look: caches fill up, once

IN_KERNEL = """
import ctypes, gc, os, signal, sys, tempfile, threading, time, warnings
import numpy as np, psutil
import torch, torch.distributed as dist
import labs
from labs import launch
from faults import faulty, table
import leaks

kinds = [fault for fault in table.FAULTS if fault.within < 10 and fault.name != "raises_a_flood"]
kinds += [fault for fault in table.STALLS if "timeout" not in fault.options][:1]
plain = table.Fault(faulty.next_launch, (), error=None)
kinds = [kind for fault in kinds for kind in (fault, plain)]
unexpected = []

def soak(first, count):
    for number in range(first, first + count):
        fault = kinds[number % len(kinds)]
        options = {**fault.options, "ranks": RANKS, "quiet": True}
        if "hang_after" in options:
            options["hang_after"] = 1
        error = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                launch(fault.function, **options)
        except labs.LaunchError as raised:
            error = type(raised).__name__
        if error != fault.error:
            unexpected.append((fault.name, error))

def look():
    gc.collect()
    this = psutil.Process()
    return {"process": len(this.children(recursive=True)), "fd": this.num_fds(),
            "thread": this.num_threads(),
            "temp_file": len(leaks.temporary_files(tempfile.gettempdir()))
                         + len(leaks.shared_memory()),
            "memory_mb": this.memory_info().rss / 1e6}
"""


def run(arguments) -> dict:
    """Growth of everything a launch could leak, over the launches after a warm-up."""
    from kernels import Kernel

    launches = arguments.rounds or ROUNDS
    ranks = (arguments.ranks or [RANKS])[0]
    tests = str(Path(__file__).resolve().parents[2] / "tests")
    kernel = Kernel(PYTHONPATH=f"{tests}:{tests}/faults")
    try:
        _ran(kernel, IN_KERNEL.replace("RANKS", str(ranks)))
        _turns(kernel, "warm-up", 0, WARM_UP)
        before = _look(kernel)
        _turns(kernel, "launch", WARM_UP, launches)
        after = _look(kernel)
        unexpected = eval(_ran(kernel, "print(unexpected)"))
    finally:
        kernel.close()
    done()
    growth = {f"{what}_growth": after[what] - before[what]
              for what in ("process", "fd", "thread", "temp_file")}
    return {"launches": launches, "ranks": ranks, **growth,
            "memory_growth_mb": after["memory_mb"] - before["memory_mb"],
            "unexpected": unexpected}


def _turns(kernel, what, first, count):
    for start in range(0, count, TURN):
        say(f"{what} {start} of {count}")
        _ran(kernel, f"soak({first + start}, {min(TURN, count - start)})")


def _look(kernel) -> dict:
    return eval(_ran(kernel, "print(look())"))


def _ran(kernel, code) -> str:
    shown, error = kernel.run(code, timeout=600)
    if error:
        raise RuntimeError(error)
    return shown


def table(result) -> str:
    """The result for a terminal."""
    names = {"process_growth": "processes", "fd_growth": "file descriptors",
             "thread_growth": "threads", "temp_file_growth": "temporary and shared-memory files",
             "memory_growth_mb": "MB of memory"}
    lines = [f"{result['launches']} launches of {result['ranks']} ranks in one kernel, every other "
             "one with a fault; growth of:"]
    lines += [f"{title:36s}{result[name]:>8.4g}" for name, title in names.items()]
    lines.append(f"launches that did not end as the table says: {len(result['unexpected'])}")
    return "\n".join([*lines, *(f"    {name}: {error}" for name, error in result["unexpected"])])
