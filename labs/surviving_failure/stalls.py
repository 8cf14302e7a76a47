"""How long each step of a job takes that saves to a slow disk: synchronously, with the student's
class, and with torch's own asynchronous saving; and the picture of it."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch.distributed.device_mesh import init_device_mesh

from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.faults.slow_disk import SlowDisk
from labs.meters.typical_step import require_typical
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.surviving_failure.scaffold import to_bytes
from labs.training import data, models
from labs.workers import devices, processes
from labs.workers.launcher import launch
from labs.workers.other_load import name_load
from labs.workers.progress import status

EVERY, SAVES = 8, 3  # steps between two saves; saves
# Below EVERY: a write in the background ends before the next save, which then does not wait for it.
SLOW = 5.0  # steps that the slow disk needs for a rank's state
WARMUP_STEPS = 3
LAYERS, HIDDEN, BATCH, CONTEXT = 2, 192, 4, 64
SYNCHRONOUS, STUDENTS, TORCHS = "synchronous", "your AsyncSaver", "torch's async_save"


@dataclass(frozen=True)
class Stalls:
    """Seconds of each step, by the way of saving, of the slowest rank; after every EVERY steps one
    has a save. step: median seconds of one without. copy: seconds in which a rank's state becomes
    bytes. write: of writing and syncing it on this machine's disk. slow: on the disk that is slow
    on purpose. nbytes: of a rank's state."""

    seconds: dict[str, list[float]]
    step: float
    copy: float
    write: float
    slow: float
    nbytes: int

    def plain(self, way: str) -> float:
        """Median seconds of a step without a save."""
        return statistics.median(seconds for number, seconds in enumerate(self.seconds[way], 1)
                                 if number % EVERY)

    def stall(self, way: str) -> float:
        """Median seconds by which a step with a save takes longer than one without."""
        steps = list(enumerate(self.seconds[way], 1))
        with_save = [seconds for number, seconds in steps if number % EVERY == 0]
        without = [seconds for number, seconds in steps if number % EVERY]
        return max(0.0, statistics.median(with_save) - statistics.median(without))


def measure_stalls(saver_class: Callable, atomic_write: Callable, folder: Path) -> Stalls:
    """Trains a GPT-2 under FSDP2 on two ranks, with a save after every EVERY steps."""
    name_load()
    by_rank = launch(_on_rank, saver_class, atomic_write, folder, ranks=2, quiet=True)
    first = by_rank[0]
    slowest = {way: [max(pair) for pair in zip(*(rank.seconds[way] for rank in by_rank),
                                               strict=True)] for way in first.seconds}
    return Stalls(slowest, *(max(getattr(rank, name) for rank in by_rank)
                             for name in ("step", "copy", "write", "slow", "nbytes")))


