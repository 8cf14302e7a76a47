"""Fits the seven constants of the step-time model, also without the rows that it is to predict.

As a program, `python -m labs.predictions.step_time.fit`, it prints the table for constants.py.
"""

import functools
import math
from dataclasses import fields

import numpy as np

from labs.predictions.step_time.constants import EXPECTED, Constants
from labs.predictions.step_time.published_runs import PublishedRun, load_published_runs
from labs.predictions.step_time.step import step_time

FOLDS = 5
_NAMES = tuple(field.name for field in fields(Constants))
_PULL = 0.5  # rows' worth of 10 % error that a constant e times its expected value counts for
_STEPS = 6


def fit(runs: list[PublishedRun], unhidden: float | None = None) -> Constants:
    """The constants with the minimum mean |log(predicted / published)| over `runs`, by reweighted
    least squares; a weak pull towards EXPECTED decides where the runs do not. unhidden: a value at
    which that constant stays while the others are fitted, so that a model without overlap (1), or
    with overlap that costs nothing (0), gets the constants that are best for it."""
    names = tuple(name for name in _NAMES if unhidden is None or name != "unhidden")
    constants_of = functools.partial(_constants, names, unhidden)
    expected = np.log([getattr(EXPECTED, name) for name in names])
    published = np.log([run.seconds for run in runs])
    logs = expected.copy()
    for _ in range(_STEPS):
        error = published - _log_seconds(runs, constants_of(logs))
        # (runs, constants): d log(seconds) / d log(constant), by differences of 1 %
        slope = np.stack([
            (_log_seconds(runs, constants_of(logs + 0.01 * one)) + error - published) / 0.01
            for one in np.eye(len(logs))], axis=1)
        weight = 1 / np.maximum(np.abs(error), 0.03)  # the median, smooth near 0
        # Normal equations of weighted least squares; 1/|error| as a weight makes absolute errors of
        # it.
        left = (slope.T * weight) @ slope + _PULL * np.eye(len(logs))
        right = (slope.T * weight) @ error + _PULL * (expected - logs)
        logs = logs + np.clip(np.linalg.solve(left, right), -0.5, 0.5)
    return constants_of(logs)


def _log_seconds(runs, constants):
    return np.log([step_time(run.run, constants).total for run in runs])


def _constants(names, unhidden, logs) -> Constants:
    fitted = dict(zip(names, np.exp(logs).tolist(), strict=True))
    return Constants(**{"unhidden": unhidden} | fitted)


def folds(runs: list[PublishedRun], count: int = FOLDS) -> list[set[str]]:
    """Ids cut into `count` folds within each code base. All rows of one model are in one fold, so
    that a neighbour of a row, the same model on twice as many GPUs, does not fit for it. A code
    base with a single model is cut by rows."""
    found = [set() for _ in range(count)]
    for name in sorted({run.code_base.name for run in runs}):
        own = [run for run in runs if run.code_base.name == name]
        by_row = len({run.model for run in own}) == 1
        groups = {}
        for run in own:
            groups.setdefault(run.id if by_row else run.model, set()).add(run.id)
        for group in sorted(groups.values(), key=lambda ids: (-len(ids), min(ids))):
            min(found, key=lambda fold: sum(one.id in fold for one in own)).update(group)
    return found


def by_code_base(runs: list[PublishedRun]) -> list[set[str]]:
    """Ids by code base: each is predicted with constants from the others alone."""
    return [{run.id for run in runs if run.code_base.name == name}
            for name in sorted({run.code_base.name for run in runs})]


def left_out(runs: list[PublishedRun], parts: list[set[str]], unhidden: float | None = None
             ) -> dict[str, Constants]:
    """Id -> constants that were fitted to all rows but those of its part; unhidden as for `fit`."""
    found = {}
    for part in parts:
        constants = fit([run for run in runs if run.id not in part], unhidden)
        found |= dict.fromkeys(part, constants)
    return found


@functools.cache
def held_out(unhidden: float | None = None) -> dict[str, Constants]:
    """Id of each row of the repository that can be predicted -> constants fitted without its fold,
    so that no row is predicted with constants that know its published time; unhidden as for
    `fit`."""
    runs = [run for run in load_published_runs() if run.run]
    return left_out(runs, folds(runs), unhidden)


def errors() -> dict[str, float]:
    """Id of each row that can be predicted -> log(predicted / published seconds), with constants
    that do not know the row."""
    constants = held_out()
    return {run.id: math.log(step_time(run.run, constants[run.id]).total / run.seconds)
            for run in load_published_runs() if run.run}


if __name__ == "__main__":
    fitted = fit([run for run in load_published_runs() if run.run])
    print("\n".join(f"{name}={getattr(fitted, name):.3g}" for name in _NAMES))
