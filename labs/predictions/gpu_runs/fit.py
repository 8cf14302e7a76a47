"""Fits what a code base's host and network add to kernels and bytes, on rows of GPU runs.

As a program, `python -m labs.predictions.gpu_runs.fit`, it prints the constants of nanotron for
code_bases.py, and how far they are off: on the rows that they were fitted to, and on the other
model's when they were fitted to one model alone.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from labs.predictions.code_bases import CodeBase
from labs.predictions.gpu_runs.folder import load
from labs.predictions.gpu_runs.run import GpuRun
from labs.predictions.plans.job import training_run
from labs.predictions.step_time import step_time

SECONDS = ("matmul_h100", "half_size", "traffic", "launch", "pipelined", "pipelined_rank",
           "pipelined_nodes", "hop", "gradient_hop", "activation_share", "gradient_share",
           "spread", "exposed", "stall", "loss_bytes")
_PULL = 1.0  # rows' worth of 10 % error that a constant e times its first value counts for
_SICK = 0.35  # log error beyond which a row says nothing: the same job was measured as much faster
_STEPS = 25


def with_constants(code: CodeBase, values: dict[str, float]) -> CodeBase:
    """The code base with these of its constants, wherever they stand."""
    found = {"constants": {}, "overheads": {}}
    for part in found:
        known = vars(getattr(code, part))
        found[part] = {name: value for name, value in values.items() if name in known}
    own = {name: value for name, value in values.items() if name in vars(code)}
    return replace(code, **{part: replace(getattr(code, part), **new)
                            for part, new in found.items()}, **own)


def value_of(code: CodeBase, name: str) -> float:
    """The code base's constant of this name."""
    return next(vars(part)[name] for part in (code.constants, code.overheads, code)
                if name in vars(part))


def log_errors(runs: Sequence[GpuRun], code: CodeBase) -> np.ndarray:
    """log(predicted / measured seconds) of each run, as this code base."""
    found = []
    for run in runs:
        job = replace(run.job, code=code)
        predicted = step_time(training_run(job, run.plan), code.constants).total
        found.append(predicted / run.seconds)
    return np.log(found)


def fit(runs: Sequence[GpuRun], code: CodeBase, names: Sequence[str] = SECONDS) -> CodeBase:
    """The code base with the constants that have the minimum mean |log(predicted / measured)|, of
    rows that are not sick; a weak pull towards its own decides where the rows do not."""
    first = np.log([value_of(code, name) for name in names])
    logs = first.copy()

    def at(point) -> CodeBase:
        return with_constants(code, dict(zip(names, np.exp(point).tolist(), strict=True)))

    for _ in range(_STEPS):
        error = log_errors(runs, at(logs))
        # (runs, constants): by differences of 1 %
        slope = np.stack([(log_errors(runs, at(logs + 0.01 * one)) - error) / 0.01
                          for one in np.eye(len(logs))], axis=1)
        weight = (np.abs(error) < _SICK) / np.maximum(np.abs(error), 0.02)
        left = (slope.T * weight) @ slope + _PULL * np.eye(len(logs))
        right = (slope.T * weight) @ -error + _PULL * (first - logs)
        logs = logs + np.clip(np.linalg.solve(left, right), -0.2, 0.2)
    return at(logs)


def timed(source: str, **settings) -> list[GpuRun]:
    """The rows of a code base that have seconds, and these settings of the plan."""
    return [run for run in load() if run.source == source and run.job and run.seconds
            and all(getattr(run.plan, name) == value for name, value in settings.items())]


def main():
    """Prints the constants of nanotron."""
    runs = timed("nanotron")
    code = runs[0].job.code
    fitted = fit(runs, code)
    print(", ".join(f"{name}={value_of(fitted, name):.3g}" for name in SECONDS))
    _report("all", runs, fitted)
    for model in sorted({run.job.name for run in runs}):
        own = [run for run in runs if run.job.name == model]
        others = [run for run in runs if run.job.name != model]
        _report(f"{model}, fitted without it", own, fit(others, code))


def _report(title, runs, code):
    error = np.abs(np.expm1(log_errors(runs, code)))
    plain = np.array([run.plan.pipeline == 1 and run.plan.tensor <= 8 for run in runs])
    few = np.array([run.gpus <= 16 for run in runs])
    print(f"{title}: median {np.median(error):.1%}; no pipeline, TP to 8: "
          f"{np.median(error[plain]):.1%}, of these on 8 and 16 GPUs "
          f"{np.median(error[plain & few]):.1%}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