def _on_rank(saver_class, atomic_write, folder) -> Stalls:
    from torch.distributed.fsdp import fully_shard

    # One unit, and so two collectives a step: on a busy machine ranks wait long for each other.
    model = fully_shard(models.move_to_rank(models.gpt2(LAYERS, HIDDEN, context=CONTEXT)),
                        mesh=init_device_mesh(devices.device().type, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {name: tensor.to(devices.device())
             for name, tensor in data.lm_batches(1, BATCH, CONTEXT)[0].items()}

    def step():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARMUP_STEPS):
        step()
    seconds = statistics.median(_seconds(step) for _ in range(2 * WARMUP_STEPS))
    state, path = local_state(model, optimizer), folder / f"rank_{dist.get_rank()}.pt"
    copy = statistics.median(_seconds(to_bytes, state) for _ in range(3))
    written = to_bytes(state)
    write = statistics.median(_seconds(atomic_write, path, written) for _ in range(3))
    slow = _same_on_all(SLOW * seconds)
    # Of all ranks the same seconds: else the slower disk would stall both ranks in the collectives.
    disk = SlowDisk(atomic_write, len(written) / slow)
    ways = {SYNCHRONOUS: lambda: (lambda: disk(path, to_bytes(local_state(model, optimizer))),
                                  lambda: None),
            STUDENTS: lambda: _students(saver_class(disk), path, model, optimizer),
            TORCHS: lambda: _torchs(folder / "dcp", slow, model, optimizer)}
    found = {}
    for way, begin in ways.items():
        save, close = begin()
        found[way] = _steps(step, save)
        close()
    return Stalls(found, seconds, copy, write, slow, len(written))


def _seconds(call, *args) -> float:
    began = time.perf_counter()
    call(*args)
    devices.synchronize()
    return time.perf_counter() - began


def _same_on_all(seconds) -> float:
    """The mean over ranks."""
    mean = torch.tensor(seconds, dtype=torch.float64, device=devices.device())
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def _steps(step, save) -> list[float]:
    """Seconds of each step; every EVERY-th saves after it."""
    def with_save():
        step()
        save()

    dist.barrier()
    # Three steps follow the last save: its write in the background falls into them.
    return [_seconds(step if number % EVERY else with_save)
            for number in range(1, EVERY * (SAVES + 1) - EVERY // 2)]


def local_state(model, optimizer) -> dict[str, Any]:
    """This rank's shards of the parameters and of what AdamW keeps of them."""
    names = dict(model.named_parameters())
    return {"model": {name: parameter.detach().to_local() for name, parameter in names.items()},
            "optimizer": {name: {key: models.local_shard(value)
                                 for key, value in optimizer.state[parameter].items()}
                          for name, parameter in names.items()}}


def _students(saver, path, model, optimizer) -> tuple[Callable, Callable]:
    return lambda: saver.save(path, local_state(model, optimizer)), saver.close


def _torchs(folder, slow, model, optimizer) -> tuple[Callable, Callable]:
    """(save, close) with torch.distributed.checkpoint, on a disk that is as slow."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict import get_state_dict

    class SlowWriter(checkpoint.FileSystemWriter):
        def write_data(self, plan, planner):
            ends = time.monotonic() + slow
            written = super().write_data(plan, planner)
            time.sleep(max(0.0, ends - time.monotonic()))
            return written

    # async_save plans with collectives in a thread. In the job's group they would mix with those of
    # the steps, in another order on each rank.
    group, in_flight = dist.new_group(backend="gloo"), []
    # All four options need CUDA.
    stager = DefaultStager(StagingOptions(False, False, False, False))

    def save():
        wait()
        parameters, state = get_state_dict(model, optimizer)
        found = checkpoint.async_save(
            {"model": parameters, "optimizer": state}, async_stager=stager, process_group=group,
            storage_writer=SlowWriter(folder, overwrite=True))
        in_flight.append(getattr(found, "upload_completion", found))

    def wait():
        while in_flight:
            in_flight.pop().result()

    def close():
        wait()
        stager.close()

    return save, close


_PLAIN, _SAVING = palette.BORDER, palette.PHASES["exposed"]


@shows("8.5")
def show_stalls(saver_class: Callable, atomic_write: Callable) -> Picture:
    """Draws the time of each step of a job of two ranks that saves to a slow disk in three ways."""
    with processes.temporary_folder() as folder, status("three ways to save"):
        found = measure_stalls(saver_class, atomic_write, Path(folder))
    # Of the synchronous way only: beside another one a thread saves, which may cost the job time.
    require_typical({"a step without a save": (found.plain(SYNCHRONOUS), found.step)},
                    "this cell")
    guess, share = guessed("8.5"), found.stall(STUDENTS) / found.stall(SYNCHRONOUS)
    figure, axes = canvas(WIDTH, 4.9 + marks.HEADLINE + marks.NOTE_LINE * (guess is not None),
                          nrows=3, sharex=True, sharey=True)
    lesson = f"{share:.0%} of the stall of a synchronous save is left with {STUDENTS}"
    marks.headline(figure, lesson)
    for ax, (way, seconds) in zip(axes, found.seconds.items(), strict=True):
        _draw_steps(ax, seconds)
        ax.set_title(f"{way}: a save takes {1000 * found.stall(way):,.0f} ms of the job's time",
                     fontsize=10, loc="left")
    axes[1].set_ylabel("ms")
    axes[-1].set_xlabel("step")
    handles = [Patch(color=_PLAIN, label="step"), Patch(color=_SAVING, label="step with a save")]
    if guess is not None:
        at = 1000 * (found.step + guess / 100 * found.stall(SYNCHRONOUS))
        axes[1].axhline(at, color=palette.GUESSED, linestyle=(0, (3, 2)))
        handles.append(Line2D([], [], color=palette.GUESSED, linestyle=(0, (3, 2)),
                              label=f"your guess: {guess:g} % of the stall is left"))
    marks.legend_above(figure, handles)
    note = (f"A rank's state, {found.nbytes / 1e6:.1f} MB: {1000 * found.copy:.0f} ms to copy, "
            f"{1000 * found.slow:.0f} ms to write to this slow disk")
    if answer := marks.answered(guess, 100 * share, "% of the stall that is left"):
        note = f"{answer}\n{note}"
    marks.note_below(figure, note)
    words = [f"{way}: a step with a save takes {1000 * found.stall(way):,.0f} ms longer"
             for way in found.seconds]
    return Picture(figure, "\n".join([
        lesson, f"a step takes {1000 * found.step:.0f} ms", *words, note]), data=(found, guess))


def _draw_steps(ax, seconds):
    places = range(1, len(seconds) + 1)
    ax.bar(places, [1000 * each for each in seconds], width=0.8,
           color=[_PLAIN if place % EVERY else _SAVING for place in places])
    ax.set_xlim(0, len(seconds) + 1)
    ax.grid(axis="y", color=palette.GRID)
    ax.set_axisbelow(True)
