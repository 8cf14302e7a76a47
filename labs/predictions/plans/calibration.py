"""One measured step corrects the model of seconds for the job's code base and machine."""

from dataclasses import replace

from labs.predictions.code_bases import CodeBase
from labs.predictions.plans.job import Job, Plan, training_run
from labs.predictions.step_time import step_time

_BOUNDS = (0.2, 8.0)  # of a factor; beyond, what was measured is another job
_LAUNCHING = 0.2  # share of a step from which on it says more of the host than of the GPU
_STEPS = 60


class NoCalibration(ValueError):
    """The measured step is too far from the prediction; one sentence says so."""


def calibrated(job: Job, plan: Plan, seconds: float) -> CodeBase:
    """The job's code base, with which this plan's step takes the measured seconds.

    Where the GPU waits for the host in a fifth of the step or more, the seconds that the host takes
    to start a layer are changed; else those of all kernels, by one factor. What is sent between
    GPUs stays. Raises NoCalibration where the factor is below 0.2 or above 8.
    """
    parts = step_time(training_run(job, plan), job.code.constants)
    name = "launch" if parts.launch > _LAUNCHING * parts.total else "kernels"
    known = getattr(job.code.overheads, name)

    def code_at(factor) -> CodeBase:
        return replace(job.code, overheads=replace(job.code.overheads, **{name: factor * known}))

    def missed(factor) -> float:
        code = code_at(factor)
        run = training_run(replace(job, code=code), plan)
        return step_time(run, code.constants).total - seconds

    low, high = _BOUNDS
    if missed(low) > 0 or missed(high) < 0:
        raise NoCalibration(
            f"the measured step takes {seconds:.3g} s and {parts.total:.3g} s are predicted: too "
            "far apart for a correction, so model, batch or GPUs differ from those of the plan")
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if missed(middle) < 0 else (low, middle)
    return code_at(high)
