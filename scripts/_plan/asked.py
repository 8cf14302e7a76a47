"""From the command line to a job, the plans that answer it, and a calibration."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from labs.predictions.code_bases import CODE_BASES, PYTORCH, PYTORCH_EAGER, CodeBase
from labs.predictions.hardware import gpu
from labs.predictions.plans.answer import Answer, fastest_answers, one_answer
from labs.predictions.plans.calibration import calibrated
from labs.predictions.plans.job import Job, Plan
from labs.predictions.plans.models import shape_named

TOKENS = 4 * 2**20  # of a step, where no batch is given
SEQUENCE = 4096  # tokens, where none are given
_OF_PLAN = ("tensor", "pipeline", "data", "context", "micro_batch", "sharding", "recompute",
            "stages", "offload")
_SIZES = ("tensor", "pipeline", "context")


@dataclass(frozen=True)
class Question:
    """job: what is trained on what. settings: of the plan, those that were given. calibration:
    what the measured step changed, in a sentence."""

    job: Job
    settings: dict = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    calibration: str = ""


def question(arguments) -> Question:
    """The job of the command line. Raises ValueError, in a sentence."""
    count, name = arguments.gpus
    assumed = []
    code = _code(arguments)
    shape = shape_named(arguments.model)
    # GPT-2 has no more positions than 1,024
    sequence = arguments.sequence or min(SEQUENCE, shape.positions or SEQUENCE)
    batch = arguments.batch
    if not batch:
        batch = max(1, TOKENS // sequence // count) * count
        assumed.append(f"{batch:,} sequences a step, of all GPUs together (--batch)")
    job = Job(arguments.model, shape, sequence, batch, gpu(name), count,
              min(arguments.gpus_per_node, count), arguments.recipe or _recipe(code), code=code,
              loss=arguments.loss or "", lora=arguments.lora)
    job.bytes_per_parameter  # noqa: B018  an unknown recipe is named here
    assumed.append(f"{code.name}; {_states(job)}")
    settings = {name: value for name in _OF_PLAN if (value := getattr(arguments, name)) is not None}
    found = Question(job, settings, tuple(assumed))
    return _calibrate(found, arguments.calibrate) if arguments.calibrate else found


def _code(arguments) -> CodeBase:
    if not arguments.code:
        return PYTORCH if arguments.compiled else PYTORCH_EAGER
    if arguments.code not in CODE_BASES:
        raise ValueError(f"no code base {arguments.code!r}: choose {', '.join(CODE_BASES)}")
    code = CODE_BASES[arguments.code]
    return replace(code, fused=True) if arguments.compiled else code


def _recipe(code) -> str | None:
    """What FSDP2 keeps under MixedPrecisionPolicy, where PyTorch alone trains."""
    return "bf16 policy" if code.name.startswith("PyTorch") else None


def _states(job) -> str:
    recipe = job.bytes_per_parameter
    return (f"{recipe.parameters:g} + {recipe.gradients:g} + {recipe.optimizer_state:g} bytes a "
            f"parameter for it, its gradient and the optimizer ({recipe.name}; --recipe)")


def answers(asked: Question, counts_tensors: bool = False) -> list[Answer]:
    """The plan that is asked for, or the three fastest that fit with what is given of it.
    counts_tensors: as in an `Answer`."""
    job, settings = asked.job, asked.settings
    if whole := _whole(job, settings):
        return [one_answer(job, whole, counts_tensors)]
    return fastest_answers(job, settings, counts_tensors=counts_tensors)


def _whole(job, settings) -> Plan | None:
    """The plan, where everything that decides it is given."""
    if not {"micro_batch", "sharding", "recompute"} <= set(settings):
        return None
    if not set(settings) & {*_SIZES, "data"} and job.gpus > 1:
        return None
    return _plan(job.gpus, settings)


def _plan(gpus, settings) -> Plan:
    """The plan with these sizes; data is what is left over."""
    others = 1
    for name in _SIZES:
        others *= settings.get(name, 1)
    return Plan(**{"data": max(1, gpus // others)} | settings)


def _calibrate(asked, file) -> Question:
    try:
        step = json.loads(Path(file).read_text(encoding="utf-8"))
        seconds = float(step["seconds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{file} is no measured step such as {{"seconds": 1.23, "gpus": 8, '
                         f'"batch": 64}}: {error!r}') from None
    job = replace(asked.job, gpus=step.get("gpus", asked.job.gpus),
                  batch=step.get("batch", asked.job.batch),
                  sequence=step.get("sequence", asked.job.sequence))
    job = replace(job, gpus_per_node=min(job.gpus_per_node, job.gpus))
    names = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context"}
    settings = {names.get(name, name): value for name, value in step.items()
                if names.get(name, name) in _OF_PLAN}
    plan = _plan(job.gpus, {"recompute": "none", "sharding": "FSDP"} | asked.settings | settings)
    one_answer(job, plan)  # says why such a step cannot have been
    before = Answer(job, plan).seconds.total
    code = calibrated(job, plan, seconds)
    own, was = code.overheads, job.code.overheads
    what = (f"the kernels take {own.kernels:.2f} times what they would"
            if own.kernels != was.kernels else
            f"the host takes {1e3 * own.launch:.1f} ms to start a layer, in place of "
            f"{1e3 * was.launch:.1f}")
    return replace(asked, job=replace(asked.job, code=code), calibration=(
        f"calibrated by {file}: {seconds:.3g} s measured, {before:.3g} predicted, so {what}"))
