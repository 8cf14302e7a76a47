"""Writes how far measured runs were from predictions that did not know them, by kind.

`python -m labs.predictions.gpu_runs.intervals` takes some minutes and writes intervals.json, which
`labs.predictions.plans.intervals` reads. Of nanotron the rows of one model are predicted with
constants that were fitted to the other's; of rows with experts, those of one test with constants
that were fitted to the others; a code base that was not fitted stands for all of them, each
predicted as if nothing of its own were known.
"""

import json
import math
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np

from labs.predictions.gpu_runs.fit import (
    MEMORY,
    SECONDS,
    Quantity,
    log_errors,
    measured_runs,
    predicted_without,
    unknown,
)
from labs.predictions.gpu_runs.run import GpuRun
from labs.predictions.plans import intervals
from labs.predictions.step_time.fit import by_code_base, left_out
from labs.predictions.step_time.published_runs import load_published_runs
from labs.predictions.step_time.step import step_time

_CODE_BASES = {"seconds": ("nanotron", "Megatron-Core"),
               "memory": ("nanotron", "Megatron-Core", "prime-rl")}
_OUTSIDE = (1 - intervals.HELD) / 2  # on either side
_FEWEST = 20  # rows from which on quantiles are taken; below, the ends and a tenth more


def factors(logs: list[float]) -> dict[str, float]:
    """low, high and rows from log(predicted / measured) of rows of one kind."""
    ratios = np.sort(np.exp(-np.array(logs)))
    count = len(ratios)
    if count < _FEWEST:
        low, high = ratios[0] / 1.1, ratios[-1] * 1.1
    else:
        place = math.floor((count + 1) * _OUTSIDE) - 1
        low, high = ratios[place], ratios[count - 1 - place]
    return {"low": round(float(low), 3), "high": round(float(high), 3), "rows": count}


def _kinds(quantity: Quantity) -> dict[str, list[float]]:
    """Kind -> log errors of its rows."""
    kind_of = getattr(intervals, f"{quantity.name}_kind")
    found = defaultdict(list)
    for run in measured_runs("nanotron", quantity):
        found[kind_of(run.job, run.plan)].append(
            math.log(predicted_without(run, quantity) / quantity.measured(run)))
    for source in ("Megatron-LM", "prime-rl"):
        for run in _measured(source, quantity, True):
            if run.job.code.name in _CODE_BASES[quantity.name]:
                found[kind_of(run.job, run.plan)].append(
                    math.log(predicted_without(run, quantity) / quantity.measured(run)))
        runs = _measured(source, quantity, False)
        for run, error in zip(runs, log_errors(runs, quantity).tolist(), strict=True):
            if run.job.code.name in _CODE_BASES[quantity.name]:
                found[kind_of(run.job, run.plan)].append(error)
    return found


def _measured(source, quantity, with_experts) -> list[GpuRun]:
    return [run for run in measured_runs(source, quantity)
            if run.job.shape.is_mixture == with_experts]


def _new(quantity: Quantity, with_experts: bool = False) -> list[float]:
    """Log errors of each code base's rows as if it were not known, as many of each."""
    each = []
    for source in ("nanotron", "Megatron-LM", "prime-rl", "this workbook"):
        runs = [run for run in _measured(source, quantity, with_experts)
                if quantity is MEMORY or run.plan.pipeline == 1 and run.plan.tensor <= 8]
        if not runs:
            continue
        plain = [replace(run, job=replace(run.job, code=unknown(run.job.code))) for run in runs]
        each.append(log_errors(plain, quantity).tolist())
    if quantity is SECONDS and not with_experts:
        each += _published()
    size = min(max(len(errors) for errors in each), 200)
    return [error for errors in each for error in np.quantile(errors, np.linspace(0, 1, size))]


def _published() -> list[list[float]]:
    """Of each code base of the published rows, with constants that were fitted to the others."""
    runs = [run for run in load_published_runs() if run.run]
    parts = by_code_base(runs)
    constants = left_out(runs, parts)
    return [[math.log(step_time(run.run, constants[run.id]).total / run.seconds)
             for run in runs if run.id in part] for part in parts]


def main():
    """Writes the file."""
    found = {}
    for quantity in (SECONDS, MEMORY):
        found[quantity.name] = {"code_bases": list(_CODE_BASES[quantity.name]), "kinds": {}}
        # the kinds are asked of the file, so it must name the code bases first
        known = json.loads(intervals.FACTORS.read_text()) if intervals.FACTORS.exists() else {}
        intervals.FACTORS.write_text(json.dumps(known | found))
        intervals._read.cache_clear()
        kinds = {kind: factors(logs) for kind, logs in sorted(_kinds(quantity).items())}
        found[quantity.name]["kinds"] = kinds | {
            intervals.NEW: factors(_new(quantity)),
            intervals.NEW_EXPERTS: factors(_new(quantity, with_experts=True))}
    intervals.FACTORS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(intervals.FACTORS.read_text())


if __name__ == "__main__":
    sys.exit(main())
