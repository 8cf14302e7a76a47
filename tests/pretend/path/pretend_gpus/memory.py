"""torch.cuda's memory functions: they count what torch allocates for tensors on the CPU, but for
those that were sent to the host."""

import os

from pretend_gpus import allocator, host, machine, state

_SEGMENT = 2 * machine.MiB if machine.total() > machine.GiB else 65536  # small models' cards
_reserved = _most_reserved = 0
_fraction = 1.0
_mode = None


def allocated(device=None):
    """Returns the bytes of this process's tensors; those of another GPU are 0."""
    return allocator.allocated() if _is_mine(device) else 0


def peak(device=None):
    """Returns the most of `allocated` since the reset."""
    return allocator.peak() if _is_mine(device) else 0


def reset_peak(device=None):
    global _most_reserved
    state.enter()
    reserved()
    allocator.reset_peak()
    _most_reserved = _reserved


def reserved(device=None):
    """Whole segments of 2 MiB; they stay until `empty_cache`."""
    global _reserved, _most_reserved
    if not _is_mine(device):
        return 0
    _reserved = max(_reserved, _segments(peak()))
    _most_reserved = max(_most_reserved, _reserved)
    return _reserved


def max_reserved(device=None):
    reserved(device)
    return _most_reserved if _is_mine(device) else 0


def empty_cache():
    global _reserved
    reserved()
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


def snapshot(device=None):
    """Without a history: what the profiler sees of the CPU's allocations is all that there is."""
    return {"segments": [], "device_traces": [[] for _ in range(machine.count())]}


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
    """Tensors may have so many bytes. What exceeds them raises torch.OutOfMemoryError."""
    global _mode
    allocator.limit(nbytes)
    if _mode is None:
        from pretend_gpus.out_of_memory import OutOfMemory

        _mode = OutOfMemory()
        _mode.__enter__()


def allowed():
    return int(_fraction * machine.total())


def host_stats():
    """torch.cuda.host_memory_stats, as far as it is asked for."""
    return {"allocated_bytes.current": host.pinned_bytes()}


FUNCTIONS = {
    "memory_allocated": allocated, "max_memory_allocated": peak,
    "reset_peak_memory_stats": reset_peak, "reset_max_memory_allocated": reset_peak,
    "memory_reserved": reserved, "max_memory_reserved": max_reserved, "memory_stats": stats,
    "host_memory_stats": host_stats, "empty_cache": empty_cache, "mem_get_info": mem_get_info,
    "device_memory_used": lambda device=None: machine.total() - mem_get_info(device)[0],
    "set_per_process_memory_fraction": set_fraction,
    "get_per_process_memory_fraction": lambda device=None: _fraction,
    "reset_accumulated_memory_stats": lambda device=None: None,
    "memory_summary": lambda device=None, abbreviated=False: f"pretend node, process {os.getpid()}",
    "_record_memory_history": lambda *_, **__: None, "_snapshot": snapshot,
    "list_gpu_processes": lambda device=None: "GPU:0\nno processes are running"}
