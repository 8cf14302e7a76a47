"""Predictions beside what was measured on GPUs, by kind of row.

Seconds, memory at the peak, whether a job fits, and which of the measured plans would be chosen;
ours beside what others would say of the same rows.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from labs.predictions.gpu_runs.estimators import ESTIMATORS, Estimator
from labs.predictions.gpu_runs.fit import MEMORY, SECONDS, predicted_without
from labs.predictions.gpu_runs.run import GpuRun
from labs.predictions.plans.calibration import NoCalibration, calibrated
from labs.predictions.plans.exact import counted_memory
from labs.predictions.plans.intervals import COUNTED, memory_factors, seconds_factors
from labs.predictions.plans.job import training_run
from labs.predictions.plans.memory import fits, rank_memory
from labs.predictions.step_time import step_time

OURS = "this planner"
CALIBRATED = "calibrated by one run"
HELD_OUT = "fitted without its rows"


@dataclass(frozen=True)
class Row:
    """A run beside its predictions. quantity: "seconds" or "memory" (bytes). predicted: estimator
    -> value, None where it refuses the row. low, high: of our interval."""

    run: GpuRun
    quantity: str
    group: str
    measured: float
    predicted: dict[str, float | None]
    low: float
    high: float

    @property
    def is_held(self) -> bool:
        """Whether the interval holds what was measured."""
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class Score:
    """Of an estimator on the rows of a group, in percent: the median error without sign, the median
    error, the one that nine of ten rows stay below, and the worst. held: share of the rows within
    the interval, None where there is none."""

    rows: int
    refused: int
    median: float
    bias: float
    nine_of_ten: float
    worst: float
    held: float | None = None


@dataclass(frozen=True)
class Scoreboard:
    """rows: all that can be compared. refused: reason -> rows. fit: counts of rows that ran or did
    not, by what was predicted. choices: (model, GPUs) -> speed of the chosen plan over the best
    measured one's. estimators: those that were asked beside us."""

    rows: list[Row]
    refused: dict[str, int]
    fit: dict[str, int]
    choices: dict[tuple[str, int], float] = field(default_factory=dict)
    estimators: tuple[Estimator, ...] = ()

    def groups(self) -> list[tuple[str, str]]:
        """(quantity, group), seconds first; a group that has the same rows as one before it is left
        out."""
        found = defaultdict(set)
        for row in self.rows:
            found[row.quantity, row.group].add(row.run.id)
        distinct = {}
        for (quantity, group), ids in sorted(found.items()):
            distinct.setdefault((quantity, frozenset(ids)), group)
        return sorted(((quantity, group) for (quantity, _), group in distinct.items()),
                      key=lambda one: (one[0] != "seconds", one[1]))

    def scores(self, quantity: str, group: str) -> dict[str, Score]:
        """Estimator -> its score on a group's rows."""
        rows = [row for row in self.rows if (row.quantity, row.group) == (quantity, group)]
        names = dict.fromkeys(name for row in rows for name in row.predicted)
        return {name: found for name in names if (found := _score(rows, name))}

    def answered(self, estimator: Estimator) -> tuple[int, int]:
        """Runs whose quantity the estimator predicts, and those that it refuses."""
        # a run's seconds can be a row of two groups
        known = {row.run.id: bool(row.predicted[estimator.name]) for row in self.rows
                 if row.quantity == estimator.quantity}
        return sum(known.values()), len(known) - sum(known.values())


def compare(runs: Iterable[GpuRun], progress: Callable[[int], None] = lambda done: None,
            extra: Iterable[Estimator] = (), with_held_out: bool = False) -> Scoreboard:
    """The scoreboard of these runs. extra: estimators to ask beside ESTIMATORS. with_held_out: also
    with constants that were fitted without the row's model or code base, which takes longer."""
    runs, rows, refused = list(runs), [], defaultdict(int)
    asked = (*ESTIMATORS, *extra)
    corrected = _calibrations(runs)
    for number, run in enumerate(runs):
        progress(number)
        if run.refused:
            refused[run.refused] += 1
            continue
        if run.seconds:
            rows += _seconds_rows(run, corrected, asked, with_held_out)
        if run.memory:
            rows.append(_memory_row(run, asked, with_held_out))
    return Scoreboard(rows, dict(refused), _fit(runs), choices(runs), asked)


def predicted_seconds(run: GpuRun) -> float:
    """Ours."""
    return step_time(training_run(run.job, run.plan), run.job.code.constants).total


def predicted_memory(run: GpuRun) -> float:
    """Ours: bytes at the peak of a rank of the run's stage, as `labs.plan` says them."""
    if counted := counted_memory(run.job, run.plan):
        return counted.total
    return sum(rank_memory(run.job, run.plan, run.stage).values())


