"""The pictures of part C: how long a step stalls, and what a snapshot takes of memory."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.meters.typical_step import require_typical
from labs.pictures import marks, palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.surviving_failure.crashes import snapshots, stalls
from labs.workers import processes
from labs.workers.progress import status

_PLAIN, _SAVING = palette.BORDER, palette.PHASES["exposed"]


@shows("8.5")
def show_stalls(saver_class: Callable, write_whole: Callable) -> Picture:
    """Draws the time of each step of a job of two ranks that saves to a slow disk in three ways."""
    with processes.temporary_folder() as folder, status("three ways to save"):
        found = stalls.measure_stalls(saver_class, write_whole, Path(folder))
    # Of the synchronous way only: beside another one a thread saves, which may cost the job time.
    require_typical({"a step without a save": (found.plain(stalls.SYNCHRONOUS), found.step)},
                    "this cell")
    figure, axes = canvas(WIDTH, 4.9, nrows=3, sharex=True, sharey=True)
    for ax, (way, seconds) in zip(axes, found.seconds.items(), strict=True):
        _draw_steps(ax, seconds)
        ax.set_title(f"{way}: a save takes {1000 * found.stall(way):,.0f} ms of the job's time",
                     fontsize=10, loc="left")
    axes[1].set_ylabel("ms")
    axes[-1].set_xlabel("step")
    guess, share = guessed("8.5"), found.stall(stalls.STUDENTS) / found.stall(stalls.SYNCHRONOUS)
    handles = [Patch(color=_PLAIN, label="step"), Patch(color=_SAVING, label="step with a save")]
    if guess is not None:
        at = 1000 * (found.step + guess / 100 * found.stall(stalls.SYNCHRONOUS))
        axes[1].axhline(at, color=palette.GUESSED, linestyle=(0, (3, 2)))
        handles.append(Line2D([], [], color=palette.GUESSED, linestyle=(0, (3, 2)),
                              label=f"your guess: {guess:g} % of the stall is left"))
    marks.legend_above(figure, handles)
    note = (f"A rank's state, {found.nbytes / 1e6:.1f} MB: {1000 * found.copy:.0f} ms to copy, "
            f"{1000 * found.slow:.0f} ms to write to this slow disk. "
            f"{share:.0%} of the synchronous stall is left.")
    marks.note_below(figure, note)
    words = [f"{way}: a step with a save takes {1000 * found.stall(way):,.0f} ms longer"
             for way in found.seconds]
    return Picture(figure, "\n".join([f"a step takes {1000 * found.step:.0f} ms", *words, note]),
                   data=(found, guess))


def _draw_steps(ax, seconds):
    places = range(1, len(seconds) + 1)
    ax.bar(places, [1000 * each for each in seconds], width=0.8,
           color=[_PLAIN if place % stalls.EVERY else _SAVING for place in places])
    ax.set_xlim(0, len(seconds) + 1)
    ax.grid(axis="y", color=palette.GRID)
    ax.set_axisbelow(True)


@shows("8.5")
def show_snapshot_memory(saver_class: Callable) -> Picture:
    """Draws the host's memory that four ways of saving take while a save is in flight, and after
    it, beside one snapshot."""
    with processes.temporary_folder() as folder:
        found = snapshots.measure_snapshots(saver_class, Path(folder))
    in_flight, after = ([max(0, round(size, -6)) for size in sizes] for sizes in zip(
        *((held.in_flight, held.after) for held in found.values()), strict=True))
    colour = palette.MEMORY["buffers"]
    panels = [Panel("a save is in flight", "MB", in_flight, 1e6, [snapshots.SIZE] * len(found),
                    colour=colour),
              Panel("it is done", "MB", after, 1e6, colour=colour)]
    return side_by_side(list(found), panels)
