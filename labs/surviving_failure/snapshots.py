"""What a snapshot takes of the host's memory while a save is in flight, and after it."""

import copy
import gc
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from labs.checks.verdicts import shows
from labs.faults.slow_disk import HeldDisk, resident_bytes
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.surviving_failure.scaffold import to_bytes
from labs.workers import devices, processes
from labs.workers.launcher import launch

NUMBERS = 16_000_000  # of the state's tensor
SIZE = 4 * NUMBERS  # bytes
SETTLED = 1.0  # seconds


@dataclass(frozen=True)
class Held:
    """Bytes that a process has more than before the first save: while one is in flight, and when it
    is done."""

    in_flight: int
    after: int


def measure_snapshots(saver_class: Callable, folder: Path) -> dict[str, Held]:
    """Way of saving -> Held, each in a fresh process with a state of SIZE bytes."""
    # A fresh process each: an allocator keeps freed memory, and the next way would seem to take
    # none.
    ways = {"your AsyncSaver": partial(_students, saver_class),
            "a copy, made into bytes by the thread": partial(_students, _CopySaver),
            "torch's async_save": partial(_torchs, False),
            "the same with a DefaultStager": partial(_torchs, True)}
    return {way: launch(measure, folder, ranks=1, quiet=True)[0]
            for way, measure in ways.items()}


def _students(saver_class, folder) -> Held:
    disk, state = HeldDisk(), {"weight": torch.ones(NUMBERS, device=devices.device())}
    to_bytes(state["weight"][:1].clone())  # what the first copy from a GPU takes once
    saver, before = saver_class(disk), resident_bytes()
    saver.save(folder / "state.pt", state)
    disk.wait_until_started()
    in_flight = resident_bytes() - before
    disk.open()
    saver.close()
    return Held(in_flight, resident_bytes() - before)


class _CopySaver:
    """Copies tensors in save, and makes bytes of the copies in the thread: quicker, and larger."""

    def __init__(self, write):
        self._write, self._thread = write, None

    def save(self, path, state):
        self._thread = threading.Thread(target=self._run, args=(path, copy.deepcopy(state)))
        self._thread.start()

    def _run(self, path, state):
        self._write(path, to_bytes(state))

    def close(self):
        self._thread.join()


def _torchs(has_stager, folder) -> Held:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    begun, go = threading.Event(), threading.Event()

    class HeldWriter(checkpoint.FileSystemWriter):
        def write_data(self, plan, planner):
            begun.set()
            go.wait(30)
            return super().write_data(plan, planner)

    # All four options need CUDA.
    stager = DefaultStager(StagingOptions(False, False, False, False)) if has_stager else None
    # The first save imports and allocates what has nothing to do with the state.
    go.set()
    small, state = ({"weight": torch.ones(size, device=devices.device())} for size in (1, NUMBERS))
    _begin(checkpoint, HeldWriter(folder / "warm"), small, None)()
    before = resident_bytes()
    begun.clear()
    go.clear()
    # The writer is held, so what torch has allocated by now is its copy of the state.
    finish = _begin(checkpoint, HeldWriter(folder / "dcp"), state, stager)
    begun.wait(30)
    in_flight = resident_bytes() - before
    go.set()
    finish()
    # It refers to the future, and that to the copy.
    del finish
    return Held(in_flight, _least_bytes() - before)


def _least_bytes() -> int:
    """The minimum of the resident bytes within SETTLED seconds: torch's threads free their buffers
    shortly after the future has its result."""
    gc.collect()
    until, least = time.monotonic() + SETTLED, resident_bytes()
    while time.monotonic() < until:
        time.sleep(0.05)
        least = min(least, resident_bytes())
    return least


def _begin(checkpoint, writer, state, stager) -> Callable[[], None]:
    """Begins torch's asynchronous save; returns what waits for its end."""
    found = checkpoint.async_save(state, storage_writer=writer, async_stager=stager)
    return getattr(found, "upload_completion", found).result


@shows("8.5")
def show_snapshot_memory(saver_class: Callable) -> Picture:
    """Draws the host's memory that four ways of saving take while a save is in flight, and after
    it, beside one snapshot."""
    with processes.temporary_folder() as folder:
        found = measure_snapshots(saver_class, Path(folder))
    in_flight, after = ([max(0, round(size, -6)) for size in sizes] for sizes in zip(
        *((held.in_flight, held.after) for held in found.values()), strict=True))
    colour = palette.MEMORY["buffers"]
    panels = [Panel("a save is in flight", "MB", in_flight, 1e6, [SIZE] * len(found),
                    colour=colour),
              Panel("it is done", "MB", after, 1e6, colour=colour)]
    name, most = max(zip(found, in_flight, strict=True), key=lambda pair: pair[1])
    return side_by_side(list(found), panels, lesson=(
        f"MB of a save in flight: {in_flight[0] / 1e6:.0f} with {next(iter(found))}; at most "
        f"{most / 1e6:.0f}, with {name}"))
