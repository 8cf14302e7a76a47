"""How sure a prediction is: what was measured over what was predicted, on rows of its kind.

The factors are quantiles of rows that the constants were not fitted to (`python -m
labs.predictions.gpu_runs.intervals` writes them), one size larger as split conformal prediction
takes them: of n rows of a kind, 80 % of further ones lie between the (n + 1)·10 %th and the
(n + 1)·90 %th (Angelopoulos & Bates, "A Gentle Introduction to Conformal Prediction", 2021, arXiv
2107.07511, section 1).
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from labs.predictions.plans.job import Job, Plan

FACTORS = Path(__file__).parent.parent / "gpu_runs" / "intervals.json"
NEW = "code base not fitted"
NEW_EXPERTS = "code base not fitted, experts"
HELD = 0.8  # of the rows of a kind


@dataclass(frozen=True)
class Factors:
    """What a prediction is multiplied with for the ends of its interval. rows: how many measured
    ones say so; kind: what they are rows of."""

    kind: str
    low: float
    high: float
    rows: int

    def of(self, predicted: float) -> tuple[float, float]:
        """The interval around a prediction, in its unit."""
        return predicted * self.low, predicted * self.high


# measured over predicted, the smallest and the largest of 17 jobs on an H200 of up to 8B parameters
# (tests/predictions/test_on_a_real_gpu.py): of so few those ends are what the formula above takes
COUNTED = Factors("every tensor counted", low=1.0, high=1.009, rows=17)


def seconds_kind(job: Job, plan: Plan) -> str:
    """What rows a job's seconds are compared with."""
    if job.shape.is_mixture:
        return _experts(job, "seconds")
    if job.code.name not in fitted_code_bases("seconds"):
        return NEW
    if job.code.name != "nanotron":
        return f"{job.code.name}, dense GPT"
    if plan.tensor > job.gpus_per_node:
        return f"{job.code.name}, TP across nodes" + _size(job, 256)
    if plan.pipeline > 1:
        return f"{job.code.name}, pipeline" + _size(job, 64, 128)
    return f"{job.code.name}, no pipeline" + _size(job, 16, 256)


def _experts(job, quantity) -> str:
    """Of a code base of which no rows with experts were fitted, those of all others, each as if it
    were not known."""
    is_fitted = job.code.name in fitted_code_bases(quantity) and job.code.name != "nanotron"
    return f"{job.code.name}, experts" if is_fitted else NEW_EXPERTS


def _size(job, *limits) -> str:
    for limit in limits:
        if job.gpus <= limit:
            return f", up to {limit} GPUs"
    return f", above {limits[-1]} GPUs"


def memory_kind(job: Job, plan: Plan) -> str:
    """What rows a job's memory is compared with."""
    if job.shape.is_mixture:
        return _experts(job, "memory")
    if job.code.name not in fitted_code_bases("memory"):
        return NEW
    if job.code.name != "nanotron":
        return f"{job.code.name}, {plan.sharding if plan.sharding == 'FSDP' else 'dense GPT'}"
    if plan.tensor > 4:
        return f"{job.code.name}, TP above 4"
    if plan.tensor == plan.pipeline == 1:
        return f"{job.code.name}, DP and ZeRO-1"
    return f"{job.code.name}, TP up to 4 and PP"


def seconds_factors(job: Job, plan: Plan) -> Factors:
    """The factors for a job's seconds."""
    return _factors("seconds", seconds_kind(job, plan))


def memory_factors(job: Job, plan: Plan) -> Factors:
    """The factors for a job's memory."""
    return _factors("memory", memory_kind(job, plan))


def _factors(quantity, kind) -> Factors:
    known = _read()[quantity]["kinds"]
    return Factors(kind, **known.get(kind, known[NEW]))


def fitted_code_bases(quantity: str) -> tuple[str, ...]:
    """Names of the code bases of which rows were fitted."""
    return tuple(_read()[quantity]["code_bases"])


@functools.cache
def _read() -> dict:
    return json.loads(FACTORS.read_text(encoding="utf-8"))
