"""`memory_limit`: sets it on a rank, and reads sizes from the error of an allocation above it."""

import contextlib
import re
import sys
from dataclasses import dataclass

from labs.workers import cuda

_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ASKED = re.compile(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) ?(bytes|[KMGT]iB|B)\b")
_BAD_ALLOC = "std::bad_alloc"  # C++'s own words, of small allocations inside libtorch
_SIGNS = ("can't allocate memory", _BAD_ALLOC)  # torch's CPU allocator raises a plain RuntimeError
# What finds no room on the GPU besides torch's allocator: NCCL's buffers, a context, cuBLAS. They
# do not count in memory_limit.
_GPU_SIGNS = re.compile("Cuda failure (2 )?'out of memory'|CUDA error: out of memory"
                        "|CUBLAS_STATUS_ALLOC_FAILED")
_base = _hard_limit = None  # bytes; set on a rank that has a limit
_gpu = None  # whose memory is limited


@dataclass(frozen=True)
class OOMInfo:
    """An allocation that failed, in bytes.

    asked: its size (None where the error does not tell). held: what the rank had by then, beyond
    what it started with. allowed: its memory_limit, or None if only the machine was too small, or,
    with on_gpu, its GPU.
    """

    asked: int | None = None
    held: int | None = None
    allowed: int | None = None
    on_gpu: bool = False

    def __str__(self):
        asked = f"asked for {_mb(self.asked)}" if self.asked else "asked for more"
        held = f"held {_mb(self.held)} and " if self.held is not None else ""
        ceiling = (f"its memory_limit is {_mb(self.allowed)}" if self.allowed
                   else f"{'its GPU' if self.on_gpu else 'the machine'} has no more")
        return f"{held}{asked}; {ceiling}"


def validated(limit: float | None, device: str) -> int | None:
    """Returns memory_limit as whole bytes, or None. Raises ValueError or TypeError with advice."""
    if limit is None:
        return None
    if isinstance(limit, bool) or not isinstance(limit, (int, float)):
        raise TypeError(f"memory_limit={limit!r}: give bytes per rank, for example 2e9 for 2 GB")
    # "not >=" instead of "<", so that NaN is refused too.
    if not limit >= 1_000_000:
        raise ValueError(f"memory_limit={limit!r} is in bytes: 2 GB are memory_limit=2e9")
    if device == "cpu" and sys.platform != "linux":
        raise ValueError("memory_limit needs Linux or a GPU: this system limits no process")
    return int(limit)


def limit(allowed: int, device: str) -> None:
    """On a rank: allows it `allowed` bytes more than it has now; more raises."""
    global _base, _hard_limit, _gpu
    # The allocator's own limit: RLIMIT_DATA counts no memory of a GPU.
    if device != "cpu":
        cuda.limit_memory(allowed, device)
        _gpu = device
        return
    import resource

    # RLIMIT_DATA counts all private writable memory, with torch's libraries: the limit is set above
    # what the rank has now.
    _base = data_size()
    _hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_base + allowed, _hard_limit))


def lift() -> None:
    """On a rank: ends the limit, so that reporting a failure cannot fail, too."""
    if _gpu is not None:
        cuda.limit_memory(cuda.total_memory(_gpu), _gpu)
    if _base is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (_hard_limit, _hard_limit))


def oom_info(error: BaseException, text: str, allowed: int | None = None) -> OOMInfo | None:
    """The OOMInfo behind an exception with this text, or behind the one it was raised from; None
    if memory was not the reason. allowed: the rank's memory_limit."""
    of_torch = type(error).__name__ == "OutOfMemoryError"
    of_gpu = of_torch or bool(_GPU_SIGNS.search(text))
    if not (of_gpu or isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS)):
        cause = error.__cause__
        return cause and oom_info(cause, str(cause), allowed)
    found = _ASKED.search(text)
    asked = round(float(found[1]) * _UNITS[found[2]]) if found else None
    return OOMInfo(asked, _held(of_gpu), allowed if of_torch or not of_gpu else None, of_gpu)


def oom_info_of_dead(printed: str, allowed: int | None = None) -> OOMInfo | None:
    """The OOMInfo that ended a rank's process. C++ code that finds no memory may abort: then all
    that tells is what it printed."""
    if _GPU_SIGNS.search(printed):
        return OOMInfo(on_gpu=True)
    return OOMInfo(allowed=allowed) if _BAD_ALLOC in printed else None


def _held(of_gpu) -> int | None:
    if of_gpu:
        return cuda.allocated()
    return data_size() - _base if _base is not None else None


def data_size() -> int:
    """Bytes of private writable memory of this process: what RLIMIT_DATA counts; 0 where Linux's
    /proc is missing."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith("VmData")).split()[1])
    return 0


def _mb(size) -> str:
    if size >= 1e9:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
