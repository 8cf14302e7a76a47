"""Schedules of exercises 7.14 to 7.17, simulated and drawn, and the published bubble rates."""

import inspect
from collections.abc import Callable

from labs.checks.guesses import guessed
from labs.checks.verdicts import Wrong, shows
from labs.pictures.picture import Picture
from labs.pictures.schedules import DrawnSchedule, timelines
from labs.pictures.tables import Table
from labs.pipeline_parallel.schedule_targets import legal_schedule
from labs.predictions.pipelines.formulas import (
    GPIPE,
    INTERLEAVED,
    KINDS,
    ONE_F_ONE_B,
    ZB_H1,
    ZB_H2,
    Kind,
)
from labs.predictions.pipelines.published_bubbles import load_published_bubbles
from labs.predictions.pipelines.schedule import Schedule
from labs.predictions.pipelines.simulate import CLUSTER, RANK, Timeline, Times, simulate

_GUESSES = {GPIPE: "7.14", ONE_F_ONE_B: "7.15", INTERLEAVED: "7.16", ZB_H1: "7.17"}
KIND_OF = {"gpipe": GPIPE, "one_f_one_b": ONE_F_ONE_B, "interleaved": INTERLEAVED, "zb_h1": ZB_H1}


@shows("The picture of the schedule")
def show_schedule(lists: list, micro_batches: int, chunks: int = 1) -> Picture:
    """Draws a list of actions for each rank, simulated with a forward of 1 slot and a backward of
    2; or says which action is illegal."""
    timeline = _simulated(legal_schedule(lists, len(lists), micro_batches, chunks))
    return timelines([DrawnSchedule("schedule", timeline)])


@shows("The picture of the schedules")
def show_schedules(*functions: Callable, ranks: int, micro_batches: int, chunks: int = 2,
                   activation_gb: float | None = None) -> Picture:
    """Draws what the functions of 7.14 to 7.17 return, one below the other, beside their formulas.
    activation_gb: of one micro-batch on one rank; with it, peaks are in GB."""
    return timelines([_drawn(function, ranks, micro_batches, chunks, activation_gb)
                      for function in functions])


@shows("ZB-H2")
def show_zb_h2(zb_h1: Callable, ranks: int, micro_batches: int) -> Picture:
    """The student's ZB-H1, and below it ZB-H2 by the clock of one rank."""
    timeline = simulate(ZB_H2.build(ranks, micro_batches, 1))
    return timelines([_drawn(zb_h1, ranks, micro_batches, 1, None),
                      _drawn_kind(ZB_H2, timeline, ranks, micro_batches, clock=RANK)])


def _drawn(function, ranks, micro_batches, chunks, activation_gb) -> DrawnSchedule:
    kind = KIND_OF.get(function.__name__)
    takes_chunks = len(inspect.signature(function).parameters) > 2
    sizes = (ranks, micro_batches, chunks) if takes_chunks else (ranks, micro_batches)
    chunks = chunks if takes_chunks else 1
    try:
        timeline = _simulated(legal_schedule(function(*sizes), ranks, micro_batches, chunks))
    except Wrong as error:
        raise error.said_of(f"{function.__name__}{sizes}") from None
    if not kind:
        return DrawnSchedule(function.__name__, timeline)
    return _drawn_kind(kind, timeline, ranks, micro_batches, chunks, activation_gb)


def _drawn_kind(kind: Kind, timeline: Timeline, ranks, micro_batches, chunks=1,
                activation_gb=None, clock=CLUSTER) -> DrawnSchedule:
    """Beside the formulas, and the student's guesses if it is these sizes that they are of."""
    each = (activation_gb or 1) / chunks
    sizes = ranks, micro_batches, chunks
    guess = guessed(_GUESSES[kind]) if kind in _GUESSES and sizes[:2] == (4, 8) else None
    is_peak = kind is ONE_F_ONE_B
    return DrawnSchedule(
        kind.name, timeline, bubble=kind.bubble(*sizes), clock=clock,
        held=[peak * each for peak in timeline.peaks()],
        peaks=[kind.peak(*sizes, rank) * each for rank in range(ranks)],
        held_unit="GB" if activation_gb else "micro-batches",
        guessed_bubble=None if guess is None or is_peak else guess / 100,
        guessed_peak=None if guess is None or not is_peak else guess * each)


def _simulated(schedule: Schedule) -> Timeline:
    """In slots: F, B and W of a rank's layers take 1 each."""
    return simulate(schedule, Times().chunked(schedule.chunks))


@shows("Published bubbles")
def show_published_bubbles(model: str = "6.2B") -> Table:
    """The simulation with the times that the Zero Bubble paper measured for a model, beside the
    rates that it prints and the formulas."""
    rows = []
    for row in load_published_bubbles():
        if row.id == model:
            sizes = row.ranks, row.micro_batches, row.chunks
            timeline = simulate(row.kind.build(*sizes), row.times.chunked(row.chunks))
            rows.append((row.kind.name, row.ranks, row.micro_batches, f"{row.bubble:.4f}",
                         f"{timeline.bubble(RANK):.4f}", f"{timeline.bubble(CLUSTER):.4f}",
                         f"{row.kind.bubble(*sizes, row.times):.4f}"))
    rows.sort(key=lambda row: (row[2], list(KINDS).index(row[0])))
    return Table(f"Bubble as a share of the step, {model} model",
                 ("schedule", "ranks", "micro-batches", "published", "simulated, clock of one rank",
                  "simulated, clock of the cluster", "formula, no transfers"), rows,
                 note="Times and published rates: Zero Bubble paper (arXiv 2401.10241).")
