"""Fits what a code base adds to kernels, bytes and states, on rows of GPU runs.

As a program, `python -m labs.predictions.gpu_runs.fit`, it prints the constants of nanotron for
code_bases.py, and how far they are off: on the rows that they were fitted to, and on one model's
when they were fitted without it. The one of each quantity that rows with experts have is printed
for their code bases, and how far it is off on one test's rows when it was fitted without them.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from labs.predictions.code_bases import NANOTRON, PYTORCH, PYTORCH_EAGER, CodeBase
from labs.predictions.gpu_runs.folder import load
from labs.predictions.gpu_runs.run import GpuRun
from labs.predictions.plans.job import Job, Plan, training_run
from labs.predictions.plans.memory import rank_memory
from labs.predictions.step_time import step_time

_PULL = 1.0  # rows' worth of 10 % error that a constant e times its first value counts for
_SICK = 0.35  # log error beyond which a row says nothing: the same job was measured as much faster
_STEPS = 20


@dataclass(frozen=True)
class Quantity:
    """What is measured. names: of the constants that it is fitted by; of: (job, plan, pipeline
    stage) -> predicted; measured: of a run, or None."""

    name: str
    names: tuple[str, ...]
    of: Callable[[Job, Plan, int], float]
    measured: Callable[[GpuRun], float | None]


SECONDS = Quantity(
    "seconds", ("matmul_h100", "half_size", "traffic", "launch", "pipelined", "pipelined_rank",
                "pipelined_nodes", "hop", "gradient_hop", "activation_share", "gradient_share",
                "spread", "exposed", "stall", "loss_bytes"),
    lambda job, plan, stage: step_time(training_run(job, plan), job.code.constants).total,
    lambda run: run.seconds)

MEMORY = Quantity(
    "memory", ("gathered", "steady", "buffers", "logit", "held", "fixed"),
    lambda job, plan, stage: sum(rank_memory(job, plan, stage).values()),
    lambda run: run.memory)


OF_EXPERTS = {"seconds": replace(SECONDS, names=("experts",)),
              "memory": replace(MEMORY, names=("dispatched",))}
"""Quantity -> the same, fitted by the one constant that layers with experts have."""


def with_constants(code: CodeBase, values: dict[str, float]) -> CodeBase:
    """The code base with these of its constants, wherever they stand."""
    new = {part: replace(known, **{name: value for name, value in values.items()
                                   if name in vars(known)})
           for part, known in _parts(code).items() if part}
    own = {name: value for name, value in values.items() if name in vars(code)}
    return replace(code, **new, **own)


def value_of(code: CodeBase, name: str) -> float:
    """The code base's constant of this name."""
    return next(vars(part)[name] for part in _parts(code).values() if name in vars(part))


def _parts(code) -> dict:
    return {"constants": code.constants, "overheads": code.overheads, "kept": code.kept, "": code}


def log_errors(runs: Sequence[GpuRun], quantity: Quantity, code: CodeBase | None = None
               ) -> np.ndarray:
    """log(predicted / measured) of each run, as this code base or as its own."""
    found = []
    for run in runs:
        job = replace(run.job, code=code) if code else run.job
        found.append(math.log(quantity.of(job, run.plan, run.stage) / quantity.measured(run)))
    return np.array(found)


def fit(runs: Sequence[GpuRun], code: CodeBase, quantity: Quantity) -> CodeBase:
    """The code base with the constants that have the minimum mean |log(predicted / measured)|, of
    rows that are not sick; a weak pull towards its own decides where the rows do not."""
    names = quantity.names
    first = np.log([value_of(code, name) for name in names])
    logs = first.copy()

    def at(point) -> CodeBase:
        return with_constants(code, dict(zip(names, np.exp(point).tolist(), strict=True)))

    for _ in range(_STEPS):
        error = log_errors(runs, quantity, at(logs))
        # (runs, constants): by differences of 1 %
        slope = np.stack([(log_errors(runs, quantity, at(logs + 0.01 * one)) - error) / 0.01
                          for one in np.eye(len(logs))], axis=1)
        weight = (np.abs(error) < _SICK) / np.maximum(np.abs(error), 0.02)
        left = (slope.T * weight) @ slope + _PULL * np.eye(len(logs))
        right = (slope.T * weight) @ -error + _PULL * (first - logs)
        logs = logs + np.clip(np.linalg.solve(left, right), -0.2, 0.2)
    return at(logs)


