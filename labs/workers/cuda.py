"""This machine's GPUs: counted, measured, timed and limited. No other module names torch.cuda.

Without a GPU only `count` may be called. The first call of any other function makes a CUDA context
in this process, so only ranks make such calls, never the notebook's kernel.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

BLOCK = 512  # bytes: torch's allocator gives each tensor a multiple of so many


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of this rank's GPU.

    allocated: of the blocks that hold its tensors, each rounded up to 512 bytes; above 1 MiB the
    block may be up to 1 MiB larger than its tensor. peak: the most of that since `reset_peak`.
    reserved: what torch's caching allocator has taken from the driver. used: what the driver
    counts, and nvidia-smi shows: contexts, libraries' buffers and other processes, too. requested:
    the most that tensors asked for since `reset_peak`, without rounding.
    """

    allocated: int
    peak: int
    reserved: int
    used: int
    requested: int


def count() -> int:
    """Returns the number of GPUs that can be used. Makes no CUDA context."""
    # Without it torch asks the driver, and a process that has asked cannot fork for CUDA any more.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def use(device: str) -> None:
    """On a rank: makes `device`, such as "cuda:1", the one that is meant by "cuda"."""
    torch.cuda.set_device(device)


def name() -> str:
    """Returns the name of this rank's GPU, such as "NVIDIA A100-SXM4-80GB"."""
    return torch.cuda.get_device_name()


def capability() -> tuple[int, int]:
    """Returns the compute capability of this rank's GPU: (8, 0) for an A100."""
    return torch.cuda.get_device_capability()


def nccl_version() -> tuple[int, ...]:
    """Returns the version of NCCL that torch was built with: (2, 27, 3). Makes no context."""
    return torch.cuda.nccl.version()


def can_access_peer(one: int, other: int) -> bool:
    """Returns whether GPU `one` can read and write the memory of GPU `other` directly."""
    return torch.cuda.can_device_access_peer(one, other)


def total_memory(device: str | None = None) -> int:
    """Returns the bytes of a GPU's memory, by default this rank's."""
    return torch.cuda.get_device_properties(device).total_memory


def limit_memory(allowed: int, device: str) -> None:
    """On a rank: an allocation that would take its tensors above `allowed` bytes raises
    torch.OutOfMemoryError from now on. The context and NCCL's buffers do not count."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total_memory(device)), device)


def synchronize() -> None:
    """Waits until all kernels that this rank has launched on its GPU have ended."""
    torch.cuda.synchronize()


def synchronize_stream() -> None:
    """Waits until the kernels on this thread's stream have ended; those on others, such as NCCL's,
    continue."""
    torch.cuda.current_stream().synchronize()


def reset_peak() -> None:
    """On a rank: the peak of `memory` counts from now on."""
    synchronize()
    torch.cuda.reset_peak_memory_stats()


def random_state(device: str) -> torch.Tensor:
    """The state of the GPU's random generator, on the CPU."""
    return torch.cuda.get_rng_state(device)


def set_random_state(state: torch.Tensor, device: str) -> None:
    """Puts back what `random_state` has returned."""
    torch.cuda.set_rng_state(state, device)


def empty_cache() -> None:
    """On a rank: gives what torch's allocator has reserved, and no tensor uses, back to the
    driver."""
    synchronize()
    torch.cuda.empty_cache()


def memory() -> GpuMemory:
    """On a rank: returns what its GPU's memory holds now, and held at most since `reset_peak`."""
    synchronize()
    free, total = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    return GpuMemory(torch.cuda.memory_allocated(), peak, torch.cuda.memory_reserved(),
                     total - free, torch.cuda.memory_stats().get("requested_bytes.all.peak", peak))


def allocated() -> int:
    """On a rank: returns the bytes of its GPU's tensors, as `memory().allocated`, without waiting
    for kernels: after an error, one of NCCL's may wait for ever."""
    return torch.cuda.memory_allocated()


@contextmanager
def allocation_history() -> Iterator[list[tuple[int, int, int]]]:
    """On a rank: yields a list which at the end of the block has all that torch's allocator has
    given and taken back inside it, in order and on whatever thread: (nanoseconds since the epoch,
    address, bytes asked for; freed: < 0)."""
    signs = {"alloc": 1, "free_requested": -1}  # "free_completed" may come later: other streams
    history = []
    # Underscored, and the documented way ("Understanding CUDA Memory Usage"). No stacks are kept.
    torch.cuda.memory._record_memory_history(context=None)
    try:
        yield history
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        history += [(1000 * entry["time_us"], entry["addr"], signs[entry["action"]] * entry["size"])
                    for entry in trace if entry["action"] in signs]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def pinned_memory() -> int:
    """On a rank: returns the bytes of the host's memory that torch keeps pinned for copies to and
    from its GPU; each tensor takes a power of two of them."""
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


def seconds(work: Callable[[], object]) -> float:
    """On a rank: calls work() and returns the seconds that its GPU took, between two CUDA events:
    what the CPU's clock measures ends when the kernels have been launched, not when they end."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000  # elapsed_time returns milliseconds
