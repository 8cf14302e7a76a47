"""One rank's memory for any setting of a training job: the explorer, and its chart for up to 1024
ranks. Both draw what `labs.predictions` says."""

import functools
from dataclasses import dataclass

import torch

from labs.checks.verdicts import print_in_script
from labs.pictures.live_memory import memory_html
from labs.pictures.marks import format_number
from labs.pictures.memory import MemoryRow, memory_bars, memory_columns
from labs.pictures.picture import Picture
from labs.pictures.widgets import Choice, Controls
from labs.predictions import hardware
from labs.predictions.dryrun import dry_run
from labs.predictions.memory.predict import CHECKPOINTING, HELD_TO, NOT_COUNTED, predict
from labs.predictions.memory.recipes import RECIPES
from labs.training import hf_configs
from labs.training.memory_categories import GB, Memory
from labs.words import listed

MODELS = ("GPT-2", "Phi-3-mini", "Llama-2-7B", "Mistral-7B", "Qwen2-7B", "Llama-3-8B", "Qwen3-8B",
          "Gemma-7B", "Llama-2-13B", "Llama-3-70B")
# In order of memory: the last is the largest.
GPUS = ("T4", "A10", "A100-40", "A100-80", "H100", "H200")
STRATEGIES = {"DDP": dict(strategy="ddp"), "ZeRO-1": dict(strategy="zero1"),
              "ZeRO-2": dict(strategy="zero2"), "ZeRO-3 = FSDP": dict(strategy="fsdp2"),
              "FSDP, no resharding": dict(strategy="fsdp2", reshard=False)}
RECIPE_NAMES = ("fp32", "bf16", "bf16, fp32 moments", "bf16, fp32 master", "bf16 policy",
                "megatron")
DEFAULTS = dict(model="Llama-3-8B", ranks=8, strategy="ZeRO-3 = FSDP", recipe="bf16, fp32 master",
                batch=1, sequence=4096, checkpointing="full")


@dataclass(frozen=True)
class Setting:
    """A job: model has a configuration in `hf_configs`, strategy is one of STRATEGIES, recipe one
    of RECIPES; batch in sequences per rank, sequence in tokens."""

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
        """Bytes that CUDA and NCCL hold in addition to tensors."""
        return hardware.overhead(self.ranks)

    def fits(self, gpu: str) -> bool:
        """Whether one rank fits on this GPU."""
        return hardware.fits(self.held.total, gpu, self.ranks)

    def spare(self, gpu: str) -> float:
        """Bytes that are left on this GPU; negative where the job does not fit."""
        return hardware.gpu(gpu).usable - self.held.total - self.overhead

    def error(self) -> str:
        """Why there is no such job, in a sentence; empty where there is one."""
        try:
            self.held  # noqa: B018
        except ValueError as error:
            return f"No such job: {error}."
        return ""


@functools.cache
def _config(model):
    return hf_configs.config(model)


def explore_memory(**first) -> Controls:
    """Controls for every part of a `Setting`, and one rank's memory below. first: where they start,
    e.g. model="Llama-2-13B", ranks=4. Raises TypeError or ValueError where there is no such
    control or choice."""
    unknown = set(first) - set(DEFAULTS)
    if unknown:
        raise TypeError(f"explore_memory has no {unknown.pop()!r}; it has {', '.join(DEFAULTS)}")
    chosen = {**DEFAULTS, **first}
    choices = [_choice(name, label, kind, options, chosen[name])
               for name, label, kind, options in _controls()]
    return print_in_script(Controls(choices, draw_setting, setting_html, columns=2))


def _controls() -> list[tuple]:
    """(name, label, kind, options) of each."""
    recipes = [(f"{name}  ({recipe.parameters:g} + {recipe.gradients:g} + "
                f"{recipe.optimizer_state:g} bytes)", name)
               for name, recipe in ((name, RECIPES[name]) for name in RECIPE_NAMES)]
    return [("model", "model", "menu", MODELS),
            ("ranks", "ranks", "slider", [2**power for power in range(11)]),
            ("strategy", "strategy", "menu", tuple(STRATEGIES)),
            ("batch", "batch per rank", "slider", [2**power for power in range(8)]),
            ("recipe", "recipe", "menu", recipes),
            ("sequence", "sequence", "slider", [2**power for power in range(8, 18)]),
            ("checkpointing", "checkpointing", "menu", CHECKPOINTING)]


def _choice(name, label, kind, options, value) -> Choice:
    pairs = [each if isinstance(each, tuple) else (f"{each}", each) for each in options]
    if value not in [each for _, each in pairs]:
        if kind != "slider":
            raise ValueError(f"{name}={value!r}: choose {', '.join(repr(v) for _, v in pairs)}")
        pairs = sorted([*pairs, (f"{value}", value)], key=lambda pair: pair[1])
    return Choice(name, label, pairs, value, kind)


def setting_html(**chosen) -> str:
    """HTML for one setting, quick enough to follow a slider."""
    setting = Setting(**chosen)
    error = setting.error()
    gpus = [(hardware.gpu(name).usable, name, None if error else setting.fits(name))
            for name in GPUS]
    return memory_html(None if error else setting.held, setting.overhead, gpus,
                       error or verdict(setting), "" if error else overhead_named(setting))


