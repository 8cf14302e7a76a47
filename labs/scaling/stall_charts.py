"""The picture of pipelines that stall: what was measured beyond the prediction, by micro-batch."""

import functools
from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import numpy as np
from matplotlib.patches import Patch

from labs.checks.verdicts import print_in_script
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.gpu_runs.folder import load
from labs.predictions.gpu_runs.run import GpuRun
from labs.predictions.gpu_runs.scoreboard import predicted_seconds
from labs.words import counted

STALLED = 0.25  # seconds a micro-batch: between the two heaps of the picture
_LAUNCHED = 3.0  # a micro-batch that the host takes longer to start hides what is missing
NODES = 4  # fewer have hardly a pipeline that stalls
_KINDS = {"2 stages": (2, 2), "4 stages and more": (3, 10**6)}
_END = 1.8


class Pipeline(NamedTuple):
    """missing: measured less predicted seconds, without stalls, for each micro-batch."""

    run: GpuRun
    missing: float


@functools.cache
def pipelines() -> list[Pipeline]:
    """nanotron's pipelines on four nodes and more."""
    found = []
    for run in load():
        if not (run.job and run.seconds and run.source == "nanotron" and run.plan.pipeline > 1
                and run.gpus >= NODES * run.job.gpus_per_node):
            continue
        healthy = replace(run.job.code, overheads=replace(run.job.code.overheads, stall=0.0))
        seconds = predicted_seconds(replace(run, job=replace(run.job, code=healthy)))
        often = run.plan.micro_batches(run.job)
        if seconds / often < _LAUNCHED:
            found.append(Pipeline(run, (run.seconds - seconds) / often))
    return found


def farthest() -> tuple[GpuRun, GpuRun]:
    """Two runs of one plan, once under DDP and once under ZeRO-1: the pair whose seconds are
    farthest apart, the faster one first."""
    found = defaultdict(dict)
    for run, _ in pipelines():
        plan = run.plan
        found[run.job.name, run.gpus, plan.tensor, plan.pipeline, plan.micro_batch].setdefault(
            plan.sharding, run)
    both = [sorted(runs.values(), key=lambda run: run.seconds) for runs in found.values()
            if len(runs) == 2]
    return max(both, key=lambda runs: runs[1].seconds / runs[0].seconds)


def show_stalls() -> Picture:
    """Draws how many pipelines took so much longer than their kernels, hosts and links need, for
    each micro-batch."""
    rows = pipelines()
    missing = {name: [min(row.missing, _END - 0.01) for row in rows
                      if low <= row.run.plan.pipeline <= high]
               for name, (low, high) in _KINDS.items()}
    stalled = {name: [value for value in values if value > STALLED]
               for name, values in missing.items()}
    number = sum(map(len, stalled.values()))
    two, more = (median(values) for values in stalled.values())
    lesson = (f"{number} of {len(rows)} pipelines stall: {two:.1f} s for each micro-batch with 2 "
              f"stages, {more:.1f} s with more")
    figure, ax = canvas(WIDTH, 3.0 + marks.HEADLINE)
    marks.headline(figure, lesson)
    colours = dict(zip(_KINDS, palette.RUNS[2:0:-1], strict=True))
    ax.hist(list(missing.values()), bins=np.arange(-0.2, _END + 0.05, 0.05), stacked=True,
            color=list(colours.values()), edgecolor=palette.PAPER, linewidth=0.5)
    ax.set_xlim(-0.2, _END)
    ax.set_xlabel("seconds for each micro-batch, measured less predicted")
    ax.set_ylabel("runs")
    marks.whole_numbers(ax.yaxis)
    marks.legend_above(figure, [Patch(color=colour, label=name)
                                for name, colour in colours.items()])
    fast, slow = farthest()
    note = (f"{slow.job.name} on {counted(slow.gpus, 'GPU')}, TP {slow.plan.tensor} × PP "
            f"{slow.plan.pipeline}, micro-batch {slow.plan.micro_batch}: {fast.seconds:.2f} s "
            f"under {fast.plan.sharding}, {slow.seconds:.0f} s under {slow.plan.sharding}.")
    marks.note_below(figure, note)
    shares = [f"{nodes} nodes: {sum(row.missing > STALLED for row in own)} of {len(own)} stall"
              for nodes in sorted({row.run.gpus // 8 for row in rows})
              for own in [[row for row in rows if row.run.gpus // 8 == nodes]]]
    return print_in_script(Picture(figure, "\n".join([lesson, *shares, note]), data=rows))
