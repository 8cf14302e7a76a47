"""Which GPU this process uses; None until it asks CUDA for something."""

import os

import torch

from pretend_gpus import machine, processes

current = None
_entered = set()  # (process, GPU): a fork does not inherit its parent's contexts


def index(device=None):
    """Returns the number of a device: "cuda:1", 1, torch.device, or None for the current one."""
    if device is None:
        return current_or_zero()
    if isinstance(device, int):
        found = device if device >= 0 else current_or_zero()
    else:
        found = torch.device(device).index
        found = current_or_zero() if found is None else found
    if found >= machine.count():
        raise torch.AcceleratorError(
            "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have "
            "enough GPUs?\nCUDA kernel errors might be asynchronously reported at some other API "
            "call, so the stacktrace below might be incorrect.")
    return found


def current_or_zero():
    """Returns the number of the current GPU; makes no context."""
    return current or 0


def use(device):
    """torch.cuda.set_device."""
    global current
    current = index(device)
    if (os.getpid(), current) not in _entered:
        _entered.add((os.getpid(), current))
        processes.enter(current)
        if os.environ.get("PRETEND_GPU_BYTES"):
            from pretend_gpus import memory

            memory.limit_to(machine.total())


def enter():
    """Makes a context on the current GPU, if there is none."""
    if current is None:
        use(0)