def draw_setting(**chosen) -> Picture:
    """The picture of one setting."""
    setting = Setting(**chosen)
    error = setting.error()
    row = MemoryRow(f"{setting.model}\n{setting.strategy}\n{setting.ranks} ranks",
                    predicted=None if error else setting.held,
                    overhead=0 if error else setting.overhead)
    return memory_bars([row], "of one rank at its peak", _capacities(GPUS),
                       note=error or f"{verdict(setting)} {overhead_named(setting)}")


def _capacities(gpus) -> list[tuple[float, str]]:
    return [(hardware.gpu(name).usable, name) for name in gpus]


def verdict(setting: Setting) -> str:
    """What fits, in a sentence."""
    fitting = [name for name in GPUS if setting.fits(name)]
    if not fitting:
        missing = format_number(-setting.spare(GPUS[-1]) / GB)
        return f"Fits on none of these GPUs: even the {GPUS[-1]} lacks {missing} GB."
    first, *others = fitting
    spare = format_number(setting.spare(first) / GB)
    also = f", and on the {' and the '.join(others)}" if len(others) < 3 else \
        ", and on all that are larger"
    return f"Fits on the {first} with {spare} GB to spare{also if others else ''}."


def overhead_named(setting: Setting) -> str:
    """What a rank holds at its peak, and what CUDA and NCCL take, in a sentence."""
    parts = ", ".join(f"{name} {nbytes / GB:.2f}"
                      for name, nbytes in hardware.overheads(setting.ranks).items() if nbytes)
    gradients = "" if setting.held.gradients else " At that moment there is no gradient yet."
    return (f"At its peak a rank holds {format_number(setting.held.total / GB)} GB of tensors, "
            f"and {setting.overhead / GB:.2f} GB in addition: {parts}.{gradients} "
            f"Not counted: {NOT_COUNTED}. {HELD_TO}.")


def _large() -> list[str]:
    """The GPUs that hold a rank of a large model."""
    return [name for name in GPUS if hardware.gpu(name).usable > 30 * GB]


def show_scaling(model: str = "Llama-3-70B", traced: tuple[int, ...] = (8, 64, 1024),
                 ranks: tuple[int, ...] = tuple(2**power for power in range(3, 11)),
                 batch: int = 1, sequence: int = 4096) -> Picture:
    """One rank of an FSDP2 job (bf16 policy, AdamW, full checkpointing) at its peak, by number of
    ranks: full columns from dry runs on `traced` ranks, pale ones predicted; the prediction is the
    tick on the full ones. batch: sequences per rank; sequence: tokens."""
    config = hf_configs.config(model)
    runs = _dry_runs(config, traced, batch, sequence)
    predicted = {count: predict(config, batch=batch, sequence=sequence, ranks=count, device="cuda",
                                strategy="fsdp2", recipe="bf16 policy",
                                checkpointing="full")["peak"]
                 for count in sorted({*ranks, *traced})}
    return print_in_script(memory_columns(
        {f"{count}": run.peak for count, run in runs.items()},
        {f"{count}": held for count, held in predicted.items()},
        f"of tensors on one rank of {model} at its peak", _capacities(_large()), unit="GB",
        below="ranks (FSDP2)", source="dry run", note=_note(runs, predicted), lesson=(
            f"From {min(predicted)} to {max(predicted):,} ranks: "
            f"{predicted[min(predicted)].total / GB:.0f} to "
            f"{predicted[max(predicted)].total / GB:.2g} GB of a rank")))


def _dry_runs(config, traced, batch, sequence) -> dict:
    # On a GPU, AdamW treats all parameters at once (torch.optim, foreach), and its temporaries are
    # as large as they are; on fake CPU tensors it does so only when asked.
    adamw = functools.partial(torch.optim.AdamW, foreach=True)
    try:
        return {count: dry_run(config, ranks=count, strategy="fsdp2", batch=batch,
                               sequence=sequence, precision="mixed", checkpointing="full",
                               optimizer=adamw, threads=1, backend="nccl") for count in traced}
    except KeyboardInterrupt:  # a new one, without pages of torch's own lines
        raise KeyboardInterrupt("interrupted; the dry run was given up") from None


def _note(runs, predicted) -> str:
    """How many ranks and layers were traced, and how far the prediction is from the dry runs."""
    off = max(abs(predicted[count].total / run.peak.total - 1) for count, run in runs.items())
    distance = f"{100 * off:.2f} % off at most" if off >= 1e-4 else "less than 0.01 % off"
    one = next(iter(runs.values()))
    return (f"Dry run on {listed(runs)} ranks: {one.traced} of {one.layers} layers with fake "
            f"tensors, {sum(run.seconds for run in runs.values()):.0f} s in one process. The "
            f"pale columns and the ticks are predicted, {distance}."
            f"{_other_explained(predicted.values())}")


def _other_explained(peaks) -> str:
    """What the grey part is, where it is a twentieth of any column or more."""
    if all(held.other < 0.05 * held.total for held in peaks):
        return ""
    return " Other: AdamW's temporaries, which it allocates for all parameters at once."
