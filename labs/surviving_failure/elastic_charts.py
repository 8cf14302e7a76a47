"""The pictures of part D: a run whose ranks are killed, and what each restart took."""

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.checks.guesses import guessed
from labs.checks.verdicts import Verdict, Wrong, shows
from labs.meters.metrics import Metric
from labs.pictures import marks, palette
from labs.pictures.live import live_picture
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.surviving_failure import elastic_kills
from labs.surviving_failure.elastic_kills import ElasticRun
from labs.surviving_failure.elastic_metrics import final_curve, run_again
from labs.surviving_failure.restarts import PARTS, Restart, restart_after

_FIRST, _KILLED = palette.RUNS[1], palette.RESTART["notices"]
_STARTING, _AGAIN = palette.RESTART["starts"], palette.RESTART["again"]
COLOURS = dict(zip(PARTS, palette.RESTART.values(), strict=True))  # without "trains"


def run_with_kills(script: str, victims: dict[int, int], *options: object, ranks: int = 2,
                   max_restarts: int = 3) -> ElasticRun | Verdict:
    """Runs the script under torchrun and kills a rank with SIGKILL as soon as a step is noted.
    victims: step -> rank. Draws the run while it runs. Returns an ElasticRun, or a Verdict where
    the script has a gap or is missing."""
    with live_picture() as live:
        return elastic_kills.run_with_kills(
            script, victims, *options, ranks=ranks, max_restarts=max_restarts,
            show=lambda run: live.show(lambda: draw_run(run)))


@shows("The run and its kills")
def show_run(run: ElasticRun, script: str = "") -> Picture:
    """Draws the losses and the ranks over the time; and over the steps, with those of the same
    script where nobody kills its ranks, which is run now."""
    _raise_if_failed(run)
    return draw_run(run, elastic_kills.run_alone(script) if script else None)


def _raise_if_failed(run):
    if run.result is None or run.result.code != 0 or not run.metrics.steps:
        raise Wrong(f"the run has failed: {run!r}",
                    "`print(run.result.output[-3000:])` shows what it printed last.",
                    code="run_failed")


def draw_run(run: ElasticRun, alone: ElasticRun | None = None) -> Picture:
    """What there is of a run by now."""
    figure, axes = canvas(WIDTH, marks.HEADLINE + (5.6 if alone else 3.8),
                          nrows=3 if alone else 2,
                          height_ratios=[3, 0.8, 2.2] if alone else [3, 0.8])
    words = _in_words(run, alone)
    marks.headline(figure, words.splitlines()[0])
    axes[0].sharex(axes[1])
    _draw_losses(axes[0], run)
    _draw_ranks(axes[1], run)
    axes[1].set_xlim(0, max(10.0, _end(run) - run.began))
    axes[1].set_xlabel("seconds")
    if alone:
        _draw_steps(axes[2], run, alone)
    marks.legend_above(figure, _legend(run))
    return Picture(figure, words, data=run)


def _end(run) -> float:
    return max([run.began, *(step.time for step in run.metrics.steps), *run.saved.values(),
                *(event.time for event in run.log)])


def _draw_losses(ax, run):
    steps = run.metrics.steps
    again = {id(step) for step in run_again(steps)}
    for restart in sorted({step.restart for step in steps}):
        own = [step for step in steps if step.restart == restart]
        ax.plot([step.time - run.began for step in own], [step.loss for step in own],
                color=_FIRST, linewidth=1.6)
        lost = [step for step in own if id(step) in again]
        ax.plot([step.time - run.began for step in lost], [step.loss for step in lost],
                color=_AGAIN, linewidth=4, alpha=0.85, solid_capstyle="round", zorder=3)
    for done, seen in run.saved.items():
        before = [step for step in steps if step.step == done - 1 and step.time <= seen]
        if before:
            ax.plot(before[0].time - run.began, before[0].loss, "v", color=palette.INK,
                    markersize=5, zorder=4)
    ax.set_ylabel("loss")
    ax.tick_params(axis="x", labelbottom=False)
    ax.grid(axis="y", color=palette.GRID)
    _mark_kills(ax, run)


def _mark_kills(ax, run):
    for kill in run.kills:
        at = kill.time - run.began
        ax.axvline(at, color=_KILLED, linewidth=1.2, linestyle=(0, (4, 3)))
        ax.annotate(f" rank {kill.rank}", (at, 1), xycoords=("data", "axes fraction"), va="top",
                    ha="left", color=_KILLED, fontsize=9)


def _draw_ranks(ax, run):
    """How many processes there are: pale while they import, and have not joined yet."""
    for begin, end, number, joined in ranks_over_time(run):
        ax.fill_between([begin - run.began, end - run.began], 0, number, linewidth=0,
                        color=_FIRST if joined else _STARTING)
    for kill in run.kills:
        ax.axvline(kill.time - run.began, color=_KILLED, linewidth=1.2, linestyle=(0, (4, 3)))
    most = max((joined.ranks for joined in run.metrics.joined), default=1)
    ax.set_ylim(0, most + 0.15)
    ax.set_yticks(range(most + 1))
    ax.set_ylabel("ranks")


