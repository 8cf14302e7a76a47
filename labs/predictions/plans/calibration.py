"""What was measured on a machine corrects the model of seconds: one step of a job, or the rates of
a GPU, its host and its links."""

from dataclasses import dataclass, replace

from labs.predictions.code_bases import CodeBase
from labs.predictions.plans.job import Job, Plan, training_run
from labs.predictions.step_time import step_time
from labs.predictions.step_time.constants import EXPECTED, LINK_SHARE
from labs.words import with_article

_BOUNDS = (0.2, 8.0)  # of a factor; beyond, what was measured is another job
_LAUNCHING = 0.2  # share of a step from which on it says more of the host than of the GPU
_STEPS = 60
_FASTEST = 1.5  # times the table's rate of a link; beyond, what was measured is another GPU


class NoCalibration(ValueError):
    """What was measured is too far from the prediction; one sentence says so."""


LAUNCH = 8.46e-6
"""Seconds from one small kernel to the next where `Generation.host` is 1, measured with an H200's
host (experiments/reference/h200/rates.json)."""


@dataclass(frozen=True)
class MeasuredRates:
    """What `scripts/preflight --full` measured; None: it did not. flops: FLOP/s of a large square
    product in 16 bits. launch: seconds from one small kernel to the next. bus: bytes/s of a ring
    all-reduce within a node, as nccl-tests counts it."""

    flops: float | None = None
    launch: float | None = None
    bus: float | None = None


def with_rates(job: Job, rates: MeasuredRates) -> tuple[Job, list[str]]:
    """The job with the measured rates in place of the table's, and what was changed, in words.

    A product alone is faster than the same product in a step, so a step's rate is changed by the
    factor between the measured product and the fastest that was published for the generation
    (`EXPECTED`). Raises NoCalibration where a factor says that this was another GPU.
    """
    card, code, words = job.gpu, job.code, []
    if rates.flops:
        name = "matmul_h100" if card.generation.name == "H100" else "matmul_a100"
        usual = getattr(EXPECTED, name) * card.flops
        factor = _likely(rates.flops / usual,
                         f"{rates.flops / 1e12:.3g} TFLOP/s were measured, and "
                         f"{with_article(card.name)} reaches {usual / 1e12:.3g}")
        code = replace(code, constants=replace(
            code.constants, **{name: factor * getattr(code.constants, name)}))
        words.append(f"matrix products run at {factor:.2f} times their rate")
    if rates.launch:
        host = _likely(rates.launch / LAUNCH, f"{1e6 * rates.launch:.3g} us from one small kernel "
                                              f"to the next, and {1e6 * LAUNCH:.3g} are usual")
        words.append(f"the host takes {host / card.generation.host:.2f} times as long to start a "
                     "kernel")
        card = replace(card, generation=replace(card.generation, host=host))
    if rates.bus:
        usual = (card.nvlink or card.pcie) * LINK_SHARE
        if rates.bus > _FASTEST * usual:
            raise NoCalibration(f"{rates.bus / 1e9:.3g} GB/s between GPUs were measured, and "
                                f"{with_article(card.name)}'s links reach {usual / 1e9:.3g}: "
                                "another GPU")
        words.append(f"an all-reduce in a node reaches {rates.bus / 1e9:.3g} GB/s in place of "
                     f"{usual / 1e9:.3g}")
        card = replace(card, nvlink=rates.bus / LINK_SHARE)
    return replace(job, gpu=card, code=code), words


def _likely(factor, said) -> float:
    low, high = _BOUNDS
    if not low <= factor <= high:
        raise NoCalibration(f"{said}: too far apart for a correction, so the GPU is another one, "
                            "or something else ran on it")
    return factor


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
