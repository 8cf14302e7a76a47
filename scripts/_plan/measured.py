"""What was measured, from a file of --calibrate: one step, or the output of scripts/preflight."""

import json
from dataclasses import replace
from pathlib import Path

from labs.predictions.hardware import recognised
from labs.predictions.plans.answer import Answer, one_answer
from labs.predictions.plans.calibration import MeasuredRates, calibrated, with_rates
from labs.predictions.plans.job import Job, Plan
from labs.words import listed, with_article

OF_PLAN = ("tensor", "pipeline", "data", "context", "micro_batch", "sharding", "recompute",
           "stages", "offload", "expert")
SIZES = ("tensor", "pipeline", "context")
_NAMES = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert"}


def plan_of(gpus: int, settings: dict) -> Plan:
    """The plan with these sizes; data is what is left over."""
    others = 1
    for name in SIZES:
        others *= settings.get(name, 1)
    return Plan(**{"data": max(1, gpus // others)} | settings)


def calibrated_job(file: str, job: Job, settings: dict) -> tuple[Job, str]:
    """The job with what the file says, and a sentence on what was changed. Raises ValueError, in a
    sentence."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
        rows = content.get("rows")
        if rows is not None:
            rates = _rates_of({row["name"]: row["data"] for row in rows})
        else:
            seconds = float(content["seconds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{file} is no measured step such as {{"seconds": 1.23, "gpus": 8, '
                         f'"batch": 64}}, and no output of scripts/preflight --full --json: '
                         f"{error!r}") from None
    return (_by_step(file, content, seconds, job, settings) if rows is None else
            _by_rates(file, *rates, job))


def _by_step(file, step, seconds, asked, settings) -> tuple[Job, str]:
    job = replace(asked, **{name: step.get(name, getattr(asked, name))
                            for name in ("gpus", "batch", "sequence")})
    job = replace(job, gpus_per_node=min(job.gpus_per_node, job.gpus))
    own = {_NAMES.get(name, name): value for name, value in step.items()
           if _NAMES.get(name, name) in OF_PLAN}
    plan = plan_of(job.gpus, {"recompute": "none", "sharding": "FSDP"} | settings | own)
    one_answer(job, plan)  # says why such a step cannot have been
    before = Answer(job, plan).seconds.total
    code = calibrated(job, plan, seconds)
    now, was = code.overheads, job.code.overheads
    what = (f"the kernels take {now.kernels:.2f} times what they would"
            if now.kernels != was.kernels else
            f"the host takes {1e3 * now.launch:.1f} ms to start a layer, in place of "
            f"{1e3 * was.launch:.1f}")
    return replace(asked, code=code), (
        f"calibrated by {file}: {seconds:.3g} s measured, {before:.3g} predicted, so {what}")


def _rates_of(data: dict[str, dict]) -> tuple[str, MeasuredRates]:
    """(the table's name of the GPU, its rates) from the rows of preflight; "" where no speed of a
    GPU was measured."""
    speed = data.get("speed", {})
    if not speed.get("gpu"):
        return "", MeasuredRates()
    busbw = data.get("bandwidth", {}).get("busbw")
    return recognised(speed["gpu"], speed["bytes"]).name, MeasuredRates(
        float(speed["flops"]), float(speed["launch_s"]),
        # of the largest message, which latency slows down least
        float(busbw[max(busbw, key=float)]) if busbw else None)


def _by_rates(file, card, rates, job) -> tuple[Job, str]:
    if not card:
        raise ValueError(f"{file} has no measured speed of a GPU: run scripts/preflight --full "
                         "--json where the GPUs are")
    if card != job.gpu.name:
        raise ValueError(f"{file} was measured on {with_article(card)}, and the plan is for "
                         f"{with_article(job.gpu.name)}")
    corrected, words = with_rates(job, rates)
    left = "the network between nodes" if rates.bus else "what is sent between GPUs"
    return corrected, f"calibrated by {file}: {listed(words)}; {left} stays as it was"
