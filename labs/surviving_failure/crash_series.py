"""A job of two ranks that is killed while it saves, again and again; and all kinds of damage."""

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.lines import Line2D

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.faults.kill_rank import kill_rank, start_clock
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.surviving_failure.damage import DAMAGES, STEPS, Damage
from labs.words import counted
from labs.workers import processes
from labs.workers.launcher import launch
from labs.workers.progress import progress_bar

RANKS = 2
SIZE = 500_000  # numbers of a rank's tensor
WHOLE_SAVES = 3  # that are measured before the first kill
KEPT = 3  # checkpoints that are kept between two kills


@dataclass(frozen=True)
class Kill:
    """One kill. seconds: since the killed rank began to save `step`. saved: the newest step whose
    save had returned on any rank. found: the newest step that could be loaded afterwards, None if
    there is none."""

    seconds: float
    step: int
    saved: int
    found: int | None

    @property
    def is_lost(self) -> bool:
        """Whether something that was saved is gone."""
        return (self.found or 0) < self.saved


@dataclass(frozen=True)
class Saver:
    """save(folder, step, state, group) on each rank; newest(folder) -> step or None."""

    name: str
    save: Callable
    newest: Callable[[Path], int | None]


def students(save_checkpoint: Callable, newest_checkpoint: Callable) -> Saver:
    """The student's two functions."""
    def newest(folder):
        path, _ = newest_checkpoint(folder)
        return None if path is None else int(Path(path).name.split("_")[1])

    return Saver("save_checkpoint", save_checkpoint, newest)


def overwriting() -> Saver:
    """Each rank writes over its last file with torch.save."""
    return Saver("torch.save over the last file", _save_over, _newest_over)


def _save_over(folder, step, state, group):
    torch.save(state, Path(folder, f"rank_{dist.get_rank(group)}.pt"))
    # Ranks are at most one step apart, as with a student's function that waits for all ranks.
    dist.barrier(group)


def _newest_over(folder) -> int | None:
    try:
        steps = {torch.load(Path(folder, f"rank_{rank}.pt"))["step"] for rank in range(RANKS)}
    except Exception:  # whatever torch says to half a file
        return None
    return steps.pop() if len(steps) == 1 else None


def kills(saver: Saver, folder: Path, count: int) -> Iterator[Kill]:
    """Yields `count` kills of a job of two ranks, each at a random moment of a save. What the job
    finds after one is what the next one continues from."""
    rng, saved = new_generator(), folder / "saved"
    saved.mkdir(parents=True)
    measured = launch(_save_some, saver.save, saved, ranks=RANKS, quiet=True)
    typical = statistics.median(measured[0])
    last = WHOLE_SAVES
    for number in range(count):
        notes = folder / f"kill_{number}"
        notes.mkdir()
        # Within the seconds of a typical save, counted from the beginning of the first one.
        after, victim = rng.uniform(0, typical), number % RANKS
        kill_rank(_save_until_killed, saver.save, saved, notes, last + 1, ranks=RANKS,
                  victim=victim, after=after, note=notes / "killed",
                  waits=True)
        step, began = _noted(notes / f"began_{victim}")[-1]
        returned = [step for rank in range(RANKS) for step, _ in _noted(notes / f"saved_{rank}")]
        kill = Kill(max(0.0, float((notes / "killed").read_text()) - began), step,
                    max([last, *returned]), saver.newest(saved))
        yield kill
        # Steps go on from the larger one, so no number is used twice and a lost save shows.
        last = max(kill.found or 0, kill.saved)
        if kill.found is None:  # nothing left to go on from: a save that is not killed
            launch(_save_one, saver.save, saved, last, ranks=RANKS, quiet=True)
        _remove_old(saved)


def _state(step) -> dict:
    return {"step": step, "weight": torch.full((SIZE,), float(step + 1000 * dist.get_rank()))}


def _save_some(save, folder) -> list[float]:
    """Seconds of each of the first saves."""
    seconds = []
    for step in range(1, WHOLE_SAVES + 1):
        began = time.perf_counter()
        _save_one(save, folder, step)
        seconds.append(time.perf_counter() - began)
    return seconds


def _save_one(save, folder, step):
    save(folder, step, _state(step), dist.group.WORLD)


def _save_until_killed(save, folder, notes, step):
    rank = dist.get_rank()
    while True:
        state = _state(step)
        _note(notes / f"began_{rank}", step)
        start_clock()
        save(folder, step, state, dist.group.WORLD)
        _note(notes / f"saved_{rank}", step)
        step += 1


