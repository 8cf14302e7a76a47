"""Exercise 4.2: what a wrapping costs in collectives and in gathered bytes."""

from collections.abc import Callable
from functools import partial

from labs.checks.comparison import Comparison, compare, model_of
from labs.checks.gpu_notes import rounds_of
from labs.checks.guesses import guessed
from labs.checks.numbers import (
    Mistake,
    judge_number,
    likeliest_cause,
    number_or_none,
    require_numbers,
)
from labs.checks.verdicts import check, shows
from labs.fsdp import scaffold
from labs.fsdp.comparisons import draw_wrappings, few_tokens
from labs.pictures.picture import Picture
from labs.training.presets import Preset

# Most is gathered at the first unit, in the middle and at the last one; the root is larger than a
# unit and smaller; there are no units beside it, one, and two.
UNITS = ([5, 40, 10, 90, 80, 70, 60], [500], [10, 300, 50, 200, 250], [100, 900], [60, 400, 700],
         [10, 300, 250, 20, 200, 30], [1000, 700, 700, 700], [800, 20, 30])
NAMES = ("collectives", "gathered_bytes")
_FEW_UNITS = "cost([500]), the root alone, is asked too; and cost([100, 900]), with one unit more."


@check("4.2", hints={"empty sequence": _FEW_UNITS, "out of range": _FEW_UNITS})
def check_cost(cost: Callable[[list[int]], tuple[int, int]]) -> str:
    """cost(units) -> (collectives of a step, bytes gathered at once). units: parameters of each
    unit, the root's first, then in the order of forward; fp32."""
    for place, units in enumerate(UNITS):
        what = f"cost({units})"
        found = require_numbers(cost(list(units)), NAMES, what)
        for index, (want, unit, mistakes, hint) in enumerate((
                (collectives, NAMES[0], _COLLECTIVES, "One all-gather for the root, two for each "
                 "other unit, one reduce-scatter for all."),
                (gathered_bytes, "bytes gathered at once", _GATHERED, _gathered_hint(units)))):
            # One case alone fits several mistakes: the named one explains the answers to all cases
            # best.
            causes = [] if found[index] == want(units) else likeliest_cause(
                mistakes, UNITS, [_one_number(cost, one, index) for one in UNITS], place)
            judge_number(found[index], want(units), causes, what, unit, hint)
    return "counts the collectives of a step and the bytes gathered at once, for any units"


def _one_number(cost, units, index) -> int | float | None:
    return number_or_none(lambda: require_numbers(cost(list(units)), NAMES, "")[index])


def _gathered_hint(units) -> str:
    if len(units) == 1:
        return "The root alone: its flat buffer, and the parameters that are copied out of it."
    return ("Go through the units in order, and count at the moment at which each is copied out: "
            "the root's parameters, the buffer of the unit before, this unit's buffer and "
            "parameters.")


def collectives(units: list[int]) -> int:
    """Returns the collectives of one step: the root is gathered once, every other unit twice, and
    each unit is reduce-scattered once."""
    # Gathers of the root, gathers of the other units, reduce-scatters.
    return 1 + 2 * (len(units) - 1) + len(units)


def gathered_bytes(units: list[int]) -> int:
    """Returns the most bytes gathered at once, fp32, while a unit of forward is copied out of its
    flat buffer: buffer and parameters of this unit, the buffer of the unit before, and the root's
    parameters. Source: torch 2.13, FSDPParamGroup.wait_for_unshard, whose local variable keeps the
    result of the all-gather before until it returns. Backward holds no more: there a buffer is
    freed as soon as it is copied out, and the unit before it is gone."""
    root = units[0]
    return 4 * (root + max(_arrivals(units), default=root))


def _arrivals(units, before=1, here=2) -> list[int]:
    """For each unit besides the root: so many times the unit before it and the unit itself."""
    # By default: the flat buffer of the unit before, and this unit's buffer and parameters.
    return [before * a + here * b for a, b in zip(units, units[1:], strict=False)]


# Each number is what one particular misunderstanding gives. UNITS tell every two of them apart.
_COLLECTIVES = (
    # Resharding after forward costs a second all-gather; the root alone is spared it.
    Mistake("count_one_all_gather", lambda units: 2 * len(units), "you count one all-gather for "
            "each unit, but all units except the root are gathered again for backward", ""),
    Mistake("root_stays_gathered_after_forward", lambda units: 3 * len(units),
            "the root stays gathered after its forward, since its backward follows at once", ""),
    Mistake("all_gathers", lambda units: 2 * len(units) - 1,
            "these are the all-gathers; each unit's gradients are reduce-scattered too", ""),
    Mistake("unit_more_than_one_collective", len,
            "each unit has more than one collective in a step", ""))
