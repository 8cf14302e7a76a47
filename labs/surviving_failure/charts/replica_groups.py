"""The picture of exercise 8.12: what a job keeps that is cut into replica groups."""

import math
import random
from collections.abc import Callable
from itertools import accumulate, takewhile

from labs.exercises.numbers import require_number
from labs.exercises.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.failures.simulation import exponential_gaps
from labs.surviving_failure.checks.save_plan import CLUSTERS

GROUPS = (1, 2, 4, 8, 16, 32, 64)
GPUS = (16_384, 131_072)
WAIT, END = 10.0, 5 * 86_400.0  # seconds


@shows("8.12")
def show_replica_groups(kept_share: Callable) -> Picture:
    """Draws the share of its work that a job does in five days, by the student's function, over the
    number of its replica groups. Failures come as often per GPU as in Llama 3's training."""
    llama = CLUSTERS[0]
    figure, ax = canvas(WIDTH, 3.6)
    words, drawn = [], {}
    for gpus, colour in zip(GPUS, palette.RUNS[2:], strict=False):
        mean = 3600 * llama.gpu_hours / gpus
        # whole seconds: sums and differences have no rounding, whichever an answer compares
        times = [round(time) for time in takewhile(lambda time: time < END, accumulate(
            exponential_gaps(mean, gpus)))]
        shares = [_share(kept_share, groups, times, llama.restart) for groups in GROUPS]
        ax.plot(GROUPS, shares, "o-", color=colour, markersize=5, linewidth=1.4,
                label=f"{gpus:,} GPUs, a failure every {mean / 60:,.0f} min")
        ax.axhline(math.exp(-WAIT / mean), color=colour, linestyle="--", linewidth=1,
                   label=f"its waits of {WAIT:.0f} s alone")
        drawn[gpus] = dict(zip(GROUPS, shares, strict=True))
        words.append(f"{gpus:,} GPUs, {len(times)} failures in five days: {shares[0]:.1%} with one "
                     f"group, " + ", ".join(f"{share:.1%} with {groups}" for groups, share in
                                            list(zip(GROUPS, shares, strict=True))[1:]))
    ax.set_xscale("log", base=2)
    ax.set_xticks(GROUPS, [f"{groups}" for groups in GROUPS])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_ylim(min(0.5, *drawn[GPUS[-1]].values()), 1.02)
    ax.grid(axis="y", color=palette.GRID)
    ax.set_xlabel("replica groups")
    ax.set_ylabel("work that is done")
    marks.legend_above(figure, ax.get_legend_handles_labels()[0])
    return Picture(figure, "\n".join([f"restarts of {llama.restart:.0f} s", *words]), data=drawn)


def _share(kept_share, groups, times, restart) -> float:
    """Each failure hits one of the groups, the same ones in every run."""
    dice = random.Random(groups)
    failures = [(time, dice.randrange(groups)) for time in times]
    return require_number(kept_share(groups, failures, WAIT, restart, END), f"{groups} groups")
