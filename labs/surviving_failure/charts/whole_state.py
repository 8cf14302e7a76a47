"""What part A shows: which losses differ when one part of a job's state is left out, and a curve
that goes on through kills."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from matplotlib.lines import Line2D

from labs.exercises.generator import new_generator
from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.surviving_failure.checks.other_ranks import Functions, verify
from labs.surviving_failure.states.forgotten import (
    FOLLOWING,
    LEFT_OUT,
    forget_each,
    load_with_gradients,
    without_moments,
)
from labs.surviving_failure.states.job import ZERO3
from labs.surviving_failure.states.killed_runs import Answer, Kill, killed_and_resumed
from labs.workers import devices, processes
from labs.workers.launcher import launch

# gloo cannot gather the shards of ranks that share a GPU (pytorch 132471), and 6 ranks share one.
ON_CPU = devices.on("cpu")
RANKS = 2
SAVED_ON, LOADED_ON = 4, (4, 2, 3, 6)
STEPS, KILLED_IN = 30, (8, 14, 23)
_MOMENTS = "moments forgotten at the first kill"


@shows("what a job forgets")
def show_forgotten() -> Table:
    """How far each loss is from that of the job that went on, for copies of a job that lack one
    part each."""
    by_rank = launch(forget_each, ranks=RANKS, quiet=True)
    rows = [(what, *(_distance([apart[what][step] for apart in by_rank])
                     for step in range(FOLLOWING))) for what in LEFT_OUT]
    guess = guessed("8.1")
    return Table(f"How far each loss is from that of the job that went on (DDP, {RANKS} ranks)",
                 ("left out", *_losses(FOLLOWING)), rows,
                 note="" if guess is None else
                 f"Your guess: without the schedule, loss {guess:g} is the first that is wrong.")


def _distance(by_rank) -> str:
    return "equal" if max(by_rank) == 0 else f"{max(by_rank):.1g}"


@shows("8.1")
def show_resumed(job_state: Callable, load_job_state: Callable) -> Picture:
    """Draws the losses of a job that was killed three times and resumed by the student's functions,
    over those of one that never was; and their difference, with that of a job whose moments were
    forgotten."""
    answer, dice = Answer(job_state, load_job_state, None), new_generator()
    kills = [Kill(dice.randrange(RANKS), step, 0) for step in KILLED_IN]
    with processes.temporary_folder() as folder:
        by_rank = killed_and_resumed(answer, RANKS, kills, STEPS, Path(folder), ("DDP",))
        forgetful = launch(without_moments, answer, Path(folder, "DDP"), KILLED_IN[0] - 1, STEPS,
                           ranks=RANKS, quiet=True)
    resumed, uninterrupted = (_mean([curves[number]["DDP"] for curves in by_rank])
                              for number in range(2))
    forgotten = _mean(forgetful)
    apart = [got - want for got, want in zip(resumed, uninterrupted, strict=True)]
    lost = [got - want for got, want in
            zip(forgotten, uninterrupted[-len(forgotten):], strict=True)]
    largest = max(map(abs, lost))
    words = (f"{STEPS} steps on {RANKS} ranks, killed in steps {', '.join(map(str, KILLED_IN))}: "
             f"the largest difference of a loss is {max(map(abs, apart)):g}; with {_MOMENTS} it is "
             f"{largest:.2g}")
    return Picture(_draw(resumed, uninterrupted, forgotten, apart, lost), words,
                   data=(resumed, uninterrupted, forgotten))


@shows("8.2")
@ON_CPU
def show_other_ranks(save_shards: Callable, load_shards: Callable, zero3: Callable) -> Table:
    """How far each loss is from that of the job that went on with 4 ranks, after its ZeRO-3 shards
    were loaded on other numbers of ranks."""
    functions = Functions(..., ..., save_shards, load_shards, zero3)
    apart = verify(functions, SAVED_ON, LOADED_ON, kinds=(ZERO3,))
    rows = [(ranks, *(_distance([difference]) for difference in differences))
            for ranks, differences in apart.items()]
    return Table(f"ZeRO-3, saved on {SAVED_ON} ranks: how far each loss is from that of the job "
                 "that went on", ("loaded on ranks", *_losses(len(rows[0]) - 1)), rows)


@shows("8.2")
@ON_CPU
def show_left_gradient(save_dcp: Callable, load_dcp: Callable) -> Table:
    """The same for FSDP2 through DCP, loaded into a new job, and into one whose parameters have
    gradients when `get_state_dict` is called."""
    with processes.temporary_folder() as folder:
        [found, *_] = launch(load_with_gradients, save_dcp, load_dcp, Path(folder), ranks=RANKS,
                             quiet=True)
    rows = [(what, *(_distance([difference]) for difference in differences))
            for what, differences in found.items()]
    return Table(f"FSDP2, {RANKS} ranks: how far each loss is from that of the job that went on",
                 ("the new job has", *_losses(FOLLOWING)), rows)


def _losses(count) -> list[str]:
    return [f"loss {step}" for step in range(1, count + 1)]


def _mean(by_rank) -> list[float]:
    return [fmean(losses) for losses in zip(*by_rank, strict=True)]


def _draw(resumed, uninterrupted, forgotten, apart, lost):
    figure, (above, below) = canvas(WIDTH, 4.6, nrows=2, sharex=True,
                                    gridspec_kw={"height_ratios": (3, 2)})
    steps = range(1, STEPS + 1)
    above.plot(steps, uninterrupted, color=palette.PREDICTED, linewidth=6, alpha=0.35,
               solid_capstyle="round")
    for begin, end in zip((1, *KILLED_IN), (*KILLED_IN, STEPS + 1), strict=True):
        above.plot(range(begin, end), resumed[begin - 1:end - 1], "o-", color=palette.RUNS[1],
                   markersize=4, linewidth=1.4)
    after = range(STEPS - len(lost) + 1, STEPS + 1)
    above.plot(after, forgotten, "s-", color=palette.RUNS[2], markersize=3, linewidth=1)
    below.axhline(0, color=palette.RULE, linewidth=1)
    below.plot(after, lost, "s-", color=palette.RUNS[2], markersize=3.5, linewidth=1.2)
    below.plot(steps, apart, "o-", color=palette.RUNS[1], markersize=4, linewidth=1.4)
    for ax in (above, below):
        for step in KILLED_IN:
            ax.axvline(step - 0.5, color=palette.DARKEST, linewidth=1, linestyle=(0, (4, 3)))
        ax.grid(axis="y", color=palette.GRID)
    above.set_ylabel("loss, mean of the ranks")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    marks.legend_above(figure, [
        Line2D([], [], color=palette.PREDICTED, linewidth=6, alpha=0.35, label="never interrupted"),
        Line2D([], [], color=palette.RUNS[1], marker="o", markersize=4,
               label="killed and resumed"),
        Line2D([], [], color=palette.RUNS[2], marker="s", markersize=3.5, label=_MOMENTS),
        Line2D([], [], color=palette.DARKEST, linewidth=1, linestyle=(0, (4, 3)),
               label="a rank is killed")])
    return figure