_GATHERED = (
    Mistake("counts_parameters", lambda units: gathered_bytes(units) // 4,
            "that counts parameters; in fp32 each is 4 bytes", ""),
    Mistake("all_units_together_never_gathered", lambda units: 4 * sum(units),
            "all units together are never gathered at once", "A unit is freed after its forward."),
    Mistake("all_units_together_never_gathered", lambda units: 8 * sum(units),
            "all units together are never gathered at once",
            "Only the root is whole all the time; another unit is freed after its forward."),
    Mistake("root_parameters_alone", lambda units: 4 * units[0],
            "that is the root's parameters alone; each unit that arrives is there twice", ""),
    Mistake("counts_unit_computes_once", lambda units: 4 * (units[0] + max(units[1:] or [0])),
            "that counts the unit that computes once; it is there twice while it is copied out of "
            "its flat buffer, and the buffer of the unit before is there as well", ""),
    Mistake("counts_two_neighbours_once",
            lambda units: 4 * (units[0] + max(_arrivals(units[1:], 1, 1) or units[1:] or [0])),
            "that counts each of two neighbours once; the second is there twice, in its flat "
            "buffer and copied out of it",
            "A buffer of the unit before, a buffer and parameters of this unit."),
    Mistake("counts_two_neighbours_once",
            lambda units: 4 * (units[0] + max(_arrivals(units, 1, 1) or [0])),
            "that counts each of two neighbours once; the second is there twice, in its flat "
            "buffer and copied out of it",
            "A buffer of the unit before, a buffer and parameters of this unit."),
    Mistake("root_buffer_counted", lambda units: 8 * (units[0] + max(units[1:] or [0])),
            "of the root only the parameters are still there when a unit is copied out",
            "For the first unit the root is the unit before."),
    Mistake("leaves_out_flat_buffer_unit",
            lambda units: 4 * (units[0] + 2 * max(units[1:] or units)), "that leaves out the flat "
            "buffer of the unit before, which is freed only when this unit has been copied out",
            ""),
    Mistake("root_parameters_stay_gathered_time",
            lambda units: (4 * max(_arrivals(units) or [2 * units[0]]) if len(units) > 1
                           else 8 * units[0]),
            "the root's parameters stay gathered the whole time", "Add the root's bytes."),
    Mistake("unit_arrives_twice",
            lambda units: 4 * (units[0] + max(_arrivals(units, 2, 1), default=units[0])),
            "the unit that arrives is there twice, and of the one before it only the buffer", ""),
    Mistake("unit_before_only_flat_buffer",
            lambda units: 4 * (units[0] + max(_arrivals(units, 2, 2), default=units[0])),
            "of the unit before only the flat buffer is there; its parameters were freed after its "
            "forward", ""),
    Mistake("root_before_first_unit",
            lambda units: 4 * (units[0] + max(
                [*_arrivals(units[1:]), *(2 * u for u in units[1:2])], default=units[0])),
            "for the first unit the root is the unit before: its flat buffer is still there", ""),
    Mistake("moment_first_unit_arrives",
            lambda units: 4 * (units[0] + (_arrivals(units) or units[:1])[0]),
            "that is the moment at which the first unit arrives; at another one more is there",
            ""),
    Mistake("moment_last_unit_arrives",
            lambda units: 4 * (units[0] + (_arrivals(units) or units[:1])[-1]),
            "that is the moment at which the last unit arrives; at another one more is there", ""),
    Mistake("largest_unit_twice",
            lambda units: (4 * (units[0] + 3 * max(units[1:] or [0])) if len(units) > 1
                           else 8 * units[0]),
            "the largest unit is there twice, but the unit before it may be smaller", ""),
    Mistake("two_largest_units_may",
            lambda units: 4 * (units[0] + sum(sorted(units)[-2:]) + max(units[1:]))
                if len(units) > 1 else 8 * units[0], "the two largest units may not be neighbours",
            "Only a unit and the one before it in forward meet."),
    Mistake("root_alone_arrives_in_flat",
            lambda units: 4 * units[0] if len(units) == 1 else gathered_bytes(units),
            "the root alone arrives in a flat buffer too, and is copied out of it", ""))


# which modules are units


@shows("Wrappings")
def compare_wrappings(wrappings: dict[str, Callable], preset: Preset) -> Comparison:
    """Trains the model under every wrapping: name -> function that selects its units."""
    size = few_tokens(preset)
    return compare({name: partial(scaffold.shard_units, select)
                    for name, select in wrappings.items()}, size,
                   rounds=rounds_of(size), quiet=True)


@shows("4.2")
def show_wrappings(compared: Comparison, wrappings: dict[str, Callable],
                   cost: Callable) -> Picture:
    """Draws peak, gathered bytes and collectives of each wrapping, with what the student's `cost`
    predicts and the guess for the wrapping "each linear"."""
    model = model_of(compared.preset)
    calls, nbytes = zip(*(cost(scaffold.unit_sizes(select, model))
                          for select in wrappings.values()), strict=True)
    guesses = [guessed("4.2") if name == "each linear" else None for name in wrappings]
    return draw_wrappings(compared, calls, nbytes, guesses)