def seconds_groups(run: GpuRun) -> list[str]:
    """Groups of rows that a run's seconds belong to: runs with experts; of dense ones, those
    without a pipeline whose tensor-parallel groups stay in a node by their number of GPUs, and the
    others."""
    if run.job.shape.is_mixture:
        return [f"{run.source}, experts"]
    if run.plan.pipeline > 1 or run.plan.tensor > run.job.gpus_per_node:
        return [f"{run.source}, pipeline or TP across nodes"]
    return [f"{run.source}, up to {limit} GPUs" for limit in (16, 256) if run.gpus <= limit] or [
        f"{run.source}, more GPUs"]


def _seconds_rows(run, corrected, asked, with_held_out) -> list[Row]:
    ours = predicted_seconds(run)
    low, high = seconds_factors(run.job, run.plan).of(ours)
    predicted = {OURS: ours, **_held_out(run, SECONDS, with_held_out),
                 CALIBRATED: _with(corrected, run), **_others(run, "seconds", asked)}
    return [Row(run, "seconds", group, run.seconds, predicted, low, high)
            for group in seconds_groups(run)]


def _memory_row(run, asked, with_held_out) -> Row:
    ours = predicted_memory(run)
    is_counted = counted_memory(run.job, run.plan) is not None
    factors = COUNTED if is_counted else memory_factors(run.job, run.plan)
    low, high = factors.of(ours)
    predicted = {OURS: ours, **_held_out(run, MEMORY, with_held_out),
                 **_others(run, "memory", asked)}
    return Row(run, "memory", f"{run.source}, {run.kind}", run.memory, predicted, low, high)


def _held_out(run, quantity, is_wanted) -> dict[str, float]:
    return {HELD_OUT: predicted_without(run, quantity)} if is_wanted else {}


def _others(run, quantity, asked) -> dict[str, float | None]:
    return {one.name: one.of(run.job, run.plan, run.stage)
            for one in asked if one.quantity == quantity}


def _calibrations(runs) -> dict:
    """(source, model) -> (the run that corrects, its code base). It is the one on the fewest GPUs
    that computes longest for a micro-batch, without a pipeline: what a user would try first."""
    found = defaultdict(list)
    for run in runs:
        if run.job and run.seconds and run.plan.pipeline == 1:
            found[run.source, run.job.name].append(run)
    codes = {}
    for key, own in found.items():
        first = min(own, key=lambda run: (run.gpus, run.plan.tensor, -run.plan.micro_batch))
        try:
            codes[key] = first, calibrated(first.job, first.plan, first.seconds)
        except NoCalibration:
            continue
    return codes


def _with(corrected, run) -> float | None:
    """Seconds by the corrected code base; None for the run that corrected it."""
    first, code = corrected.get((run.source, run.job.name), (None, None))
    if first is None or first is run:
        return None
    return predicted_seconds(replace(run, job=replace(run.job, code=code)))


def _score(rows: Sequence[Row], name: str) -> Score | None:
    known = [row for row in rows if row.predicted.get(name)]
    if not known:
        return None
    errors = np.array([100 * (row.predicted[name] / row.measured - 1) for row in known])
    held = sum(row.is_held for row in known) / len(known) if name == OURS else None
    return Score(len(known), len(rows) - len(known), float(np.median(np.abs(errors))),
                 float(np.median(errors)), float(np.quantile(np.abs(errors), 0.9)),
                 float(max(errors, key=abs)), held)


def _fit(runs) -> dict[str, int]:
    """Rows by whether they ran and whether they were said to fit."""
    found = {"ran, said to fit": 0, "ran, said not to fit": 0, "failed, said to fit": 0,
             "failed, said not to fit": 0}
    for run in runs:
        # a plan that is refused is said not to run; what is no job of ours is not asked
        is_plan = run.job or run.source == "nanotron" and not run.ran
        if is_plan and run.ran is not None:
            said = "said to fit" if run.job and fits(run.job, run.plan) else "said not to fit"
            found[f"{'ran' if run.ran else 'failed'}, {said}"] += 1
    return found


def choices(runs: Iterable[GpuRun]) -> dict[tuple[str, int], float]:
    """(model, GPUs) -> speed of the measured plan that would be chosen, over the fastest's. Only
    where there are plans to choose from: a job of one code base, measured in several ways."""
    found = defaultdict(list)
    for run in runs:
        if run.job and run.seconds and run.source == "nanotron":
            found[run.job.name, run.gpus].append(run)
    return {key: min(run.seconds for run in own) / min(own, key=predicted_seconds).seconds
            for key, own in sorted(found.items()) if len(own) > 1}
