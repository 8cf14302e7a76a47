"""Shows a failure of the CPU's allocator as CUDA shows its own."""

import functools

import torch
from torch.overrides import TorchFunctionMode

from pretend_gpus import allocator, machine, memory, state


class OutOfMemory(TorchFunctionMode):
    """Active in a process whose GPU memory is limited."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        try:
            return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            _raise_as_cudas(error)
            raise


def shown(function):
    """A function that allocates in C++, and of which torch tells the mode nothing."""
    @functools.wraps(function)
    def called(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            _raise_as_cudas(error)
            raise
    return called


def _raise_as_cudas(error):
    if allocator.REFUSED in str(error):
        raise torch.OutOfMemoryError(words(allocator.refused())) from None


def words(asked: int) -> str:
    """CUDA's message when `asked` bytes find no room."""
    held, gib = memory.allocated(), machine.GiB
    return (f"CUDA out of memory. Tried to allocate {_size(asked)}. GPU {state.current_or_zero()} "
            f"has a total capacity of {machine.total() / gib:.2f} GiB of which "
            f"{(machine.total() - held) / gib:.2f} GiB is free. {_size(memory.allowed())} allowed; "
            f"Of the allocated memory {_size(held)} is allocated by PyTorch, and 0 bytes is "
            "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
            "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
            "documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)")


def _size(nbytes):
    for unit, name in ((machine.GiB, "GiB"), (machine.MiB, "MiB"), (1024, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
