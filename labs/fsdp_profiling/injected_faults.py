"""What slows a recorded step down on purpose, in proportion to what this machine does meanwhile: so
each fault has the same share of a step on a fast machine and on a slow one."""

import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from labs.training import models
from labs.workers import devices
from labs.workers.collectives import all_gather_single

EXTRA_COMPUTING = 40  # times a block's forward: what a slow rank computes in addition
LOADING = 3  # times a step: how long a slow data loader takes


class SlowRank:
    """Once `active`, burns EXTRA_COMPUTING times the CPU time of each block's forward after it. The
    thread's CPU time makes the ratio independent of what else the machine does."""

    def __init__(self, model):
        self.active, self.began = False, 0.0
        self.square = torch.ones(256, 256, device=devices.device())
        for block in models.blocks(model):
            block.register_forward_pre_hook(lambda *_: self._begin())
            # Prepended: it must run before FSDP2's hook, which frees the gathered parameters.
            block.register_forward_hook(lambda *_: self._burn(), prepend=True)

    def _begin(self):
        self.began = time.thread_time()

    def _burn(self):
        now = time.thread_time()
        until = now + EXTRA_COMPUTING * (now - self.began) * self.active
        while time.thread_time() < until:
            self.square @ self.square


class Loading:
    """What a data loader does with each batch, in `delay` seconds: nothing."""

    def __init__(self):
        self.delay = 0.0

    def __call__(self, batch):
        time.sleep(self.delay)
        return batch


def without_prefetch(units) -> None:
    """Turns the prefetch of backward off."""
    for unit in units:
        # An empty list means the default. A unit that fetches itself fetches nothing.
        unit.set_modules_to_backward_prefetch([unit])


def read_loss(model) -> None:
    """Calls `.item()` on the loss in every forward, after FSDP's own hooks."""
    def hook(module, arguments, output):
        output.loss.item()

    model.register_forward_hook(hook)


def watch_activations(model) -> None:
    """Averages the size of every other block's activations over the ranks, in every forward: code
    that somebody added while looking for a mistake, and forgot."""
    for block in models.blocks(model)[::2]:
        block.register_forward_hook(lambda _, __, output: _average(output))


def _average(output):
    hidden = output[0] if isinstance(output, tuple) else output
    size = hidden.detach().abs().mean()
    dist.all_reduce(size)


def delay_all_gathers(model, seconds: float) -> None:
    """Every all-gather of a model under FSDP2 takes `seconds` more than this machine needs, without
    computing. gloo alone moves bytes by computing, on the cores that the model needs too."""
    from torch.distributed.fsdp import FSDPModule

    link = _SlowLink(seconds)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(link)


class _SlowLink:
    """A rank's only link: all-gathers use it one after the other. FSDP2 calls it in place of its
    own all-gather."""

    def __init__(self, seconds):
        self.seconds, self.free_at = seconds, 0.0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op: bool = False):
        work = all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        self.free_at = max(self.free_at, time.perf_counter()) + self.seconds
        delayed = _DelayedWork(work, self.free_at)
        if async_op:
            return delayed
        delayed.wait()


class _DelayedWork(Work):
    """The handle of an all-gather that completes when gloo has done it, but not before `due`."""

    def __init__(self, work, due):
        super().__init__()
        self.work, self.due = work, due

    def wait(self, *timeout):
        self.work.wait(*timeout)
        time.sleep(max(0.0, self.due - time.perf_counter()))
        return True
