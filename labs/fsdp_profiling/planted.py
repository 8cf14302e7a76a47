"""What slows a recorded step down on purpose, in proportion to what this machine does meanwhile."""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from labs.training import data, models
from labs.workers import devices

SLOWER = 40  # times a block's own forward is what a slow rank computes beside it
LOADING = 3  # times a step is how long a slow data loader takes


class SlowRank:
    """Once `on`, each block of this rank computes for nothing when its forward is done, SLOWER
    times as long as that took. Both are measured by the thread's processor time, in the recorded
    step itself: what else the machine does stretches the one as it stretches the other."""

    def __init__(self, model):
        self.on, self.began = False, 0.0
        self.square = torch.ones(256, 256, device=devices.device())
        for block in models.blocks(model):
            block.register_forward_pre_hook(lambda *_: self._begin())
            block.register_forward_hook(lambda *_: self._idle(), prepend=True)  # before resharding

    def _begin(self):
        self.began = time.thread_time()

    def _idle(self):
        now = time.thread_time()
        until = now + SLOWER * (now - self.began) * self.on
        while time.thread_time() < until:
            self.square @ self.square


class Batches:
    """Batches of this rank's own; each takes `delay` seconds to come."""

    def __init__(self, sizes, count):
        self.delay = 0.0
        self.batches = data.lm_batches(count, sizes.batch, sizes.context,
                                       seed=1000 * dist.get_rank())

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        time.sleep(self.delay)
        return self.batches[index]

    def loader(self):
        return iter(DataLoader(self, batch_size=None))


def agreed(seconds) -> float:
    """Rank 0's, on every rank."""
    heard = [seconds]
    dist.broadcast_object_list(heard)
    return heard[0]
