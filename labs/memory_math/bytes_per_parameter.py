"""Exercise 1.2: bytes per parameter by recipe, and the recipes that a quoted figure may assume."""

from collections.abc import Collection

import torch

from labs.checks.generator import is_graded, new_generator, unless_graded
from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, judge_number, pairs, require_numbers, require_signature
from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.memory_math import ground_truth, measurements
from labs.memory_math.scaffold import STATES, TABLE_HINT
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions.memory.optimizers import OPTIMIZERS
from labs.training.memory_categories import Memory
from labs.training.presets import Preset
from labs.words import listed

Types = tuple[torch.dtype, torch.dtype, torch.dtype, bool]
_FP32, _BF16 = torch.float32, torch.bfloat16
NAMED = {"fp32": (_FP32, _FP32, _FP32, False), "bf16": (_BF16, _BF16, _BF16, False),
         "bf16, fp32 moments": (_BF16, _BF16, _FP32, False),
         "bf16, fp32 master": (_BF16, _BF16, _FP32, True),
         "megatron": (_BF16, _FP32, _FP32, True)}
# All types and a master copy: each common mistake leads to another number here.
TELLING = (_BF16, _FP32, torch.float8_e4m3fn, True)
# (GB, billions of parameters). 120 GB lie between two recipes of 7B; "54 GB" is 6.74 x 8, rounded.
FIGURES = [(84, 7), (112, 7), (156, 13), (120, 7), (126, 7), (54, 6.74), (560, 70)]


@check("1.2", hints=TABLE_HINT)
def check_bytes_per_parameter(bytes_per_parameter, recipes_behind):
    """Three numbers for any dtypes, with a master copy or not; and the names of all recipes that
    lead to a figure in GB."""
    require_signature(bytes_per_parameter, ("weights", "gradients", "moments", "master"))
    require_signature(recipes_behind, ("gigabytes", "billions", "recipes"))
    for recipe in _recipes():
        what = "weights {}, gradients {}, moments {}, {} master".format(
            *(str(dtype).removeprefix("torch.") for dtype in recipe[:3]),
            "with a" if recipe[3] else "no")
        returned = require_numbers(bytes_per_parameter(*recipe), STATES, what)
        real = bytes_of(*recipe)
        for name, got, want, causes in zip(STATES, returned, real, causes_of(*recipe, *real),
                                           strict=True):
            judge_number(got, want, causes, f"{what}: {name}", "bytes")
    for gigabytes, billions in FIGURES:
        _judge_names(recipes_behind, gigabytes, billions, NAMED)
    # Other recipes: reject an answer that knows the notebook's own by heart.
    for gigabytes, billions, recipes in _random_cases():
        _judge_names(recipes_behind, gigabytes, billions, recipes)
    return ("right for fp32, bf16 and random dtypes of 8 to 64 bits; all recipes of nine figures: "
            "112 GB for 7B may be either of two")


def _recipes() -> list[Types]:
    """(weights, gradients, moments, master): those of the notebook, and two of types drawn at
    random, which reject answers that know only fp32 and bf16."""
    without, with_master = ([types for types in NAMED.values() if types[3] == master]
                            for master in (False, True))
    return [*without, TELLING, *with_master, *random_types()]


def random_types() -> list[Types]:
    others = [torch.float64, torch.float8_e4m3fn, torch.float16, torch.uint8]
    rng = new_generator()
    return [(*rng.sample(others, 3), master) for master in (False, True)]


def bytes_of(weights, gradients, moments, master) -> tuple[int, int, int]:
    """Bytes of real tensors: one parameter's weight, its gradient, and two moments with a master
    copy."""
    # Two moments of one number each; a master copy is fp32, torch.empty's default.
    state = [torch.empty(1, dtype=moments)] * 2 + [torch.empty(1)] * master
    return (torch.empty(1, dtype=weights).nbytes, torch.empty(1, dtype=gradients).nbytes,
            sum(tensor.nbytes for tensor in state))


def causes_of(weights, gradients, moments, master, parameter: int, gradient: int,
              state: int) -> tuple[list[Cause], ...]:
    """Common mistakes with the weights, with the gradients, and with the optimizer state.
    parameter, gradient, state: the right bytes of each."""
    moment, copy = moments.itemsize, 4 * master
    of_state = [
        Cause("fp32_master_copy_missing", state - copy, "the fp32 master copy is missing",
              "It takes 4 more bytes."),
        Cause("moments_taken_fp32", 8 + copy, "the moments are taken as fp32",
              f"They are {moment} bytes each here."),
        Cause("moments_taken_in_weights_type", 2 * parameter + copy,
              "the moments are taken in the weights' type", "They have a type of their own."),
        Cause("only_one_moment_counted", state - moment, "only one moment is counted",
              "Adam keeps two: mean and mean square."),
        Cause("no_master_copy", 2 * moment + 4, "there is no master copy here",
              "Count one only where `master` is True."),
        Cause("master_copy_taken_in_weights", 2 * moment + parameter * master,
              "the master copy is taken in the weights' type",
              "It is there to be finer than they are: in fp32."),
        Cause("master_copy_taken_in_moments", 2 * moment + moment * master,
              "the master copy is taken in the moments' type",
              "A master copy is fp32, whatever the moments are.")]
    return ([Cause("master_copy_counted_among_weights", parameter + copy,
                   "the master copy is counted among the weights",
                   "The optimizer keeps it: it belongs to the optimizer state.")],
            [Cause("weights_type", parameter, "that is the weights' type",
                   "Gradients have a type of their own here.")],
            of_state + pairs(of_state, state))


