"""The pictures and tables of exercises 1.1 to 1.4, each made with the student's own functions."""

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import print_in_script, shows
from labs.memory_math import measuring, truth
from labs.memory_math.activation_checks import RAN
from labs.memory_math.answers import numbers
from labs.memory_math.checks import STATES
from labs.pictures.measured import Bar, bars
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.tables import Table
from labs.predictions import activations as closed
from labs.predictions import hardware
from labs.predictions.parameters import shape_of
from labs.training import hf_configs
from labs.training.memory_categories import GB, Memory

SHOWN = ("GPT-2", "Llama-2-7B", "Llama-2-13B", "Llama-3-8B", "Llama-3-70B", "Qwen2-0.5B",
         "Qwen2-7B")
STAGES = ("plain data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3")
LONG = (1, 8192)  # batch, sequence of the table of a model's activations


def models() -> dict:
    """Name -> sizes of the models of this notebook."""
    return {name: shape_of(hf_configs.config(name)) for name in SHOWN}


SIZES = ("family", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocabulary",
         "positions", "tied", "qkv_bias", "out_bias", "mlp_bias")


def show_models():
    """What the configurations say: the sizes that all formulas start from."""
    shapes = models()
    rows = [(size, *(_size(getattr(m, size)) for m in shapes.values())) for size in SIZES]
    return print_in_script(Table("sizes, by their names in m", ("", *shapes), rows))


def _size(value) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def show_block(name: str):
    """The parameters of one block of a well-known model, read off the model itself."""
    block = truth.block_of(hf_configs.on_meta(hf_configs.config(name)))
    found = list(block.named_parameters())
    rows = [(label, " x ".join(map(str, p.shape)), f"{p.numel():,}") for label, p in found]
    total = ("one block", "", f"{sum(p.numel() for _, p in found):,}")
    return print_in_script(Table(f"{name}, block 0", ("parameter", "shape", "elements"),
                                 [*rows, total],
                      total=True))


@shows("1.1")
def show_outside(block_parameters, model_parameters):
    """The share of each model's parameters that is not in its blocks, as percent."""
    rows = []
    for name, m in models().items():
        _, block, whole = truth.known_model(name)
        mine = model_parameters(m)
        rows.append(Bar(name, 100 * (1 - m.layers * block / whole),
                        100 * (1 - m.layers * block_parameters(m) / mine),
                        guessed("% of Llama-3-8B outside its blocks")
                        if name == "Llama-3-8B" else None))
    return bars(rows, "%", "of the parameters are in no block (bar: the model itself)")


@shows("1.2")
def show_recipes(bytes_per_parameter, recipes: dict):
    """Bytes per parameter: the student's, and those of real tensors after a step of AdamW."""
    measured = measuring.recipes()
    return memory_bars([MemoryRow(name, measured.get(name),
                                  _states(bytes_per_parameter(*types), name),
                          guessed("bytes per parameter, bf16 with fp32 master")
                          if name == "bf16, fp32 master" else None)
                    for name, types in recipes.items()], "per parameter", unit="bytes")


@shows("1.2")
def show_quoted(bytes_per_parameter, recipes: dict):
    """GB of model states by recipe: the figures that much material quotes."""
    rows = []
    for name, types in recipes.items():
        held = _states(bytes_per_parameter(*types), name)
        rows.append((name, f"{held.total:g}", f"{7 * held.total:g}", f"{13 * held.total:g}",
                     f"{7 * held.optimizer_state:g}"))
    return Table("GB for models of exactly 7 and 13 billion parameters", (
        "recipe", "bytes per parameter", "7B", "13B", "optimizer of 7B"), rows)


@shows("1.3")
def show_figure_1(per_rank):
    """Figure 1 of the ZeRO paper from the student's function."""
    return _stages(per_rank, 7.5e9, (2, 2, 12), 64, "of one rank: 7.5B, 64 ranks, K = 12")


@shows("1.3")
def show_70b(per_rank):
    """70B on 8 ranks, with the capacities of GPUs and the student's guess."""
    return _stages(per_rank, 70e9, (2, 2, 8), 8, "of one rank: 70B, 8 ranks, 12 bytes each",
                   guessed("GB per rank, 70B on 8 ranks, ZeRO-2"), ("A100-80", "H200", "B200"))


