"""The picture of stragglers: each rank's own time, and its time in collectives, step by step."""

from collections.abc import Callable
from statistics import median

from matplotlib.lines import Line2D

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.surviving_failure.crashes.slow_ranks import (
    RANKS,
    SLOWER,
    RecordedRun,
    recorded_stragglers,
)


@shows("8.11")
def show_stragglers(find_straggler: Callable) -> Picture:
    """Draws, for four recorded runs, what each rank needs for its own data and computing and how
    long it is in collectives, and what find_straggler says of them."""
    runs = recorded_stragglers()
    said = {name: find_straggler(run.timings) for name, run in runs.items()}
    figure, axes = canvas(WIDTH, 4.6, nrows=2, ncols=len(runs), sharex=True, sharey=True)
    for column, (name, run) in enumerate(runs.items()):
        _draw_run(axes[:, column], run, said[name])
        answer = _answer(said[name]).replace(", ", ",\n")
        axes[0, column].set_title(f"{name}:\n{answer}", fontsize=9.5, loc="left")
    axes[0, 0].set_ylabel("ms of its own:\ndata, computing")
    axes[1, 0].set_ylabel("ms in collectives")
    figure.supxlabel("step", fontsize=10)
    marks.legend_above(figure, [Line2D([], [], color=palette.rank(rank), label=f"rank {rank}")
                                for rank in range(RANKS)])
    unclear = [name for name, run in runs.items() if not run.is_clear]
    busy = [f"this machine is busy with something else, which shows in: {', '.join(unclear)}"]
    return Picture(figure, "\n".join([
        *(f"{name}: find_straggler says {_answer(said[name])}" for name in runs),
        *_costs(runs["slow rank"]), *busy * bool(unclear)]), data=(runs, guessed("8.11")))


def _draw_run(axes, run, said):
    for rank, own in enumerate(run.timings):
        is_slow = said is not None and said[0] == rank
        style = {"color": palette.rank(rank), "linewidth": 2.4 if is_slow else 1.2}
        axes[0].plot([1e3 * (step.data + step.compute) for step in own], **style)
        axes[1].plot([1e3 * step.collectives for step in own], **style)
    for ax in axes:
        ax.grid(axis="y", color=palette.GRID)
        if said is not None:
            ax.axvline(said[2], color=palette.MUTED, linewidth=1, linestyle=(0, (4, 3)))


def _answer(said) -> str:
    if said is None:
        return "nobody"
    rank, cause, since = said
    return f"{cause}{f' of rank {rank}' if rank is not None else ''}, since step {since}"


def _costs(run: RecordedRun) -> list[str]:
    """What the slow rank takes longer for, and what each step of all ranks does."""
    rank, _, since = run.straggler

    def longer(measured) -> tuple[float, float]:
        before = median(map(measured, range(since)))
        return before, median(map(measured, range(since, len(run.timings[0])))) - before

    own = run.timings[rank]
    _, more = longer(lambda step: own[step].data + own[step].compute)
    step, slower = longer(lambda step: median(sum(vars(each[step]).values())
                                              for each in run.timings))
    guess = guessed("8.11")
    yours = f" (your guess: {guess:g} %)" if guess is not None else ""
    return [f"one of {RANKS} ranks computes {SLOWER} times as much: {1e3 * more:.0f} ms more. Each "
            f"step of all ranks takes {1e3 * slower:.0f} ms more, {slower / step:.0%}{yours}"]