def _random_cases() -> list[tuple[int, int, dict[str, Types]]]:
    """(GB, billions of parameters, recipes by name): a figure of each of two recipes."""
    recipes = dict(zip(("first", "second"), random_types(), strict=True))
    billions = new_generator().randint(3, 90)
    return [(billions * sum(bytes_of(*types)), billions, recipes) for types in recipes.values()]


def _judge_names(recipes_behind, gigabytes, billions, recipes):
    what = f"{gigabytes} GB for {billions}B"
    found = _names(recipes_behind(gigabytes, billions, recipes), what, recipes)
    totals = {name: billions * sum(bytes_of(*types)) for name, types in recipes.items()}
    # In GB: billions of parameters times bytes of each.
    right = {name for name, total in totals.items() if round(total) == gigabytes}
    # All recipes and no other: catches the first match alone, exact equality with a rounded
    # figure, and a tolerance that takes the neighbour.
    for name in sorted(right - found):
        which = "a recipe" if is_graded() else repr(name)
        raise Wrong(f"{what}: {which} is missing, which makes "
                    f"{unless_graded(_gb(totals[name]))} GB",
                    "Several recipes may lead to one figure, and figures are rounded to whole GB.",
                    code="missing_entry")
    for name in sorted(found - right):
        raise Wrong(f"{what}: {name!r} makes {unless_graded(_gb(totals[name]))} GB",
                    "Only recipes that lead to this figure, rounded to whole GB.",
                    code="extra_entry")


def _names(returned, what, recipes) -> set[str]:
    if isinstance(returned, str):
        raise Wrong(f"{what}: it returned one name, {returned!r}, not a list of names",
                    "Several recipes may lead to one figure, or none.", code="wrong_type")
    try:
        found = list(returned)
    except TypeError:
        raise Wrong(f"{what}: it returned {kind_of(returned)}, not a list of names",
                    "Where no recipe fits, return an empty list.", code="wrong_type") from None
    return _known(found, what, recipes)


def _known(found: Collection, what, recipes) -> set[str]:
    for name in found:
        if not isinstance(name, str) or name not in recipes:
            raise Wrong(f"{what}: {name!r} is no recipe's name",
                        f"The names are {listed(list(map(repr, recipes)))}.", code="unknown_name")
    return set(found)


def _gb(value) -> str:
    return f"{value:,.6g}"


@shows("1.2")
def show_recipes(bytes_per_parameter, recipes: dict[str, tuple]) -> Picture:
    """Bytes per parameter: the student's, and those of real tensors after a step of AdamW."""
    measured = ground_truth.measured_recipes()
    held = {name: states_of(bytes_per_parameter(*types), name) for name, types in recipes.items()}
    totals = [each.total for each in held.values()]
    same = [name for name, each in held.items() if each.total == max(totals)]
    return memory_bars([MemoryRow(name, measured.get(name), each,
                                  guessed("1.2") if name == "bf16, fp32 master" else None)
                        for name, each in held.items()], "per parameter", unit="bytes",
                       lesson=f"From {min(totals):g} to {max(totals):g} bytes for one parameter; "
                              f"most: {listed(same)}")


@shows("1.2")
def show_quoted_figures(bytes_per_parameter, recipes: dict[str, tuple]) -> Table:
    """A table of GB of model states by recipe: the figures that are often quoted."""
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


MB = 10**6


@shows("Mixed precision")
def show_mixed_precision(preset: Preset) -> Table:
    """A table of what a rank holds that trains the preset's GPT-2 in fp32, and in bf16 with an fp32
    master copy: each of the model states, and activations."""
    fp32, mixed = measurements.measure_precisions(preset).values()
    names = ("parameters", "gradients", "optimizer state")
    pairs = [(name, fp32.states.by_name()[name], mixed.states.by_name()[name]) for name in names]
    pairs.append(("model states together", *(sum(pair[place] for pair in pairs)
                                             for place in (1, 2))))
    pairs.append(("activations after forward", fp32.activations, mixed.activations))
    rows = [(name, *(f"{size / MB:.2f}" for size in sizes), f"{sizes[0] / sizes[1]:.2f}x")
            for name, *sizes in pairs]
    return Table("MB of one rank, measured: states after backward, activations after forward",
                 ("", "fp32", "bf16, fp32 master", "fp32 takes"), rows)
