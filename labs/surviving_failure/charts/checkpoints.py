"""The pictures of part B: a job that is killed while it saves, and what is said to damage."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.lines import Line2D

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.surviving_failure.crashes import series
from labs.surviving_failure.crashes.series import Kill
from labs.words import counted
from labs.workers import processes
from labs.workers.progress import progress_bar

KILLS = 30
# What was found after a kill -> its mark and colour.
_OUTCOMES = {"the step that was being saved": ("s", palette.RUNS[1]),
             "the step before": ("o", palette.RANKS[0]),
             "lost": ("X", palette.RANK_FAILED)}


@shows("8.4")
def show_kills(save_checkpoint: Callable, newest_checkpoint: Callable) -> Picture:
    """Kills a job of two ranks while it saves, 30 times with the student's functions and 30 times
    with torch.save over the last file, and draws when, and what was found afterwards."""
    savers = (series.students(save_checkpoint, newest_checkpoint), series.over_the_last())
    with processes.temporary_folder() as folder, progress_bar(total=len(savers) * KILLS,
                                                              desc="kills", unit="") as bar:
        runs = {saver.name: _all_kills(saver, Path(folder, f"saver_{number}"), bar)
                for number, saver in enumerate(savers)}
    figure, axes = canvas(WIDTH, 4.3, ncols=2, sharey=True)
    for ax, (name, kills) in zip(axes, runs.items(), strict=True):
        _draw_kills(ax, kills)
        ax.set_title(f"{name}:\n{_lost(kills)} of {KILLS} lost", fontsize=10, loc="left")
        ax.set_xlabel("ms since the save began")
    axes[0].set_ylabel("kill")
    axes[0].invert_yaxis()
    marks.legend_above(figure, [Line2D([], [], linestyle="", marker=marker, color=colour,
                                       markersize=7, label=name if name == "lost" else
                                       f"{name} was found")
                                for name, (marker, colour) in _OUTCOMES.items()])
    guess, (_, naive) = guessed("8.4"), runs.values()
    note = "" if guess is None else (f"You guessed {guess:g} lost by torch.save over the last "
                                     f"file; it lost {_lost(naive)}.")
    marks.note_below(figure, note)
    words = [f"{name}: {counted(KILLS, 'kill')} while it saved, {_lost(kills)} lost; found: "
             + ", ".join(f"{sum(_outcome(kill) == outcome for kill in kills)} {outcome}"
                         for outcome in _OUTCOMES)
             for name, kills in runs.items()]
    return Picture(figure, "\n".join([*words, *filter(None, [note])]), data=(runs, guess))


def _all_kills(saver, folder, bar) -> list[Kill]:
    found = []
    for kill in series.kills(saver, folder, KILLS):
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
    ax.set_yticks([1, 10, 20, KILLS])
    ax.grid(axis="x", color=palette.GRID)


@shows("8.4")
def show_damage(save_checkpoint: Callable, newest_checkpoint: Callable) -> Table:
    """A table of the kinds of damage to the newest of three checkpoints, and what the student's
    function found and said."""
    with processes.temporary_folder() as folder:
        rows = [(damage.what, "–" if path is None else Path(path).name,
                 "; ".join(f"{Path(name).name}: {problem}".replace(f"{folder}/", "")
                           for name, problem in problems.items()) or "–")
                for damage, path, problems in series.damages(save_checkpoint, newest_checkpoint,
                                                             Path(folder))]
    return Table("Checkpoints step_8, step_9 and step_10 of two ranks", ("damage", "found",
                 "what is wrong with the newer ones"), rows, left=2)
