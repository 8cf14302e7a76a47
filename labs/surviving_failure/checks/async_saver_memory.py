"""Exercise 8.5: the host's memory that a save takes while it is in flight, and after it."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from labs.exercises.verdicts import Wrong
from labs.surviving_failure.crashes.slow_disk import HeldDisk, resident_bytes

SIZE = 64_000_000  # bytes of the state
MOST, KEPT = 1.5, 0.3  # snapshots: while one is written, and after that
WATCHED, SETTLED = 0.6, 1.0  # seconds


def judge_memory(saver_class: Callable, folder: Path) -> int:
    """Returns the bytes of a snapshot, measured while the disk is held. Raises Wrong where more
    than one is held, or one after close."""
    held = []
    disk, state = HeldDisk(), {"weight": torch.ones(SIZE // 4)}
    before = resident_bytes()

    def measure():
        held.append(resident_bytes() - before)

    def watch():
        """While the second save waits: what a busy machine copies late counts too."""
        measure()
        until = time.monotonic() + WATCHED
        while held[-1] <= MOST * SIZE and time.monotonic() < until:
            time.sleep(0.02)
            held[-1] = max(held[-1], resident_bytes() - before)

    saver = saver_class(disk)
    saver.save(folder / "large.pt", state)
    disk.wait_until_started()
    measure()
    with disk.opening_after(0.0, watch):
        saver.save(folder / "large.pt", state)
    saver.close()
    measure()
    until = time.monotonic() + SETTLED
    while held[-1] > KEPT * SIZE and time.monotonic() < until:
        time.sleep(0.02)  # a pool's thread drops what it wrote a moment after the result
        held[-1] = resident_bytes() - before
    for bytes_held, when in zip(held, ("a save is in flight", "a second save waits for the first"),
                                strict=False):
        if bytes_held > MOST * SIZE:
            raise Wrong(f"while {when}, {bytes_held / 1e6:.0f} MB are held for a state of "
                        f"{SIZE / 1e6:.0f} MB", "lab.to_bytes(state) is the one copy that is "
                        "needed; it is made when the save before is done.", code="memory_kept")
    if held[-1] > KEPT * SIZE:
        raise Wrong(f"after close {held[-1] / 1e6:.0f} MB are still held for a state of "
                    f"{SIZE / 1e6:.0f} MB", "Forget the snapshot when it is written.",
                    code="memory_kept")
    return held[0]