def ranks_over_time(run: ElasticRun) -> list[tuple[float, float, int, bool]]:
    """(from, to, processes, whether they have joined), in seconds since the epoch."""
    ranks = max((joined.ranks for joined in run.metrics.joined), default=2)
    changes = [*((event.time, ranks, False) for event in run.log if event.what == "starting"),
               *((joined.time, joined.ranks, True) for joined in run.metrics.joined),
               *((kill.time, ranks - 1, True) for kill in run.kills),
               *((event.time, 0, False) for event in run.log
                 if event.what in ("stopped", "finished"))]
    ends = [*sorted(changes), (_end(run), 0, False)]
    return [(begin, end, number, joined) for (begin, number, joined), (end, *_) in pairwise(ends)
            if number]


def _draw_steps(ax, run, alone):
    curve, whole = final_curve(run.metrics.steps), final_curve(alone.metrics.steps)
    ax.plot(list(whole), list(whole.values()), color=palette.BORDER, linewidth=7,
            solid_capstyle="round")
    ax.plot(list(curve), list(curve.values()), color=_FIRST, linewidth=1.6)
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.grid(axis="y", color=palette.GRID)
    ax.annotate(_compared(curve, whole), (0.99, 0.95), xycoords="axes fraction", ha="right",
                va="top", fontsize=10)


def _compared(curve, whole) -> str:
    equal = sum(curve.get(step) == loss for step, loss in whole.items())
    return (f"wide: the uninterrupted run; {equal} of {len(whole)} losses are equal to the "
            "last bit")


def _legend(run) -> list:
    handles = [Line2D([], [], color=_FIRST, linewidth=1.6, label="loss"),
               Line2D([], [], color=_AGAIN, linewidth=4, label="steps that are run again"),
               Line2D([], [], linestyle="", marker="v", color=palette.INK, label="checkpoint"),
               Line2D([], [], color=_KILLED, linestyle=(0, (4, 3)), label="a rank is killed"),
               Patch(color=_FIRST, label="ranks that have joined"),
               Patch(color=_STARTING, label="ranks that start")]
    return handles


def _in_words(run, alone) -> str:
    steps = run.metrics.steps
    words = [repr(run) if run.result else f"{len(steps)} steps so far"]
    words += [f"rank {kill.rank} is killed after step {kill.step}, {kill.time - run.began:.1f} s "
              "after the start" for kill in run.kills]
    words.append(f"{len(run.saved)} checkpoints; {len(run_again(steps))} steps are run again")
    if alone:
        words.append(_compared(final_curve(steps), final_curve(alone.metrics.steps)))
    return "\n".join(words)


class _RestartBar(marks.LabelledBar):
    def style(self, part: str) -> dict:
        return {"facecolor": COLOURS[part], "edgecolor": "white", "linewidth": 0.5}


@shows("What a restart takes")
def show_restarts(run: ElasticRun) -> Picture:
    """Draws a row for each kill: what passed until the steps that were lost were done again."""
    _raise_if_failed(run)
    found = [(kill, restart) for kill in run.kills
             if (restart := restart_after(kill.time, run.log, run.metrics))]
    if not found:
        raise Wrong("no rank was killed in this run, or none was started again", code="no_kill")
    return draw_restarts([f"rank {kill.rank} killed\nafter step {kill.step}" for kill, _ in found],
                         [restart for _, restart in found], guessed("8.6"))


def draw_restarts(names: Sequence[str], restarts: Sequence[Restart],
                  guess: float | None = None, axis: str = "seconds since the kill") -> Picture:
    """A row for each restart, with the seconds of its parts end to end."""
    bars = [_RestartBar(restart.seconds, f"{restart.total:.1f} s", guessed=guess)
            for restart in restarts]
    by_part = {part: sum(restart.seconds[part] for restart in restarts)
               for part in restarts[0].seconds}
    most = max(by_part, key=by_part.get)
    lesson = (f"“{most}” takes {by_part[most] / sum(by_part.values()):.0%} of "
              + ("a restart" if len(restarts) == 1 else "the restarts"))
    answers = marks.answers(zip(names, bars, strict=True), "s")
    figure, _ = marks.bar_chart(names, [bars], [axis], 1.3 + 0.6 * len(names) + marks.HEADLINE
                                + marks.NOTE_LINE * len(answers))
    marks.headline(figure, lesson)
    marks.note_below(figure, "\n".join(answers))
    marks.draw_legend(figure, bars)
    words = [f"{name.replace(chr(10), ' ')}: {bar.label}: "
             + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in restart.seconds.items())
             + "".join(f"; {words}" for words in bar.tick_words())
             for name, bar, restart in zip(names, bars, restarts, strict=True)]
    return Picture(figure, "\n".join([lesson, *words, *answers]), data=list(restarts),
                   metrics=[Metric(f"restart, {name.replace(chr(10), ' ')}", restart.total, "s")
                            for name, restart in zip(names, restarts, strict=True)])
