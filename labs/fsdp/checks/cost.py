"""Exercise 4.2: what a wrapping costs in collectives and in gathered bytes."""

from collections.abc import Callable

from labs.exercises.numbers import judge_number, likeliest_cause, require_numbers
from labs.exercises.verdicts import check

# The largest pair stands at the beginning, in the middle and at the end; the root is larger than a
# unit and smaller; there are no units beside it, one, and two.
UNITS = ([5, 40, 10, 90, 80, 70, 60], [500], [10, 300, 50, 200, 250], [100, 900], [60, 400, 700],
         [10, 300, 250, 20, 200, 30], [1000, 700, 700, 700], [800, 20, 30])
NAMES = ("collectives", "gathered_bytes")
_FEW_UNITS = ("cost([500]), the root alone, is asked too; and cost([100, 900]), where no unit has "
              "a neighbour.")


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
            causes = [] if found[index] == want(units) else likeliest_cause(
                mistakes, UNITS, [_answer(cost, one, index) for one in UNITS], place)
            judge_number(found[index], want(units), causes, what, unit, hint)
    return "counts the collectives of a step and the bytes gathered at once, for any units"


def _answer(cost, units, index) -> float | None:
    """One of the two numbers, or None where `cost` fails: it is asked only to find out a cause."""
    try:
        return require_numbers(cost(list(units)), NAMES, "")[index]
    except Exception:
        return None


def _gathered_hint(units) -> str:
    if len(units) == 1:
        return "The root alone: it is all that is gathered."
    if len(units) == 2:
        return "The one unit besides the root has no neighbour: both are gathered, nothing else."
    return "Add the root's bytes to those of the largest pair of neighbours, wherever it stands."


def collectives(units: list[int]) -> int:
    """Returns the collectives of one step: the root is gathered once, every other unit twice, and
    each unit is reduce-scattered once."""
    return 1 + 2 * (len(units) - 1) + len(units)


def gathered_bytes(units: list[int]) -> int:
    """Returns the most bytes gathered at once, fp32: the root's, and those of the two neighbours
    that are largest together (one computes while the next is prefetched)."""
    rest = units[1:]
    pairs = [a + b for a, b in zip(rest, rest[1:], strict=False)]
    return 4 * (units[0] + max(pairs or rest or [0]))


def _sum_of_pair(units) -> int:
    return max([a + b for a, b in zip(units, units[1:], strict=False)] or units or [0])


# Each number is what one particular misunderstanding gives. UNITS tell every two of them apart.
_COLLECTIVES = (
    # Resharding after forward costs a second all-gather; the root alone is spared it.
    (lambda units: 2 * len(units), "you count one all-gather for each unit, but all units except "
     "the root are gathered again for backward", ""),
    (lambda units: 3 * len(units), "the root stays gathered after its forward, since its backward "
     "follows at once", ""),
    (lambda units: 2 * len(units) - 1, "these are the all-gathers; each unit's gradients are "
     "reduce-scattered too", ""),
    (len, "each unit has more than one collective in a step", ""))
_GATHERED = (
    (lambda units: gathered_bytes(units) // 4, "that counts parameters; in fp32 each is 4 bytes",
     ""),
    (lambda units: 4 * sum(units), "all units together are never gathered at once",
     "A unit is freed after its forward."),
    (lambda units: 4 * max(units), "that is one unit; the root stays gathered the whole time",
     "The root's parameters stay from the first forward to the last backward."),
    (lambda units: 4 * units[0], "that is the root alone; the unit that computes is gathered too",
     ""),
    (lambda units: 4 * (units[0] + max(units[1:] or [0])), "while a unit computes, the next one is "
     "already being gathered", "Count two units that follow one another."),
    (lambda units: 4 * _sum_of_pair(units[1:]), "that is the largest pair; the root stays gathered "
     "the whole time", "Add the root's bytes."),
    (lambda units: 4 * _sum_of_pair(units), "the root is no neighbour like the others; it stays "
     "gathered the whole time", "Add the root's bytes to those of the largest pair of the other "
     "units."),
    (lambda units: 4 * (units[0] + sum(units[1:][-2:])), "that is the root with the last two "
     "units, and another pair is larger", ""),
    (lambda units: 4 * (units[0] + sum(units[1:3])), "that is the root with the first two units, "
     "and another pair is larger", ""),
    (lambda units: 4 * (units[0] + sum(sorted(units[1:])[-2:])), "the two largest units may not be "
     "neighbours", "Only the unit that computes and the next one are gathered."),
    (lambda units: 4 * units[0] if len(units) == 2 else gathered_bytes(units),
     "that is the root alone; one unit besides it has no neighbour, but is gathered too", ""))
