"""Exercise 7.14: all ranks at work at once, and how many micro-batches that keeps in memory."""

from collections.abc import Callable, Sequence

from labs.checks.generator import new_generator
from labs.checks.numbers import Cause, judge_number, require_number
from labs.checks.verdicts import check, shows
from labs.pictures.tables import Table
from labs.pipeline_parallel.schedule_charts import KIND_OF
from labs.pipeline_parallel.schedule_targets import SIZES, judge_targets, legal_schedule
from labs.predictions.pipelines.formulas import GPIPE
from labs.predictions.pipelines.schedule import B, ChunkAction, F


@check("7.14")
def check_gpipe(gpipe: Callable, peak_in_flight: Callable):
    """gpipe(ranks, micro_batches): a list of actions for each rank. peak_in_flight(actions): the
    largest number of micro-batches whose forward has run and whose backward has not."""
    for name, actions in _lists():
        judge_number(peak_in_flight(list(actions)), max(_in_flight(actions)), _causes(actions),
                     f"peak_in_flight, {name}, in micro-batches", "",
                     "Count one more after each F and one less after each B.")
    targets = judge_targets(
        gpipe, GPIPE, SIZES,
        "All forwards first: a rank that has sent micro-batch i on can begin micro-batch i + 1.",
        "Run each backward once.")
    return f"{targets}; the peak is that of any list"


def _lists() -> list[tuple[str, list[ChunkAction]]]:
    """(name, a rank's actions)."""
    # In the first one each known mistake leads to a number of its own.
    found = [("FBFFBFFBFFBFBBBB", _actions("FBFFBFFBFFBFBBBB")), ("FFFFBBBB", _actions("FFFFBBBB")),
             ("FBFBFB", _actions("FBFBFB")), ("FB", _actions("FB"))]
    rng = new_generator()
    for _ in range(3):
        kinds, in_flight = "", 0
        while len(kinds) < 24:
            # A backward needs a forward before it, and all are done in the end.
            forwards = kinds.count("F")
            kind = "F" if not in_flight else "B" if forwards == 12 else rng.choice("FFB")
            kinds, in_flight = kinds + kind, in_flight + (1 if kind == "F" else -1)
        found.append((kinds, _actions(kinds)))
    return found


def _actions(kinds: str) -> list[ChunkAction]:
    """The actions of these kinds: the micro-batches of each kind count from 0."""
    make, counts, found = {"F": F, "B": B}, {"F": 0, "B": 0}, []
    for kind in kinds:
        found.append(make[kind](counts[kind]))
        counts[kind] += 1
    return found


def _in_flight(actions: Sequence) -> list[int]:
    """How many micro-batches are in flight after each action."""
    now, found = 0, []
    for action in actions:
        now += 1 if action.kind == "F" else -1
        found.append(now)
    return found


def _causes(actions) -> list[Cause]:
    kinds, counts = "".join(action.kind for action in actions), _in_flight(actions)
    hint = "A backward frees what the forward of its micro-batch has saved."
    return [
        Cause("never_freed", kinds.count("F"), "that counts all forwards", hint),
        Cause("actions_counted", len(kinds), "that counts all actions", hint),
        Cause("end_not_peak", counts[-1], "that is the number at the end",
              "Keep the largest number on the way."),
        Cause("peak_missed", max(count for kind, count in zip(kinds, counts, strict=True)
                                 if kind == "B"), "that looks only after each backward",
              "The peak is after a forward."),
        Cause("first_forwards", len(kinds) - len(kinds.lstrip("F")),
              "that counts the forwards before the first backward",
              "Later more can be in flight: go through the complete list."),
        Cause("longest_run", max(map(len, kinds.split("B"))),
              "that counts forwards without a backward between them",
              "Micro-batches of earlier forwards can still be in flight.")]


@shows("7.14")
def show_activations(peak_in_flight: Callable, *functions: Callable, ranks: int,
                     activation_gb: float) -> Table:
    """By the number of micro-batches: GB of activations on rank 0 under each of the student's
    schedules, and the bubble. activation_gb: of one micro-batch on one rank."""
    rows = []
    for micro_batches in (8, 16, 32, 64):
        held = []
        for function in functions:
            lists = function(ranks, micro_batches)
            legal_schedule(lists, ranks, micro_batches)
            held.append(activation_gb * require_number(peak_in_flight(lists[0]), "peak_in_flight"))
        bubble = GPIPE.bubble(ranks, micro_batches, 1)
        rows.append((f"{micro_batches}", f"{bubble:.0%}", *(f"{gb:.1f}" for gb in held)))
    names = [KIND_OF[function.__name__].name if function.__name__ in KIND_OF else
             function.__name__ for function in functions]
    return Table(f"GB of activations on rank 0 of {ranks}",
                 ("micro-batches", "bubble", *names), rows)