def _stages(per_rank, count, recipe, ranks, title, guess=None, gpus=()):
    rows = [MemoryRow(name, predicted=_states(per_rank(count, recipe, stage, ranks), name),
                  guessed=guess and guess * GB if stage == 2 else None)
            for stage, name in enumerate(STAGES)]
    return memory_bars(rows, title, [(hardware.gpu(name).usable, name) for name in gpus], unit="GB")


def _states(said, what) -> Memory:
    return Memory(*numbers(said, STATES, what))


@shows("1.3")
def show_savings(per_rank):
    """How many times less a rank holds, for more and more ranks."""
    def saving(stage, ranks):
        whole, share = (sum(per_rank(1e9, (2, 2, 12), which, ranks)) for which in (0, stage))
        return f"{whole / share:,.2f}".removesuffix(".00")

    rows = [(name, *(saving(stage, ranks) for stage in (1, 2, 3)))
            for name, ranks in (("2", 2), ("8", 8), ("64", 64), ("1024", 1024),
                                ("a million", 10**6))]
    return Table("times less than plain data parallelism, 16 bytes per parameter with K = 12",
                 ("ranks", *STAGES[1:]), rows)


PARTS = ("norm 1: input", "norm 1: mean", "norm 1: 1 / deviation", "q, k, v: input",
         "scores: keys", "scores: queries", "softmax: output", "dropout of scores: mask",
         "weighted sum: values", "weighted sum: scores", "attention's output: input",
         "dropout: mask", "norm 2: input", "norm 2: mean", "norm 2: 1 / deviation",
         "up: input", "GELU: input", "down: input", "dropout: mask")


def show_saved():
    """Each tensor that a real GPT-2 block in bf16 saves for backward, in units of s·b·h."""
    batch, sequence, hidden, heads = RAN
    unit = batch * sequence * hidden
    found = truth.saved(*RAN, fused=False)
    parts = PARTS if len(PARTS) == len(found) else [""] * len(found)  # another torch
    rows = [(part, " x ".join(map(str, shape)), str(dtype).removeprefix("torch."),
             f"{nbytes:,}", f"{nbytes / unit:.3g}")
            for part, (nbytes, shape, dtype) in zip(parts, found, strict=True)]
    total = sum(nbytes for nbytes, _, _ in found)
    return print_in_script(Table(
        f"GPT-2 block in bf16 with dropout and eager attention: batch b = {batch}, sequence "
        f"s = {sequence}, hidden h = {hidden}, heads a = {heads}",
        ("saved for backward", "shape", "type", "bytes", "in s·b·h"),
        [*rows, ("together", "", "", f"{total:,}", f"{total / unit:.4g}")], total=True))


@shows("1.4")
def show_layers(layer_activations):
    """What real blocks save, in units of s·b·h, beside the student's formula."""
    m, batch, sequence = shape_of(hf_configs.config("GPT-2")), 1, 1024
    unit, rows = batch * sequence * m.hidden, []
    for fused, name in ((False, "GPT-2, eager attention"), (True, "GPT-2, fused attention")):
        sizes = batch, sequence, m.hidden, m.heads, fused
        rows.append(Bar(name, sum(nbytes for nbytes, _, _ in truth.saved(*sizes)) / unit,
                        layer_activations(*sizes) / unit,
                        None if fused else guessed("activations of a GPT-2 layer, in s·b·h")))
    llama = sum(nbytes for nbytes, _, _ in truth.saved_by_llama(1, 128, 256)) / (128 * 256)
    rows.append(Bar("Llama-3's proportions, fused", llama))
    return bars(rows, "s·b·h", "bytes saved by one block in bf16 (GPT-2 with 1024 tokens)")


@shows("1.4")
def show_activations(activations):
    """Llama-3-8B with a long sequence: what is kept, and what comes on top."""
    m, (batch, sequence) = shape_of(hf_configs.config("Llama-3-8B")), LONG
    checkpoints = m.layers * closed.korthikanti(batch, sequence, m.hidden, m.heads,
                                                recompute="full")
    logits = 4 * batch * sequence * m.vocabulary
    rows = [("all layers, and the logits", activations(m, *LONG, False)),
            ("with checkpointing, at the fullest moment", activations(m, *LONG, True)),
            (f"   its {m.layers} checkpoints", checkpoints),
            ("   fp32 logits", logits),
            ("   one layer, computed again", 34 * batch * sequence * m.hidden)]
    return Table(f"Llama-3-8B, {batch} x {sequence:,} tokens: GB of activations",
                 ("", "GB", "of the checkpoints"),
                 [(name, f"{size / GB:,.3g}", f"{size / checkpoints:.2f}x")
                  for name, size in rows])
