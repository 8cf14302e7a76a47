"""Exercise 4.3: the wrapping with the fewest collectives whose gathered bytes fit."""

from collections.abc import Callable

from labs.exercises.verdicts import Wrong, check
from labs.fsdp.checks.cost import collectives, gathered_bytes

WRAPPINGS = {"whole model": [400_000], "pairs of blocks": [100_000, 100_000, 100_000, 100_000],
             "one large unit": [50_000, 290_000, 20_000, 20_000, 20_000],
             "each block": [100_000] + 6 * [50_000],
             "each linear": [105_000] + 6 * [12_500, 12_500, 12_500, 12_500]}
# At each boundary exactly enough bytes, and one too few.
FREE = (1_600_000, 1_599_999, 1_440_000, 1_200_000, 800_000, 799_999, 520_000, 519_999)


@check("4.3", hints={"empty sequence": "Where nothing fits, the answer is None."})
def check_choose(choose: Callable[[dict[str, list[int]], int], str | None]) -> str:
    """choose(wrappings, free) -> the name of the wrapping to take, or None. wrappings: name ->
    units, as in `cost`; free: bytes that a rank has for gathered parameters."""
    for free in FREE:
        # In both orders, because "the first that fits" is right in one of them.
        for wrappings in (WRAPPINGS, dict(reversed(WRAPPINGS.items()))):
            found = choose({name: list(units) for name, units in wrappings.items()}, free)
            _check_choice(found, free)
    return "takes the fewest collectives that fit in the free memory, and says when none does"


def _check_choice(found, free):
    fits = {name: units for name, units in WRAPPINGS.items() if gathered_bytes(units) <= free}
    best = min(fits, key=lambda name: collectives(fits[name]), default=None)
    if found == best:
        return
    if found is not None and found not in WRAPPINGS:
        raise Wrong(f"choose returned {found!r}, not the name of a wrapping", "Return its name.")
    if best is None:
        raise Wrong(f"with {free:,} bytes free nothing fits, and choose returned {found!r}",
                    "Return None where no wrapping fits.")
    if found is None:
        need = gathered_bytes(WRAPPINGS[best])
        raise Wrong(f"with {free:,} bytes free {best!r} fits, since it gathers {need:,} at once, "
                    "and choose returned None",
                    "A wrapping that needs exactly the free bytes fits." * (need == free))
    if found not in fits:
        raise Wrong(f"with {free:,} bytes free {found!r} does not fit: it gathers "
                    f"{gathered_bytes(WRAPPINGS[found]):,} at once")
    raise Wrong(f"with {free:,} bytes free {found!r} fits, but {best!r} fits too and takes "
                f"{collectives(WRAPPINGS[best])} collectives instead of "
                f"{collectives(WRAPPINGS[found])}",
                "Every collective has a fixed price: among those that fit, take the fewest.")
