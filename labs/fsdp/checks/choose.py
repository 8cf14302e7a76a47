"""Exercise 4.3: the wrapping that fits and loses least time in forward: what it waits for its
parameters, and a fixed price for each collective."""

from collections.abc import Callable
from dataclasses import dataclass

from labs.exercises.verdicts import Wrong, check, kind_of
from labs.fsdp.checks.cost import collectives, gathered_bytes
from labs.words import listed

WRAPPINGS = {"whole model": [400_000], "pairs of blocks": [100_000, 100_000, 100_000, 100_000],
             "one large unit": [50_000, 290_000, 20_000, 20_000, 20_000],
             "each block": [100_000] + 6 * [50_000],
             "each linear": [105_000] + 6 * [12_500, 12_500, 12_500, 12_500],
             "uneven": [90_000, 5_000, 90_000, 5_000, 90_000, 90_000, 30_000]}
# At each boundary exactly enough bytes, and one too few.
FREE = (1_600_000, 1_599_999, 1_440_000, 1_200_000, 800_000, 799_999, 520_000, 519_999)
_SLACK = 1e-9  # relative: of two sums of the same seconds in another order


@dataclass(frozen=True)
class Machine:
    """A link and a processor: seconds before the first byte of an all-gather, seconds for each
    parameter that it brings, and seconds of forward for each parameter. price: seconds that each
    collective costs the rank itself, to launch it and to copy its numbers."""

    name: str
    latency: float
    link: float
    computing: float
    price: float

    def gather(self, parameters: float) -> float:
        """Returns the seconds that an all-gather of so many parameters is in flight."""
        return self.latency + self.link * parameters

    def compute(self, parameters: float) -> float:
        """Returns the seconds of forward of a unit with so many parameters."""
        return self.computing * parameters


# In each of them other wrappings are best: by what overlaps, by what a collective costs, by both.
MACHINES = (Machine("a fast link", 2e-5, 1e-9, 1e-8, 0.0),
            Machine("a slow link", 2e-5, 3e-8, 1e-8, 1e-6),
            Machine("a link of long latency", 2e-3, 1e-9, 1e-8, 1e-5),
            Machine("equal speeds", 1e-4, 1e-8, 1e-8, 5e-5),
            Machine("a link without latency", 0.0, 2e-9, 1e-8, 2e-5),
            Machine("a high price", 0.0, 2e-9, 1e-8, 1e-3))


@check("4.3", hints={"empty sequence": "Where nothing fits, the answer is None."})
def check_choose(choose: Callable) -> str:
    """choose(wrappings, free, gather, compute, price) -> the name of the wrapping to take, or None.
    wrappings: name -> units, as in `cost`; free: bytes that a rank has for gathered parameters;
    gather(n), compute(n): seconds of an all-gather of n parameters, and of their forward; price:
    seconds for each collective."""
    for machine in MACHINES:
        for free in FREE:
            # In both orders, because "the first that fits" is right in one of them.
            for wrappings in (WRAPPINGS, dict(reversed(WRAPPINGS.items()))):
                found = choose({name: list(units) for name, units in wrappings.items()}, free,
                               machine.gather, machine.compute, machine.price)
                _check_choice(found, free, machine)
    return ("takes, of those that fit in the free memory, the one that loses least time in "
            f"forward, on {len(MACHINES)} machines, and says when none fits")


def lost(units: list[int], machine: Machine) -> float:
    """Returns the seconds that a forward loses: `waiting`, and the price of its all-gathers."""
    return waiting(units, machine.gather, machine.compute) + machine.price * len(units)


def waiting(units: list[int], gather: Callable, compute: Callable) -> float:
    """Returns the seconds in which a forward waits for parameters: for the root and the first unit,
    while nothing computes, and for each other unit as long as the unit before it does not hide."""
    root, *rest = units
    exposed = [max(0.0, gather(following) - compute(unit))
               for unit, following in zip(rest, rest[1:], strict=False)]
    return gather(root) + sum(gather(first) for first in rest[:1]) + sum(exposed)


def _check_choice(found, free, machine):
    fits = {name: units for name, units in WRAPPINGS.items() if gathered_bytes(units) <= free}
    seconds = {name: lost(units, machine) for name, units in fits.items()}
    least = min(seconds.values(), default=None)
    best = [name for name, value in seconds.items() if value <= least * (1 + _SLACK)]
    if found in best or (found is None and not fits):
        return
    where = f"with {free:,} bytes free"
    if found is not None and not (isinstance(found, str) and found in WRAPPINGS):
        raise Wrong(f"choose returned {_shown(found)}, not the name of a wrapping",
                    "Return its name.")
    if not fits:
        raise Wrong(f"{where} nothing fits, and choose returned {found!r}",
                    "Return None where no wrapping fits.")
    if found is None:
        need = gathered_bytes(WRAPPINGS[best[0]])
        raise Wrong(f"{where} {best[0]!r} fits, since it gathers {need:,} at once, and choose "
                    "returned None", "A wrapping that needs exactly the free bytes fits."
                    * (need == free))
    if found not in fits:
        raise Wrong(f"{where} {found!r} does not fit: it gathers "
                    f"{gathered_bytes(WRAPPINGS[found]):,} at once")
    raise Wrong(f"{where} and {machine.name}, a forward with {found!r} loses "
                f"{_ms(seconds[found])}; {listed([repr(name) for name in best])} fits too and "
                    f"loses {_ms(least)}",
                _why(found, best[0], machine))


def _why(found, best, machine) -> str:
    if len(WRAPPINGS[found]) == 1:
        return "One unit for all has nothing to hide its all-gather behind."
    if collectives(WRAPPINGS[found]) < collectives(WRAPPINGS[best]):
        return ("The fewest collectives do not lose least: the root and the first unit have "
                "nothing to hide behind.")
    if machine.latency >= 1e-3:
        return "An all-gather is in flight for its latency at least, even if it brings little."
    if machine.price * len(WRAPPINGS[found]) > 0.5 * lost(WRAPPINGS[found], machine):
        return "Each unit's all-gather costs the price in addition to what is waited for."
    return "Wait for the root, for the first unit, and for what gather(next) exceeds compute(unit)."


def _shown(found) -> str:
    return repr(found) if isinstance(found, str) else kind_of(found)


def _ms(seconds) -> str:
    return f"{seconds * 1e3:.4g} ms"
