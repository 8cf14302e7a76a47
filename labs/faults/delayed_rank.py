"""A rank that begins later than the others: a rank that reads what a collective writes, and has not
waited for it, reads numbers without this rank's part."""

import itertools
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

DELAY_SECONDS = 0.15  # far longer than a collective of a small model takes
GATE_TIMEOUT = 2.0  # seconds


def delay_rank(rank: int, world_size: int | None = None) -> None:
    """On all ranks: lets them meet, and `rank` continue DELAY_SECONDS after the others. world_size:
    does so on so many ranks only; None: on any number."""
    if world_size in (None, dist.get_world_size()):
        dist.barrier()
        if dist.get_rank() == rank:
            time.sleep(DELAY_SECONDS)


class Gate:
    """Delays one rank until another has reached a place in its code. A rank that waits there
    for the delayed rank, by whatever call, keeps the gate closed and is found."""

    _numbers = itertools.count()

    def __init__(self):
        self._key = f"gate {next(self._numbers)}"  # the same on all ranks: each makes as many

    def open(self) -> None:
        # By the store, not by a collective: a collective would itself wait for the rank that is
        # delayed.
        _get_default_store().set(self._key, "open")

    def wait(self) -> bool:
        """Waits until the gate is open. Returns False where it was still closed after GATE_TIMEOUT
        seconds."""
        try:
            _get_default_store().wait([self._key], timedelta(seconds=GATE_TIMEOUT))
        except RuntimeError:  # the store's time-out
            return False
        return True
