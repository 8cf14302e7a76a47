"""Exercise 4.2: what a wrapping costs in collectives and in gathered bytes."""

from collections.abc import Callable

from labs.exercises.verdicts import Wrong, check, kind_of

UNITS = ([1000, 700, 700, 700], [500], [10, 300, 50, 200, 250], [100, 900])
_FEW_UNITS = ("cost([500]), the root alone, is asked too; and cost([100, 900]), where no unit has "
              "a neighbour.")


@check("4.2", hints={"empty sequence": _FEW_UNITS, "out of range": _FEW_UNITS})
def check_cost(cost: Callable[[list[int]], tuple[int, int]]) -> str:
    """cost(units) -> (collectives of a step, bytes gathered at once). units: parameters of each
    unit, the root's first, then in the order of forward; fp32."""
    for units in UNITS:
        found = cost(list(units))
        if not isinstance(found, tuple) or len(found) != 2:
            raise Wrong(f"cost({units}) returned {kind_of(found)}, not two numbers",
                        "return collectives, gathered_bytes")
        _check_collectives(units, found[0])
        _check_gathered(units, found[1])
    return "counts the collectives of a step and the bytes gathered at once, for any units"


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


def _check_collectives(units, found):
    want, n = collectives(units), len(units)
    if found == want:
        return
    # Resharding after forward costs a second all-gather; the root alone is spared it.
    if found == 2 * n:
        raise Wrong(f"cost({units}): {found} collectives; you count one all-gather for each unit, "
                    f"but all units except the root are gathered again for backward: {want}")
    if found == 3 * n:
        raise Wrong(f"cost({units}): {found} collectives; the root stays gathered after its "
                    f"forward, since its backward follows at once: {want}")
    raise Wrong(f"cost({units}): {found} collectives; {n} units make {want}",
                "One all-gather for the root, two for each other unit, one reduce-scatter for all.")


def _check_gathered(units, found):
    want, (root, *rest) = gathered_bytes(units), units
    if found == want:
        return
    # Each number below is what one particular misunderstanding of the lifetimes gives.
    reasons = {
        want // 4: ("that counts parameters; in fp32 each is 4 bytes", ""),
        4 * sum(units): ("all units together are never gathered at once",
                         "A unit is freed after its forward."),
        4 * max(units): ("that is one unit; the root stays gathered the whole time",
                         "The root's parameters stay from the first forward to the last backward."),
        4 * (root + max(rest or [0])): (
            "while a unit computes, the next one is already being gathered",
            "Count two units that follow one another."),
        want - 4 * root: ("the root stays gathered the whole time", "Add the root's bytes."),
        4 * (root + sum(sorted(rest)[-2:])): (
            "the two largest units may not be neighbours",
            "Only the unit that computes and the next one are gathered.")}
    only_one = "With one unit besides the root there is no neighbour: both are gathered."
    why, hint = reasons.get(found, ("the root and two neighbours are gathered at once",
                                    only_one if len(rest) == 1 else ""))
    raise Wrong(f"cost({units}): {found:,} bytes gathered at once, not {want:,}: {why}", hint)
