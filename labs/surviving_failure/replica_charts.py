"""A replica group is lost and replaced: the losses, who takes part, and the time that it costs
beside a restart."""

from collections.abc import Iterable
from itertools import groupby

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.checks.guesses import guessed
from labs.checks.verdicts import shows
from labs.meters.metrics import Metric
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.surviving_failure.elastic_kills import ElasticRun
from labs.surviving_failure.replica_process import BATCH
from labs.surviving_failure.replica_runs import GROUPS, REPLACEMENT, SILENT, TITLE, ReplicaRun, Step
from labs.surviving_failure.restarts import restart_after

_ROWS = {GROUPS[0]: 0, GROUPS[1]: 1, REPLACEMENT: 1}
_HEIGHT = 0.5
_ALONE = 0.35  # opacity of the line of a group that trains alone


@shows(TITLE)
def show_replicas(run: ReplicaRun) -> Picture:
    """Draws the losses of both replica groups over time, and when each of them trained, waited or
    started."""
    guess, stall = guessed("8.12"), run.stall
    figure, (top, below) = canvas(
        WIDTH, 4.4 + marks.HEADLINE + marks.NOTE_LINE * (guess is not None), nrows=2, sharex=True,
        gridspec_kw={"height_ratios": [3, 1.5]})
    for name, steps in run.steps.items():
        together = [step for step in steps if step.time >= 0]
        top.plot([step.time for step in together], [step.loss for step in together], "o-",
                 color=palette.rank(_ROWS[name]), markersize=3.5, linewidth=1)
        _draw_row(below, _ROWS[name], together)
    below.barh(0, stall.seconds, left=stall.time - stall.seconds, height=_HEIGHT,
               facecolor=palette.PAPER, edgecolor=palette.RANK_WAITS, hatch="////", linewidth=0.8)
    trains = next(step for step in run.steps[REPLACEMENT] if step.groups == len(GROUPS))
    below.barh(1, trains.time - run.replaced_at, left=run.replaced_at, height=_HEIGHT,
               facecolor=palette.SURFACE, edgecolor=palette.BORDER)
    lesson = (f"Group 1 is killed: group 0 waits {stall.seconds:.1f} s and trains alone; after "
              f"{trains.time - run.killed_at:.1f} s both train")
    answer = marks.answered(guess, stall.seconds, "s")
    marks.headline(figure, lesson)
    marks.note_below(figure, answer)
    if guess is not None:
        below.plot(run.killed_at + guess, 0, zorder=4, **marks.GUESS_MARKER)
    for ax in (top, below):
        ax.axvline(run.killed_at, color=palette.RANK_FAILED, linewidth=1.2)
    below.set_yticks([0, 1], ["group 0", "group 1"])
    below.set_ylim(1.6, -0.6)
    below.set_xlabel("seconds")
    top.set_ylabel(f"loss of {BATCH} samples")
    top.grid(axis="y", color=palette.GRID)
    marks.legend_above(figure, [
        *(Line2D([], [], color=palette.rank(row), marker="o", markersize=3.5, label=f"group {row}")
          for row in (0, 1)),
        Line2D([], [], color=palette.RANK_FAILED, label="SIGKILL"),
        Patch(facecolor=palette.PAPER, edgecolor=palette.RANK_WAITS, hatch="////",
              label="waits for the lighthouse"),
        Patch(facecolor=palette.SURFACE, edgecolor=palette.BORDER, label="starts, heals"),
        *([Line2D([], [], linestyle="", label="your guess", **marks.GUESS_MARKER)]
          if guess is not None else [])])
    words = [lesson, _words(run, trains), *filter(None, [answer])]
    return Picture(figure, "\n".join(words), data=run, metrics=_metrics(run))


def _draw_row(ax, row, steps: Iterable[Step]):
    """A bar for each stretch of steps with the same number of groups; pale where a group is alone.
    """
    for groups, found in groupby(steps, key=lambda step: step.groups):
        found = list(found)
        left = found[0].time - min(found[0].seconds, 2 * found[-1].seconds)
        ax.barh(row, found[-1].time - left, left=left, height=_HEIGHT, color=palette.rank(row),
                alpha=1.0 if groups == len(GROUPS) else _ALONE, linewidth=0)


def _words(run, trains) -> str:
    hashes = {name: digest[:12] for name, digest in run.digests.items()}
    equal = "equal" if len(set(hashes.values())) == 1 else "NOT equal"
    return (f"group 1 is killed at {run.killed_at:.1f} s; group 0 waits {run.stall.seconds:.1f} s "
            f"in one step and continues alone; a replacement starts at {run.replaced_at:.1f} s and "
            f"trains with it from step {trains.step}, at {trains.time:.1f} s\nparameters in the "
            f"end are {equal}: {', '.join(f'{name} {short}' for name, short in hashes.items())}")


def _metrics(run) -> list[Metric]:
    return [Metric("torchft stall", run.stall.seconds, "s"),
            Metric("torchft one group short", run.alone, "s")]


@shows(TITLE)
def show_digests(run: ReplicaRun) -> Table:
    """The SHA-256 of each group's parameters in the end, and the steps that it took."""
    rows = [(name, str(len(run.steps[name])), str(run.steps[name][-1].step),
             run.digests.get(name, "killed")[:16]) for name in run.steps]
    return Table("Parameters in the end", ("process", "steps taken", "last step", "SHA-256 begins"),
                 rows)


@shows(TITLE)
def show_time_lost(run: ReplicaRun, restarted: ElasticRun) -> Table:
    """Seconds that a lost group costs, beside those of torchrun's restarts after a killed rank."""
    stall, short = run.stall.seconds, run.alone - run.stall.seconds
    rows = [("torchft, two groups", f"{stall:.1f} s", f"{short:.1f} s",
             f"{stall + short / len(GROUPS):.1f} s")]
    rows += [(f"restart, rank {kill.rank} killed", f"{restart.total:.1f} s", "0 s",
              f"{restart.total:.1f} s")
             for kill in restarted.kills
             if (restart := restart_after(kill.time, restarted.log, restarted.metrics))]
    return Table("What one failure costs", ("", "nobody trains", "half of the job trains",
                                            "lost, as seconds of the whole job"), rows,
                 note=f"With torchft's default, 5 s without a heartbeat in place of {SILENT:g}, "
                      f"nobody trains for {5 - SILENT:g} s longer.")
