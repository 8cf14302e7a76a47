"""Exercise 4.3: the wrapping that fits and loses least time in forward: what it waits for its
parameters, and a fixed price for each collective."""

from collections.abc import Callable

from labs.exercises.verdicts import Wrong, check, kind_of
from labs.fsdp.checks.cost import gathered_bytes
from labs.fsdp.checks.lost_time import MISTAKES, Machine, in_terms, lost
from labs.words import listed

WRAPPINGS = {"whole model": [400_000], "pairs of blocks": [100_000, 100_000, 100_000, 100_000],
             "one large unit": [50_000, 290_000, 20_000, 20_000, 20_000],
             "each block": [100_000] + 6 * [50_000],
             "growing": [100_000, 20_000, 50_000, 80_000, 150_000],
             "shrinking": [100_000, 150_000, 80_000, 50_000, 20_000],
             "uneven": [90_000, 5_000, 90_000, 5_000, 90_000, 90_000, 30_000],
             "tiny units": [250_000] + 30 * [5_000],
             "each linear": [105_000] + 6 * [12_500, 12_500, 12_500, 12_500]}
# At each boundary exactly enough bytes, and one too few.
FREE = (3_200_000, 3_199_999, 2_720_000, 1_920_000, 1_600_000, 1_200_000, 1_199_999, 940_000,
        939_999)
_SLACK = 1e-9  # relative: of two sums of the same seconds in another order


# In each of them other wrappings are best: by what overlaps, by what a collective costs, by both.
MACHINES = (Machine("a fast link", 2e-5, 1e-9, 1e-8, 0.0),
            Machine("a slow link", 2e-5, 3e-8, 1e-8, 1e-6),
            Machine("a link of long latency", 2e-3, 1e-9, 1e-8, 1e-5),
            Machine("equal speeds", 1e-4, 1e-8, 1e-8, 5e-5),
            Machine("a link without latency", 0.0, 2e-9, 1e-8, 2e-5),
            Machine("a high price", 0.0, 2e-9, 1e-8, 1e-3),
            # Powers of two: sums are exact, so those who add up all-gathers find them equal.
            Machine("a link without latency and price", 0.0, 2.0**-29, 2.0**-26, 0.0))
# In both orders, because "the first that fits" is right in one of them.
CASES = [(machine, free, wrappings) for machine in MACHINES for free in FREE
         for wrappings in (WRAPPINGS, dict(reversed(WRAPPINGS.items())))]


@check("4.3", hints={"empty sequence": "Where nothing fits, the answer is None."})
def check_choose(choose: Callable) -> str:
    """choose(wrappings, free, gather, compute, price) -> the name of the wrapping to take, or None.
    wrappings: name -> units, as in `cost`; free: bytes that a rank has for gathered parameters;
    gather(n), compute(n): seconds of an all-gather of n parameters, and of their forward; price:
    seconds for each collective."""
    for machine, free, wrappings in CASES:
        found = _ask(choose, machine, free, wrappings)
        _check_choice(found, free, machine, choose)
    return ("takes, of those that fit in the free memory, the one that loses least time in "
            f"forward, on {len(MACHINES)} machines, and says when none fits")


def _ask(choose, machine, free, wrappings) -> object:
    return choose({name: list(units) for name, units in wrappings.items()}, free, machine.gather,
                  machine.compute, machine.price)


def _check_choice(found, free, machine, choose):
    fits = {name: units for name, units in WRAPPINGS.items() if gathered_bytes(units) <= free}
    seconds = {name: lost(units, machine) for name, units in fits.items()}
    least = min(seconds.values(), default=None)
    best = [name for name, value in seconds.items() if value <= least * (1 + _SLACK)]
    if found in best or (found is None and not fits):
        return
    where = f"with {free:,} bytes free"
    if found is not None and not (isinstance(found, str) and found in WRAPPINGS):
        raise Wrong(f"choose returned {_shown(found)}, not the name of a wrapping",
                    "Return its name.", code="wrong_type")
    if not fits:
        raise Wrong(f"{where} nothing fits, and choose returned {found!r}",
                    "Return None where no wrapping fits.", code="nothing_fits")
    if found is None:
        need = gathered_bytes(WRAPPINGS[best[0]])
        raise Wrong(f"{where} {best[0]!r} fits, since it gathers {need:,} at once, and choose "
                    "returned None", "A wrapping that needs exactly the free bytes fits."
                    * (need == free), code="exact_fit_refused")
    if found not in fits:
        raise Wrong(f"{where} {found!r} does not fit: it gathers "
                    f"{gathered_bytes(WRAPPINGS[found]):,} at once", code="does_not_fit")
    raise Wrong(f"{where} and {machine.name}, a forward with {found!r} loses "
                f"{_ms(seconds[found])}; {listed([repr(name) for name in best])} fits too and "
                f"loses {_ms(least)}" + "".join(
                    f"\n{name!r}: {in_terms(WRAPPINGS[name], machine)}"
                    for name in (found, best[0])),
                _mistake(choose) or "Compare the terms of this sum with yours.",
                code="slower_choice")


def _mistake(choose) -> str:
    """The mistake that explains all choices; or empty. One choice alone fits several mistakes."""
    try:
        answers = [_ask(choose, *case) for case in CASES]
    except Exception:
        return ""
    return next((words for words, seconds in MISTAKES.items()
                 if all(found in chosen(seconds, *case)
                        for found, case in zip(answers, CASES, strict=True))), "")


def chosen(seconds: Callable, machine: Machine, free: int, wrappings: dict) -> list[str | None]:
    """Returns the names that fit and have the least seconds(units, machine); [None] if none
    fits."""
    found = {name: seconds(units, machine) for name, units in wrappings.items()
             if gathered_bytes(units) <= free}
    least = min(found.values(), default=None)
    return [name for name, value in found.items() if _as_small(value, least)] or [None]


def _as_small(value, least) -> bool:
    if isinstance(value, tuple) or value == least:
        return value == least
    return value <= least + _SLACK * abs(least)


def _shown(found) -> str:
    return repr(found) if isinstance(found, str) else kind_of(found)


def _ms(seconds) -> str:
    return f"{seconds * 1e3:.4g} ms"
