"""The explorer: what one rank of a training job would hold, and which GPUs that fits on. It asks
the functions that the checks ask."""

import functools
from dataclasses import dataclass

from labs.exercises.verdicts import print_in_script
from labs.pictures import live_memory
from labs.pictures.marks import format_number
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.widgets import Choice, Controls
from labs.predictions import hardware
from labs.predictions.memory import CHECKPOINTING, predict
from labs.predictions.memory_recipes import RECIPES
from labs.training import hf_configs
from labs.training.memory_categories import GB, Memory

MODELS = ("GPT-2", "Llama-2-7B", "Llama-3-8B", "Qwen2-7B", "Llama-2-13B", "Llama-3-70B")
GPUS = ("T4", "A10", "A100-40", "A100-80", "H100", "H200")
STRATEGIES = {"DDP": dict(strategy="ddp"), "ZeRO-1": dict(strategy="zero1"),
              "ZeRO-2": dict(strategy="zero2"), "ZeRO-3 = FSDP": dict(strategy="fsdp2"),
              "FSDP, no resharding": dict(strategy="fsdp2", reshard=False)}
RECIPE_NAMES = ("fp32", "bf16", "bf16, fp32 moments", "bf16, fp32 master", "bf16 policy",
                "megatron")
_FIRST = dict(model="Llama-3-8B", ranks=8, strategy="ZeRO-3 = FSDP", recipe="bf16, fp32 master",
              batch=1, sequence=4096, checkpointing="full")


@dataclass(frozen=True)
class Setting:
    """A job: model is one of MODELS, strategy one of STRATEGIES, recipe one of RECIPES; batch in
    sequences per rank, sequence in tokens."""

    model: str
    ranks: int
    strategy: str
    recipe: str
    batch: int
    sequence: int
    checkpointing: str

    @functools.cached_property
    def held(self) -> Memory:
        """Bytes of one rank at the peak of a step. Raises ValueError where there is no such job."""
        return predict(_config(self.model), batch=self.batch, sequence=self.sequence,
                       ranks=self.ranks, recipe=self.recipe, checkpointing=self.checkpointing,
                       device="cuda", **STRATEGIES[self.strategy])["peak"]

    @property
    def overhead(self) -> float:
        """Bytes beside the tensors."""
        return hardware.overhead(self.ranks)

    def fits(self, gpu: str) -> bool:
        """Whether one rank fits on this GPU."""
        return hardware.fits(self.held.total, gpu, self.ranks)

    def spare(self, gpu: str) -> float:
        """Bytes that are left on this GPU; negative where they lack."""
        return hardware.gpu(gpu).usable - self.held.total - self.overhead


@functools.cache
def _config(model):
    return hf_configs.config(model)


def explore_memory(**first) -> Controls:
    """Controls for every part of a `Setting`, and one rank's memory below. first: what they say in
    the beginning, e.g. model="Llama-2-13B", ranks=4."""
    unknown = set(first) - set(_FIRST)
    if unknown:
        raise TypeError(f"explore_memory has no {unknown.pop()!r}; it has {', '.join(_FIRST)}")
    chosen = {**_FIRST, **first}
    choices = [_choice(name, label, kind, options, chosen[name])
               for name, label, kind, options in _controls()]
    return print_in_script(Controls(choices, still, live, columns=2))


def _controls() -> list:
    """(name, label, kind, options) of each."""
    recipes = [(f"{name}  ({_parts(RECIPES[name])})", name) for name in RECIPE_NAMES]
    return [("model", "model", "menu", MODELS),
            ("ranks", "ranks", "slider", [2**power for power in range(11)]),
            ("strategy", "strategy", "menu", tuple(STRATEGIES)),
            ("batch", "batch per rank", "slider", [2**power for power in range(8)]),
            ("recipe", "recipe", "menu", recipes),
            ("sequence", "sequence", "slider", [2**power for power in range(8, 18)]),
            ("checkpointing", "checkpointing", "menu", CHECKPOINTING)]


def _parts(recipe) -> str:
    return (f"{recipe.parameters:g} + {recipe.gradients:g} + {recipe.optimizer_state:g} bytes")


def _choice(name, label, kind, options, value) -> Choice:
    pairs = [each if isinstance(each, tuple) else (f"{each}", each) for each in options]
    if value not in [each for _, each in pairs]:
        if kind != "slider":
            raise ValueError(f"{name}={value!r}: choose {', '.join(repr(v) for _, v in pairs)}")
        pairs = sorted([*pairs, (f"{value}", value)], key=lambda pair: pair[1])
    return Choice(name, label, pairs, value, kind)


def live(**chosen) -> str:
    """HTML for one setting."""
    setting = Setting(**chosen)
    impossible = _impossible(setting)
    fits = [None if impossible else setting.fits(name) for name in GPUS]
    gpus = [(hardware.gpu(name).usable, name, fit) for name, fit in zip(GPUS, fits, strict=True)]
    return live_memory.drawing(None if impossible else setting.held, setting.overhead, gpus,
                               impossible or verdict(setting), "" if impossible else named(setting))


def still(**chosen) -> Picture:
    """The picture of one setting."""
    setting = Setting(**chosen)
    impossible = _impossible(setting)
    capacities = [(hardware.gpu(name).usable, name) for name in GPUS]
    row = MemoryRow(f"{setting.model}\n{setting.strategy}\n{setting.ranks} ranks",
                     predicted=None if impossible else setting.held,
                     overhead=0 if impossible else setting.overhead)
    return memory_bars([row], "of one rank at its peak", capacities,
                          note=impossible or f"{verdict(setting)} {named(setting)}")


def _impossible(setting) -> str:
    """Why there is no such job, in a sentence, or nothing."""
    try:
        setting.held  # noqa: B018
    except ValueError as error:
        return f"No such job: {error}."
    return ""


def verdict(setting: Setting) -> str:
    """What fits, in a sentence."""
    fitting = [name for name in GPUS if setting.fits(name)]
    if not fitting:
        lacks = format_number(-setting.spare(GPUS[-1]) / GB)
        return f"Fits on none of these GPUs: even the {GPUS[-1]} lacks {lacks} GB."
    first, *others = fitting
    spare = format_number(setting.spare(first) / GB)
    also = f", and on the {' and the '.join(others)}" if len(others) < 3 else \
        ", and on all that are larger"
    return f"Fits on the {first} with {spare} GB to spare{also if others else ''}."


def named(setting: Setting) -> str:
    """What a rank holds beside its tensors, by name."""
    parts = ", ".join(f"{name} {nbytes / GB:.2f}"
                      for name, nbytes in hardware.overheads(setting.ranks).items() if nbytes)
    gradients = "" if setting.held.gradients else " At that moment there is no gradient yet."
    return (f"At its peak a rank holds {format_number(setting.held.total / GB)} GB of tensors, and "
            f"{setting.overhead / GB:.2f} GB beside them: {parts}.{gradients}")
