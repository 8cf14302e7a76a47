"""labs.plan(only="memory"): one rank of a data-parallel job at its peak, and the GPUs that it fits
on."""

from labs.pictures.live_memory import memory_html
from labs.pictures.marks import format_number
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.widgets import Choice, choices, powers_of_two
from labs.predictions import hardware
from labs.predictions.code_bases import PYTORCH_EAGER
from labs.predictions.memory.recipes import RECIPES
from labs.predictions.plans.answer import Answer
from labs.predictions.plans.job import RECOMPUTE, Job, Plan, impossible
from labs.predictions.plans.models import shape_named
from labs.training.memory_categories import GB

# in order of size
MODELS = ("GPT-2", "Qwen2-0.5B", "GPT-2 XL", "Phi-3-mini", "Llama-2-7B", "Mistral-7B", "Qwen2-7B",
          "Llama-3-8B", "Qwen3-8B", "Gemma-7B", "Llama-2-13B", "Llama-3-70B")
GPUS = ("T4", "A10", "A100-40", "A100-80", "H100", "H200")
"""The GPUs that are drawn, in order of memory: the last is the largest."""
STRATEGIES = {"DDP": "DDP", "ZeRO-1": "ZeRO-1", "ZeRO-2": "ZeRO-2", "ZeRO-3 = FSDP": "FSDP",
              "FSDP, no resharding": "FSDP, no resharding"}
RECIPE_NAMES = ("fp32", "bf16", "bf16, fp32 moments", "bf16, fp32 master", "bf16 policy",
                "megatron")
DEFAULTS = dict(model="Llama-3-8B", gpus=8, sharding="FSDP", recipe="bf16, fp32 master",
                micro_batch=1, sequence=4096, recompute="full")


def memory_choices(first: dict[str, object]) -> list[Choice]:
    """The controls. Raises TypeError or ValueError where there is no such control or choice."""
    recipes = [(f"{recipe.name}  ({recipe.parameters:g} + {recipe.gradients:g} + "
                f"{recipe.optimizer_state:g} bytes)", recipe.name)
               for recipe in map(RECIPES.get, RECIPE_NAMES)]
    controls = [("model", "model", "menu", MODELS),
                ("gpus", "GPUs", "slider", powers_of_two(0, 10)),
                ("sharding", "strategy", "menu", tuple(STRATEGIES.items())),
                ("micro_batch", "batch per GPU", "slider", powers_of_two(0, 7)),
                ("recipe", "recipe", "menu", recipes),
                ("sequence", "sequence", "slider", powers_of_two(8, 17)),
                ("recompute", "checkpointing", "menu", RECOMPUTE)]
    return choices('plan(only="memory")', controls, first, **DEFAULTS)


def data_parallel_answer(*, model: str, gpus: int, sharding: str, recipe: str, micro_batch: int,
                         sequence: int, recompute: str) -> Answer:
    """What a step of one micro-batch on each GPU takes, in PyTorch without compilation. sharding:
    of a `Plan`. Raises ValueError in a sentence where there is no such job."""
    job = Job(model, shape_named(model), sequence, gpus * micro_batch, hardware.gpu(GPUS[-1]),
              gpus, min(8, gpus), recipe, code=PYTORCH_EAGER)
    plan = Plan(gpus, sharding=sharding, micro_batch=micro_batch, recompute=recompute)
    reason = impossible(job, plan)
    if job.bytes_per_parameter.mixed and not plan.is_fsdp:
        reason = (f"recipe {recipe!r} gathers in bf16 what is kept in fp32: FSDP does that, "
                  f"{sharding} does not")
    if reason:
        raise ValueError(f"No such job: {reason}.")
    return Answer(job, plan)


def memory_live(**chosen) -> str:
    """The same as `draw_memory` as HTML, quick enough to follow a slider."""
    overhead = hardware.overhead(chosen["gpus"])
    try:
        answer = data_parallel_answer(**chosen)
    except ValueError as error:
        gpus = [(size, name, None) for size, name in _capacities()]
        return memory_html(None, overhead, gpus, str(error))
    gpus = [(size, name, spare(answer, name) >= 0) for size, name in _capacities()]
    return memory_html(answer.held, overhead, gpus, verdict(answer), overhead_named(answer),
                       _interval(answer))


def draw_memory(**chosen) -> Picture:
    """The picture of one job; its data is the Answer, None where there is no such job."""
    strategy = {value: label for label, value in STRATEGIES.items()}[chosen["sharding"]]
    name = f"{chosen['model']}\n{strategy}\n{chosen['gpus']} GPUs"
    try:
        answer = data_parallel_answer(**chosen)
    except ValueError as error:
        answer, row, note = None, MemoryRow(name), str(error)
    else:
        row = MemoryRow(name, predicted=answer.held, overhead=answer.overhead,
                        interval=_interval(answer))
        note = f"{verdict(answer)} {overhead_named(answer)}"
    picture = memory_bars([row], "of one rank at its peak", _capacities(), note=note)
    picture.data = answer
    return picture


def _interval(answer) -> tuple[float, float]:
    low, high = answer.memory_factors.of(answer.held.total)
    return low + answer.overhead, high + answer.overhead


def _capacities() -> list[tuple[float, str]]:
    return [(hardware.gpu(name).usable, name) for name in GPUS]


def spare(answer: Answer, gpu: str) -> float:
    """Bytes that one rank leaves on this GPU; negative where it does not fit."""
    return hardware.gpu(gpu).usable - answer.held.total - answer.overhead


def verdict(answer: Answer) -> str:
    """What fits, in a sentence."""
    fitting = [name for name in GPUS if spare(answer, name) >= 0]
    if not fitting:
        missing = format_number(-spare(answer, GPUS[-1]) / GB)
        return f"Fits on none of these GPUs: even the {GPUS[-1]} lacks {missing} GB."
    first, *others = fitting
    left = format_number(spare(answer, first) / GB)
    also = f", and on the {' and the '.join(others)}" if len(others) < 3 else \
        ", and on all that are larger"
    return f"Fits on the {first} with {left} GB to spare{also if others else ''}."


def overhead_named(answer: Answer) -> str:
    """What a rank holds at its peak, and what CUDA and NCCL take, in sentences."""
    # with torch, which predictions that count tensors need
    from labs.predictions.memory.predict import HELD_TO, NOT_COUNTED

    parts = ", ".join(f"{name} {nbytes / GB:.2f}" for name, nbytes
                      in hardware.overheads(answer.job.gpus).items() if nbytes)
    gradients = "" if answer.held.gradients else " At that moment there is no gradient yet."
    known = (f"Not counted: {NOT_COUNTED}. {HELD_TO}." if answer.counted
             else "By a closed form, which is within 10 %.")
    return (f"At its peak a rank holds {format_number(answer.held.total / GB)} GB of tensors, "
            f"and {answer.overhead / GB:.2f} GB in addition: {parts}.{gradients} {known}")
