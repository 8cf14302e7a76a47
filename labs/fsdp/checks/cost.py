"""Exercise 4.2: what a wrapping costs in collectives and in gathered bytes."""

from collections.abc import Callable

from labs.exercises.numbers import Cause, judge_number, require_numbers
from labs.exercises.verdicts import check

# The largest pair stands at the beginning, in the middle and at the end; the root is larger than a
# unit and smaller; there are no units beside it, one, and two.
UNITS = ([5, 40, 10, 90, 80, 70, 60], [500], [10, 300, 50, 200, 250], [100, 900], [60, 400, 700],
         [10, 300, 250, 20, 200, 30], [1000, 700, 700, 700], [800, 20, 30])
_FEW_UNITS = ("cost([500]), the root alone, is asked too; and cost([100, 900]), where no unit has "
              "a neighbour.")


@check("4.2", hints={"empty sequence": _FEW_UNITS, "out of range": _FEW_UNITS})
def check_cost(cost: Callable[[list[int]], tuple[int, int]]) -> str:
    """cost(units) -> (collectives of a step, bytes gathered at once). units: parameters of each
    unit, the root's first, then in the order of forward; fp32."""
    for units in UNITS:
        what = f"cost({units})"
        calls, nbytes = require_numbers(cost(list(units)), ("collectives", "gathered_bytes"), what)
        judge_number(calls, collectives(units), _collectives_causes(units), what, "collectives",
                     "One all-gather for the root, two for each other unit, one reduce-scatter for "
                     "all.")
        judge_number(nbytes, gathered_bytes(units), _gathered_causes(units), what,
                     "bytes gathered at once", _gathered_hint(units))
    return "counts the collectives of a step and the bytes gathered at once, for any units"


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


def _collectives_causes(units) -> list[Cause]:
    # Resharding after forward costs a second all-gather; the root alone is spared it.
    return [(2 * len(units), "you count one all-gather for each unit, but all units except the "
             "root are gathered again for backward", ""),
            (3 * len(units), "the root stays gathered after its forward, since its backward "
             "follows at once", "")]


def _gathered_causes(units) -> list[Cause]:
    # Each number is what one particular misunderstanding of the lifetimes gives.
    want, (root, *rest) = gathered_bytes(units), units
    causes = [
        (want // 4, "that counts parameters; in fp32 each is 4 bytes", ""),
        (4 * sum(units), "all units together are never gathered at once",
         "A unit is freed after its forward."),
        (4 * max(units), "that is one unit; the root stays gathered the whole time",
         "The root's parameters stay from the first forward to the last backward."),
        (4 * root, "that is the root alone; the unit that computes is gathered too", ""),
        (4 * (root + max(rest or [0])), "while a unit computes, the next one is already being "
         "gathered", "Count two units that follow one another."),
        (want - 4 * root, "the root stays gathered the whole time", "Add the root's bytes."),
        (4 * max(a + b for a, b in zip(units, rest or [0], strict=False)),
         "the root is no neighbour like the others; it stays gathered the whole time",
         "Add the root's bytes to those of the largest pair of the other units.")]
    if len(rest) > 2:
        causes += [(4 * (root + sum(rest[-2:])), "that is the root with the last two units, and "
                    "another pair is larger", ""),
                   (4 * (root + sum(rest[:2])), "that is the root with the first two units, and "
                    "another pair is larger", ""),
                   (4 * (root + sum(sorted(rest)[-2:])), "the two largest units may not be "
                    "neighbours", "Only the unit that computes and the next one are gathered.")]
    return causes
