"""The charts and tables of parameters, of bytes by recipe and of ZeRO's stages: exercises 1.1 to
1.3, drawn with the student's own functions."""

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_numbers
from labs.exercises.verdicts import print_in_script, shows
from labs.memory_math import ground_truth, measurements
from labs.memory_math.checks import STATES
from labs.memory_math.scaffold import model_sizes
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware, traffic
from labs.predictions.optimizers import OPTIMIZERS
from labs.training import hf_configs
from labs.training.memory_categories import GB, Memory

SIZES = ("family", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocabulary",
         "positions", "tied", "qkv_bias", "out_bias", "mlp_bias")
STAGES = ("plain data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def show_models() -> Table:
    """A table of the models' sizes, from which all formulas start."""
    rows = [(name, *(f"{value:,}" if type(value) is int else str(value) for value in
                     (getattr(m, name) for m in model_sizes().values()))) for name in SIZES]
    return print_in_script(Table("sizes, by their names in m", ("", *model_sizes()), rows))


def show_block(name: str) -> Table:
    """A table of the parameters of one block of a well-known model, read off the model."""
    block = ground_truth.first_block(hf_configs.on_meta(hf_configs.config(name)))
    rows = [(label, " x ".join(map(str, p.shape)), f"{p.numel():,}")
            for label, p in block.named_parameters()]
    total = ("one block", "", f"{sum(p.numel() for p in block.parameters()):,}")
    return print_in_script(Table(f"{name}, block 0", ("parameter", "shape", "elements"),
                                 [*rows, total], total=True))


@shows("1.1")
def show_outside_blocks(block_parameters, model_parameters) -> Picture:
    """The share of each model's parameters that is in no block, in percent."""
    rows = []
    for name, m in model_sizes().items():
        _, _, block, total = ground_truth.counted_model(name)
        rows.append(Bar(name, 100 * (1 - m.layers * block / total),
                        100 * (1 - m.layers * block_parameters(m) / model_parameters(m)),
                        guessed("1.1") if name == "Llama-3-8B" else None,
                        colour=palette.MEMORY["parameters"]))
    return bars(rows, "%", "of the parameters are in no block (bar: the model itself)")


@shows("1.2")
def show_recipes(bytes_per_parameter, recipes: dict[str, tuple]) -> Picture:
    """Bytes per parameter: the student's, and those of real tensors after a step of AdamW."""
    measured = ground_truth.measured_recipes()
    return memory_bars([MemoryRow(name, measured.get(name),
                                  states_of(bytes_per_parameter(*types), name),
                                  guessed("1.2") if name == "bf16, fp32 master" else None)
                        for name, types in recipes.items()], "per parameter", unit="bytes")


@shows("1.2")
def show_quoted_figures(bytes_per_parameter, recipes: dict[str, tuple]) -> Table:
    """A table of GB of model states by recipe: the figures that much material quotes."""
    rows = []
    for name, types in recipes.items():
        held = states_of(bytes_per_parameter(*types), name)
        rows.append((name, f"{held.total:g}", f"{7 * held.total:g}", f"{13 * held.total:g}",
                     f"{7 * held.optimizer_state:g}"))
    return Table("GB for models of exactly 7 and 13 billion parameters", (
        "recipe", "bytes per parameter", "7B", "13B", "optimizer of 7B"), rows)


def states_of(returned, what: str) -> Memory:
    """What a student's function returned, as bytes by category. Raises Wrong unless it is three
    numbers."""
    return Memory(*require_numbers(returned, STATES, what))


@shows("1.3")
def show_figure_1(per_rank) -> Picture:
    """Figure 1 of the ZeRO paper from the student's function."""
    return _stages(per_rank, 7.5e9, (2, 2, 12), 64, "of one rank: 7.5B, 64 ranks, K = 12")


@shows("1.3")
def show_70b(per_rank) -> Picture:
    """70B on 8 ranks, with the capacities of GPUs and the student's guess."""
    return _stages(per_rank, 70e9, (2, 2, 8), 8, "of one rank: 70B, 8 ranks, 12 bytes each",
                   guessed("1.3"), ("A100-80", "H200", "B200"))


def _stages(per_rank, count, recipe, ranks, title, guess=None, gpus=()) -> Picture:
    rows = [MemoryRow(name, predicted=states_of(per_rank(count, recipe, stage, ranks), name),
                      guessed=guess and guess * GB if stage == 2 else None)
            for stage, name in enumerate(STAGES)]
    return memory_bars(rows, title, [(hardware.gpu(name).usable, name) for name in gpus],
                       unit="GB")


@shows("1.3")
def show_savings(per_rank) -> Table:
    """A table of how many times fewer bytes a rank holds, for more and more ranks."""
    def saving(stage, ranks):
        whole, share = (sum(per_rank(1e9, (2, 2, 12), which, ranks)) for which in (0, stage))
        return f"{whole / share:,.2f}".removesuffix(".00")

    rows = [(f"{ranks:,}", *(saving(stage, ranks) for stage in (1, 2, 3)))
            for ranks in (2, 8, 64, 1024, 10**6)]
    return Table("times less than plain data parallelism, 16 bytes per parameter with K = 12",
                 ("ranks", *STAGES[1:]), rows)


@shows("Optimizers")
def show_optimizers() -> Table:
    """A table of the bytes per parameter that an optimizer keeps, and that its step needs for a
    moment: in closed form, and measured where torch has the optimizer."""
    measured, rows = measurements.measured_optimizers(), []
    for name, optimizer in OPTIMIZERS.items():
        state, temporary = measured.get(name, (None, None))
        formula = f"{optimizer.temporary:g}" if not optimizer.largest else (
            f"{optimizer.largest:g} of the largest tensor")
        rows.append((name, f"{optimizer.state:.4g}", "" if state is None else f"{state:.4g}",
                     formula, "" if state is None else f"{temporary:.2f}"))
    tensors = measurements.TENSORS
    return Table("bytes per parameter, for parameters that are updated in fp32", (
        "", "state", "measured", "temporary in step", "measured"), rows,
        note=f"Measured with {tensors} equal tensors, so that 12 bytes of the largest one are "
             f"{12 / tensors:g} per parameter. torch has no 8-bit AdamW: that row is a formula.")


def show_traffic() -> Table:
    """A table of what a step communicates in forward, backward and step, by stage, in Ψ."""
    rows = []
    for stage, name in enumerate(STAGES):
        phases = traffic.passes_by_phase(stage).values()
        rows.append((name, *(" + ".join(map(_volume, kinds)) or "nothing" for kinds in phases)))
    return print_in_script(Table(
        "what goes through a step's collectives, in elements", ("", "forward", "backward", "step"),
        rows, left=3, note="An all-reduce sends its Ψ elements twice. Each of N ranks sends "
        "(N-1)/N of all this; a bf16 element has 2 bytes."))


def _volume(kind) -> str:
    passes = traffic.passes(kind)
    return f"{kind.replace('_', '-')} {passes if passes > 1 else ''}Ψ"