def measured_runs(source: str, quantity: Quantity) -> list[GpuRun]:
    """This project's rows of a code base that can be predicted and in which this was measured."""
    return [run for run in _all() if run.source == source and run.job and quantity.measured(run)]


@functools.cache
def _all() -> tuple[GpuRun, ...]:
    return tuple(load())


@functools.cache
def nanotron_without(model: str, quantity: Quantity) -> CodeBase:
    """nanotron, fitted to this project's rows of all models but one."""
    return fit([run for run in measured_runs("nanotron", quantity) if run.job.name != model],
               NANOTRON, quantity)


def with_fitted_experts(quantity: Quantity) -> tuple[str, ...]:
    """Sources whose rows with experts were fitted. The host is not what prime-rl's wait for, so its
    seconds were not."""
    return ("Megatron-LM", "prime-rl") if quantity.name == "memory" else ("Megatron-LM",)


def experts_runs(source: str, quantity: Quantity) -> list[GpuRun]:
    """Rows of a code base with experts."""
    return [run for run in measured_runs(source, quantity) if run.job.shape.is_mixture]


def experts_group(run: GpuRun) -> str:
    """What a row with experts is left out with: its test of Megatron-LM, its kind of prime-rl."""
    return run.id.split()[0] if run.source == "Megatron-LM" else run.kind


@functools.cache
def experts_without(source: str, group: str, quantity: Quantity) -> dict[str, float]:
    """The constant of `OF_EXPERTS`, fitted to all rows with experts of a code base but a group's;
    group "": to all."""
    asked = OF_EXPERTS[quantity.name]
    runs = [run for run in experts_runs(source, quantity) if experts_group(run) != group]
    # prime-rl fine-tunes with another loss: those rows are left out
    code = runs[0].job.code
    runs = [run for run in runs if run.job.code == code]
    fitted = fit(runs, code, asked)
    return {name: value_of(fitted, name) for name in asked.names}


def unknown(code: CodeBase) -> CodeBase:
    """PyTorch with what anybody can know of a code base: what it keeps for a parameter and a logit,
    how it cuts stages, and whether it is compiled. The host's seconds for a layer are the mean of
    two code bases', so those two are not quite unknown."""
    base = PYTORCH if code.fused else PYTORCH_EAGER
    return replace(base, recipe=code.recipe, stages=code.stages,
                   kept=replace(base.kept, logit=code.kept.logit))


def predicted_without(run: GpuRun, quantity: Quantity) -> float:
    """The quantity of a run by constants that were fitted without its kind: of nanotron's rows
    without those of the same model, of rows with experts without those of the same group, and of
    other code bases as if nothing of them were known."""
    if run.job.shape.is_mixture and run.source in with_fitted_experts(quantity):
        code = with_constants(run.job.code,
                              experts_without(run.source, experts_group(run), quantity))
        return quantity.of(replace(run.job, code=code), run.plan, run.stage)
    code = (nanotron_without(run.job.name, quantity) if run.source == "nanotron"
            else unknown(run.job.code))
    return quantity.of(replace(run.job, code=code), run.plan, run.stage)


def main():
    """Prints the constants of nanotron, and those of layers with experts."""
    for quantity in (SECONDS, MEMORY):
        runs = measured_runs("nanotron", quantity)
        fitted = fit(runs, NANOTRON, quantity)
        print(f"{quantity.name}: " + ", ".join(f"{name}={value_of(fitted, name):.3g}"
                                               for name in quantity.names))
        errors = [abs(math.expm1(error)) for error in log_errors(runs, quantity, fitted)]
        without = [abs(predicted_without(run, quantity) / quantity.measured(run) - 1)
                   for run in runs]
        print(f"  median error of {len(runs)} rows: {np.median(errors):.1%}; each model's fitted "
              f"without it: {np.median(without):.1%}", flush=True)
        for source in with_fitted_experts(quantity):
            runs = experts_runs(source, quantity)
            without = [abs(predicted_without(run, quantity) / quantity.measured(run) - 1)
                       for run in runs]
            print(f"  {source}, experts: {experts_without(source, '', quantity)}; of {len(runs)} "
                  f"rows, each group's fitted without it: {np.median(without):.1%}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
