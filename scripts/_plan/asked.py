"""From the command line to a job and the plans that answer it."""

from dataclasses import dataclass, field, replace

from _plan import measured
from labs.predictions.code_bases import CODE_BASES, PYTORCH, PYTORCH_EAGER, CodeBase
from labs.predictions.hardware import gpu
from labs.predictions.plans.answer import Answer, fastest_answers, one_answer
from labs.predictions.plans.job import Job, Plan
from labs.predictions.plans.models import shape_named

TOKENS = 4 * 2**20  # of a step, where no batch is given
SEQUENCE = 4096  # tokens, where none are given


@dataclass(frozen=True)
class Question:
    """job: what is trained on what. settings: of the plan, those that were given. calibration:
    what was measured and what it changed, in a sentence."""

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
    if reason := _impossible_experts(shape, arguments):
        raise ValueError(f"--ep {arguments.expert}: {reason}")
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
    if shape.is_mixture:
        assumed.append(f"a layer has {shape.experts} experts, of which a token uses "
                       f"{shape.active_experts}, each as often as the others; without EP (--ep) "
                       "every data-parallel rank computes with all of them")
    settings = {name: value for name in measured.OF_PLAN
                if (value := getattr(arguments, name)) is not None}
    calibration = ""
    if arguments.calibrate:
        job, calibration = measured.calibrated_job(arguments.calibrate, job, settings)
    return Question(job, settings, tuple(assumed), calibration)


def _impossible_experts(shape, arguments) -> str:
    """Why no plan has so many expert-parallel ranks; empty if one may."""
    size = arguments.expert or 1
    if size > 1 and not shape.is_mixture:
        return f"{arguments.model} has no experts to divide over ranks"
    return f"{shape.experts} experts cannot be divided by it" if shape.experts % size else ""


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
    if not set(settings) & {*measured.SIZES, "data"} and job.gpus > 1:
        return None
    return measured.plan_of(job.gpus, settings)
