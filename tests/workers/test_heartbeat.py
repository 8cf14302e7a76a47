"""The heartbeat looks at the main thread and changes nothing of what it does."""

import sys
import weakref

import torch

from labs.workers import heartbeat


def test_a_snapshot_keeps_no_tensor_alive():
    def function():
        local = torch.ones(3)
        dropped.append(weakref.ref(local))
        return heartbeat.Snapshot.of(sys._getframe())

    dropped = []
    snapshot = function()
    assert dropped[0]() is None
    assert snapshot.stack[-1].function == "function"