def _note(path, step):
    with open(path, "a") as file:
        file.write(f"{step} {time.monotonic()}\n")


def _noted(path) -> list[tuple[int, float]]:
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(step), float(at)) for step, at in map(str.split, lines)]


def _remove_old(folder):
    """A job's tests would fill the disk."""
    paths = sorted(folder.glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
    for path in paths[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def damages(save_checkpoint: Callable, newest_checkpoint: Callable,
            folder: Path) -> Iterator[tuple[Damage, Path | None, dict]]:
    """(damage, path or None, problems) of each kind of damage, done to three checkpoints of two
    ranks that the student's function has saved."""
    saved = folder / "saved"
    saved.mkdir()
    launch(_save_three, save_checkpoint, saved, ranks=RANKS, quiet=True)
    for number, damage in enumerate(DAMAGES):
        damaged = folder / f"damaged_{number}"
        shutil.copytree(saved, damaged)
        damage.harm(damaged)
        path, problems = newest_checkpoint(damaged)
        yield damage, path, problems
        shutil.rmtree(damaged)


def _save_three(save_checkpoint, folder):
    for step in STEPS:
        rank = dist.get_rank()
        state = {"step": step, "weight": torch.arange(10_000.0) + 100 * step + rank}
        save_checkpoint(folder, step, state, dist.group.WORLD)


SHOWN_KILLS = 30
# What was found after a kill -> its mark and colour.
_OUTCOMES = {"the step that was being saved": ("s", palette.RUNS[1]),
             "the step before": ("o", palette.RANKS[0]),
             "lost": ("X", palette.RANK_FAILED)}


@shows("8.4")
def show_kills(save_checkpoint: Callable, newest_checkpoint: Callable) -> Picture:
    """Kills a job of two ranks while it saves, 30 times with the student's functions and 30 times
    with torch.save over the last file, and draws when, and what was found afterwards."""
    savers = (students(save_checkpoint, newest_checkpoint),
              overwriting())
    with processes.temporary_folder() as folder, progress_bar(total=len(savers) * SHOWN_KILLS,
                                                              desc="kills", unit="") as bar:
        runs = {saver.name: _all_kills(saver, Path(folder, f"saver_{number}"), bar)
                for number, saver in enumerate(savers)}
    figure, axes = canvas(WIDTH, 4.3, ncols=2, sharey=True)
    for ax, (name, kills) in zip(axes, runs.items(), strict=True):
        _draw_kills(ax, kills)
        ax.set_title(f"{name}:\n{_lost(kills)} of {SHOWN_KILLS} lost", fontsize=10, loc="left")
        ax.set_xlabel("ms since the save began")
    axes[0].set_ylabel("kill")
    axes[0].invert_yaxis()
    marks.legend_above(figure, [Line2D([], [], linestyle="", marker=marker, color=colour,
                                       markersize=7, label=name if name == "lost" else
                                       f"{name} was found")
                                for name, (marker, colour) in _OUTCOMES.items()])
    guess, (_, naive) = guessed("8.4"), runs.values()
    note = marks.answered(guess, _lost(naive), "lost by torch.save over the last file")
    marks.note_below(figure, note)
    words = [f"{name}: {counted(SHOWN_KILLS, 'kill')} while it saved, {_lost(kills)} lost; found: "
             + ", ".join(f"{sum(_outcome(kill) == outcome for kill in kills)} {outcome}"
                         for outcome in _OUTCOMES)
             for name, kills in runs.items()]
    return Picture(figure, "\n".join([*words, *filter(None, [note])]), data=(runs, guess))


def _all_kills(saver, folder, bar) -> list[Kill]:
    found = []
    for kill in kills(saver, folder, SHOWN_KILLS):
        found.append(kill)
        bar.update()
    return found


def _outcome(kill) -> str:
    if kill.is_lost:
        return "lost"
    return "the step before" if (kill.found or 0) < kill.step else "the step that was being saved"


def _lost(kills) -> int:
    return sum(kill.is_lost for kill in kills)


def _draw_kills(ax, kills):
    for outcome, (marker, colour) in _OUTCOMES.items():
        places = [(1000 * kill.seconds, number) for number, kill in enumerate(kills, 1)
                  if _outcome(kill) == outcome]
        if places:  # an empty line outside the axes would spoil the layout
            ax.plot(*zip(*places, strict=True), marker, color=colour, markersize=6.5, linestyle="",
                    clip_on=False)
    ax.set_xlim(left=0)
    ax.set_yticks([1, 10, 20, SHOWN_KILLS])
    ax.grid(axis="x", color=palette.GRID)
