"""A rank that computes longer than the others, and data that come late, in proportion to what this
machine does meanwhile: so each fault has the same share of a step on a fast machine and on a slow
one."""

import time

import torch

from labs.training import models
from labs.workers import devices

EXTRA_COMPUTING = 40  # times a block's forward: what a slow rank computes in addition
LOADING = 3  # times a step: how long a slow data loader takes


class SlowRank:
    """Once `active`, computes `times` as long as each block's forward after it: CPU time of the
    thread, which makes the ratio independent of what else the machine does, or time of the GPU."""

    def __init__(self, model, times: float = EXTRA_COMPUTING):
        self.active, self.began, self.times = False, 0.0, times
        on_gpu = devices.device().type == "cuda"
        self.clock = _gpu_clock if on_gpu else time.thread_time
        # Small enough to stop in time; on a GPU large enough for the kernels, not the launches, to
        # take it.
        width = 2048 if on_gpu else 256
        self.square = torch.ones(width, width, device=devices.device())
        for block in models.blocks(model):
            block.register_forward_pre_hook(lambda *_: self._begin())
            # Prepended: it must run before FSDP2's hook, which frees the gathered parameters.
            block.register_forward_hook(lambda *_: self._burn(), prepend=True)

    def _begin(self):
        self.began = self.clock() if self.active else 0.0

    def _burn(self):
        if not self.active:
            return
        now = self.clock()
        until = now + self.times * (now - self.began)
        while self.clock() < until:
            # Its time is the thread's own, so a busy machine makes this loop longer and the ratio
            # no other.
            self.square @ self.square


def _gpu_clock() -> float:
    """Seconds, when the GPU has done all that it was given."""
    devices.synchronize()
    return time.perf_counter()


class Loading:
    """What a data loader does with each batch, in `delay` seconds: nothing."""

    def __init__(self):
        self.delay = 0.0

    def __call__(self, batch):
        time.sleep(self.delay)
        return batch
