"""A wire slower than this machine's memory, for real: every all-gather arrives later, and waiting
for it takes no computing. gloo alone moves its bytes by computing, on the cores of the model."""

import time

import torch
import torch.distributed as dist

from labs.workers.collectives import all_gather_single


class SlowWire:
    """One wire of a rank: all-gathers use it one after the other, each for `seconds` more than gloo
    takes. Given to FSDP2 in place of its own all-gather (`set_custom_all_gather`)."""

    def __init__(self, seconds: float):
        self.seconds, self.free = seconds, 0.0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op: bool = False):
        work = all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        self.free = max(self.free, time.perf_counter()) + self.seconds
        arriving = _Arriving(work, self.free)
        if async_op:
            return arriving
        arriving.wait()


class _Arriving(dist.distributed_c10d.Work):
    """An all-gather that is there when gloo has done it, and not before the moment `due`."""

    def __init__(self, work, due):
        super().__init__()
        self.work, self.due = work, due

    def wait(self, *timeout):
        self.work.wait(*timeout)
        time.sleep(max(0.0, self.due - time.perf_counter()))
        return True


def slow_down(model, seconds: float) -> None:
    """All units of a model under FSDP2 share one slow wire."""
    from torch.distributed.fsdp import FSDPModule

    wire = SlowWire(seconds)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(wire)
