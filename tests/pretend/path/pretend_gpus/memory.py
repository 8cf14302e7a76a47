"""torch.cuda's memory functions: they count what torch allocates for tensors on the CPU.

c10 keeps that count itself when it is told to report memory, for all threads, those of
C++ too. The peak is taken from a profiler that runs hidden between `reset_peak_memory_stats` and
`max_memory_allocated`; while a program's own profiler runs, from that one, when it ends.
"""

import atexit
import os
import resource
import time

import torch

from pretend_gpus import machine, private, state

_SEGMENT = 2 * machine.MiB
_counter = None
_peak = _reserved = _most_reserved = 0
_since = 0  # nanoseconds: when the peak was reset
_fraction = 1.0
_hidden = None
_mode = None


def count_from_now_on():
    """Makes c10 count the bytes of all tensors on the CPU."""
    global _counter
    _counter = private.live_bytes()
    atexit.register(lambda: _hidden and _stop_hidden())  # else the interpreter's end crashes


def allocated(device=None):
    """Returns the bytes of this process's tensors; those of another GPU are 0."""
    return _counter.value if _is_mine(device) else 0


def peak(device=None):
    """Returns the most of `allocated` since the reset."""
    global _peak
    if not _is_mine(device):
        return 0
    if _hidden:
        _stop_hidden()
        _start_hidden()
    _peak = max(_peak, allocated())
    return _peak


def reset_peak(device=None):
    global _peak, _since, _most_reserved
    state.enter()
    if _hidden:
        _stop_hidden()
    _peak, _since = allocated(), time.time_ns()
    _most_reserved = _reserved
    _start_hidden()


def reserved(device=None):
    """Whole segments of 2 MiB; they stay until `empty_cache`."""
    global _reserved, _most_reserved
    if not _is_mine(device):
        return 0
    _reserved = max(_reserved, _segments(max(allocated(), _peak)))
    _most_reserved = max(_most_reserved, _reserved)
    return _reserved


def max_reserved(device=None):
    reserved(device)
    return _most_reserved if _is_mine(device) else 0


def empty_cache():
    global _reserved
    _reserved = _segments(allocated())


def mem_get_info(device=None):
    state.enter()
    used = machine.CONTEXT + reserved(device)
    return max(0, machine.total() - used), machine.total()


def stats(device=None):
    found = {"allocated_bytes": (allocated(device), peak(device)),
             "reserved_bytes": (reserved(device), max_reserved(device)),
             "active_bytes": (allocated(device), peak(device)),
             "requested_bytes": (allocated(device), peak(device)),
             "inactive_split_bytes": (0, 0), "allocation": (0, 0), "segment": (0, 0)}
    flat = {f"{name}.{pool}.{which}": value for name, values in found.items()
            for pool in ("all", "large_pool", "small_pool")
            for which, value in zip(("current", "peak", "allocated", "freed"),
                                    (*values, 0, 0), strict=True)}
    return {**flat, "num_alloc_retries": 0, "num_ooms": 0, "num_device_alloc": 0,
            "num_device_free": 0, "num_sync_all_streams": 0, "max_split_size": -1}


def _segments(nbytes):
    return -(-nbytes // _SEGMENT) * _SEGMENT


def _is_mine(device):
    return state.index(device) == state.current_or_zero()


def set_fraction(fraction, device=None):
    """From now on an allocation that would exceed this part of the GPU's memory fails."""
    global _fraction
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    state.index(device)
    _fraction = fraction
    limit_to(int(fraction * machine.total()))


def limit_to(nbytes):
    """The operating system enforces it: this process's data may grow until its tensors have so many
    bytes. Errors of torch.OutOfMemoryError follow from the CPU allocator's."""
    global _mode
    with open("/proc/self/status") as file:
        data = 1024 * int(next(line for line in file if line.startswith("VmData")).split()[1])
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = data + max(0, nbytes - allocated())
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
    if _mode is None:
        from pretend_gpus.out_of_memory import OutOfMemory

        _mode = OutOfMemory()
        _mode.__enter__()


def lift_limit():
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def allowed():
    return int(_fraction * machine.total())


# The hidden profiler

def _start_hidden():
    global _hidden
    from torch.autograd import profiler

    if torch._C._autograd._profiler_enabled():
        return  # the program's own runs: `profile_ended` reads it
    _hidden = profiler.profile(use_cpu=True, profile_memory=True)
    _hidden.pretend_hidden = True
    _hidden.__enter__()


def _stop_hidden():
    global _hidden
    ended, _hidden = _hidden, None
    ended.__exit__(None, None, None)


def profile_begins(profile):
    """Called before a program's own profiler starts: torch has one at a time."""
    if _hidden and not getattr(profile, "pretend_hidden", False):
        _stop_hidden()


def profile_ended(profile):
    """Called after any profiler's end: takes the peak from its events."""
    global _peak
    results = getattr(profile, "kineto_results", None)
    if not _since or results is None or not profile.profile_memory:
        return
    todo, highest = list(results.experimental_event_tree()), 0
    while todo:
        event = todo.pop()
        if "Allocation" in str(event.tag):
            if event.start_time_ns >= _since:
                highest = max(highest, event.extra_fields.total_allocated)
        todo += event.children
    _peak = max(_peak, highest)
    if _hidden is None and not getattr(profile, "pretend_hidden", False):
        _start_hidden()


FUNCTIONS = {
    "memory_allocated": allocated, "max_memory_allocated": peak,
    "reset_peak_memory_stats": reset_peak, "reset_max_memory_allocated": reset_peak,
    "memory_reserved": reserved, "max_memory_reserved": max_reserved, "memory_stats": stats,
    "empty_cache": empty_cache, "mem_get_info": mem_get_info,
    "device_memory_used": lambda device=None: machine.total() - mem_get_info(device)[0],
    "set_per_process_memory_fraction": set_fraction,
    "get_per_process_memory_fraction": lambda device=None: _fraction,
    "reset_accumulated_memory_stats": lambda device=None: None,
    "memory_summary": lambda device=None, abbreviated=False: f"pretend node, process {os.getpid()}",
    "list_gpu_processes": lambda device=None: "GPU:0\nno processes are running"}
