"""Exercise 4.3: choose a wrapping by the time that a forward loses under it: its terms, the
mistakes that lead to another choice, and the picture of both."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from labs.checks.verdicts import Wrong, check, kind_of, shows
from labs.fsdp.cost import collectives, gathered_bytes
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.training.memory_categories import GB
from labs.words import listed


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


# What a mistake takes for the seconds that a wrapping loses.
Seconds = Callable[[list[int], Machine], float]


def lost(units: list[int], machine: Machine) -> float:
    """Returns the seconds a forward loses: `waiting`, and the price of its all-gathers."""
    return waiting(units, machine.gather, machine.compute) + machine.price * len(units)


def waiting(units: list[int], gather: Callable, compute: Callable) -> float:
    """Returns the seconds in which a forward waits for parameters: for the root and the first unit,
    while nothing computes, and for each other unit as long as the unit before it does not hide."""
    root, *rest = units
    return gather(root) + sum(map(gather, rest[:1])) + sum(
        max(0.0, gather(following) - compute(unit)) for unit, following in _neighbours(units))


def in_terms(units: list[int], machine: Machine) -> str:
    """Returns the terms of `lost` in milliseconds, equal ones together."""
    terms = [f"gather({size:,}) {_milliseconds(machine.gather(size))}" for size in units[:2]]
    terms += [f"max(0, gather({b:,}) {_milliseconds(machine.gather(b))} - compute({a:,}) "
              f"{_milliseconds(machine.compute(a))})" for a, b in _neighbours(units)]
    terms += [f"price {_milliseconds(machine.price)}"] * len(units)
    together = [(len(list(same)), term) for term, same in groupby(terms)]
    return (" + ".join(f"{count} × {term}" if count > 1 else term for count, term in together)
            + f" = {_milliseconds(lost(units, machine))} ms")


def _milliseconds(seconds) -> str:
    return f"{seconds * 1e3:.4g}"


def _neighbours(units) -> list[tuple[int, int]]:
    return list(zip(units[1:], units[2:], strict=False))


def _otherwise(first: Callable | None = None, pair: Callable | None = None,
               price: Callable | None = None) -> Seconds:
    """The time lost with one part of the sum counted otherwise: what is waited for before the first
    unit computes, for a pair of neighbours, and the prices. Each is given what `lost` has."""
    def seconds(units, machine):
        gather, compute = machine.gather, machine.compute
        begin = first(units, machine) if first else sum(map(gather, units[:2]))
        pairs = sum(pair(a, b, machine) if pair else max(0.0, gather(b) - compute(a))
                    for a, b in _neighbours(units))
        return begin + pairs + (price(units, machine) if price
                                else machine.price * len(units))
    return seconds


# What a student may count instead -> the sentence that says so. No two of them choose alike in all
# cases of the check.
MISTAKES: dict[str, Seconds] = {
    "The fewest collectives do not lose least: the root and the first unit have nothing to hide "
    "behind.": lambda units, _: len(units),
    "Wrappings with more than one unit are not better the fewer units they have: the root and the "
    "first unit have nothing to hide behind.": lambda units, _: (len(units) == 1, len(units)),
    "The most collectives do not lose least: each costs its price.": lambda units, _: -len(units),
    "The fewest gathered bytes do not lose least: that decides what fits, not what is fast.":
        lambda units, _: gathered_bytes(units),
    "You count every all-gather in full: after the first unit, each runs while the unit before it "
    "computes.": _otherwise(pair=lambda a, b, m: m.gather(b)),
    "You count nothing but the prices.": lambda units, m: m.price * len(units),
    "You leave the price out: each unit's all-gather costs the price in addition to what is waited "
    "for.": _otherwise(price=lambda units, m: 0),
    "You take the price for every collective of a step: a forward has one all-gather for each "
    "unit.": _otherwise(price=lambda units, m: m.price * collectives(units)),
    "You leave the root's all-gather out: nothing hides it.": _otherwise(
        first=lambda units, m: sum(map(m.gather, units[1:2]))),
    "You leave the first unit's all-gather out: nothing computes while it is in flight.":
        _otherwise(first=lambda units, m: m.gather(units[0])),
    "You leave out what is waited for between neighbours: an all-gather that takes longer than the "
    "unit before it computes.": _otherwise(pair=lambda a, b, m: 0),
    "You hide the first unit's all-gather behind the root's computing: the root hides nothing.":
        _otherwise(first=lambda units, m: m.gather(units[0]) + sum(
            max(0.0, m.gather(b) - m.compute(units[0])) for b in units[1:2])),
    "You hide an all-gather behind its own unit's computing: gather(b) is in flight while the unit "
    "before it computes, so it is hidden by compute(a).":
        _otherwise(pair=lambda a, b, m: max(0.0, m.gather(b) - m.compute(b))),
    "You hide the all-gather of a unit behind the next unit's computing: gather(b) is in flight "
    "while the unit before it computes, so it is hidden by compute(a).":
        _otherwise(pair=lambda a, b, m: max(0.0, m.gather(a) - m.compute(b))),
    "You let computing that hides more than one all-gather make up for others: what is waited for "
    "between two neighbours is never below zero.":
        _otherwise(pair=lambda a, b, m: m.gather(b) - m.compute(a)),
    "You give gather the bytes: it takes the number of parameters.": _otherwise(
        first=lambda units, m: sum(m.gather(4 * size) for size in units[:2]),
        pair=lambda a, b, m: max(0.0, m.gather(4 * b) - m.compute(a)))}
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
        _judge_choice(found, free, machine, choose)
    return ("takes, of those that fit in the free memory, the one that loses least time in "
            f"forward, on {len(MACHINES)} machines, and says when none fits")


def _ask(choose, machine, free, wrappings) -> object:
    return choose({name: list(units) for name, units in wrappings.items()}, free, machine.gather,
                  machine.compute, machine.price)


def _judge_choice(found, free, machine, choose):
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
    """Returns the names that fit and have the minimum of seconds(units, machine); [None] if none
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


# what a forward waits for

TOKENS = 4096  # of each rank
RANKS = 8
LATENCY = 20e-6  # seconds: of a small collective among the GPUs of a node, in order of magnitude
PRICE = 50e-6  # seconds: FSDP's hooks, the launch and the copies of a collective, likewise
UTILISATION = 0.4  # of the peak, as well-tuned training reaches it
_A100 = hardware.gpu("A100-80")
LINKS = {"NVLink": _A100.nvlink, "PCIe 4": _A100.pcie, "100 GbE": 100e9 / 8}


def llama_wrappings() -> dict[str, list[int]]:
    """Returns name -> units of Llama-2-7B: parameters, the root's first."""
    hidden, inner, layers, vocabulary = 4096, 11008, 32, 32000
    linears = 4 * [hidden * hidden] + 3 * [hidden * inner]
    norms, root = 2 * hidden, 2 * vocabulary * hidden + hidden
    block = sum(linears) + norms
    return {"whole model": [root + layers * block],
            "8 blocks": [root] + 4 * [8 * block], "2 blocks": [root] + 16 * [2 * block],
            "each block": [root] + layers * [block],
            "each linear": [root + layers * norms] + layers * linears}


def a100_on(link: str) -> Machine:
    """Returns an A100 on one of LINKS: fp32 parameters of RANKS ranks, TOKENS tokens a rank, whose
    products are in 16 bits."""
    return Machine(link, LATENCY, 4 * (RANKS - 1) / RANKS / LINKS[link],
                   2 * TOKENS / (UTILISATION * _A100.flops), PRICE)


@shows("4.3")
def show_lost(choose: Callable) -> Table:
    """Returns a table of Llama-2-7B on A100s: what each wrapping gathers at once, and the time that
    its forward loses on three links; the wrapping that the student's `choose` takes is marked."""
    wrappings = llama_wrappings()
    machines = [a100_on(link) for link in LINKS]
    free = 30 * GB  # of 80: next to shards and activations
    chosen = [choose(wrappings, free, one.gather, one.compute, one.price) for one in machines]
    rows = [(name, f"{gathered_bytes(units) / GB:.1f}", f"{collectives(units)}",
             *(f"{lost(units, one) * 1e3:,.0f}{' ←' * (name == taken)}"
               for one, taken in zip(machines, chosen, strict=True)))
            for name, units in wrappings.items()]
    computes = machines[0].compute(sum(wrappings["whole model"]))
    return Table(f"Llama-2-7B on {RANKS} × A100-80, {TOKENS:,} tokens a rank, gathered in fp32, "
                 "multiplied in 16 bits: computed, not measured",
                 ("", "GB at once", "collectives", *(f"ms lost, {link}" for link in LINKS)), rows,
                 note=f"← what choose takes with {free / GB:g} GB free. A forward computes "
                      f"{computes * 1e3:,.0f} ms. Assumed: {LATENCY * 1e6:g} µs of latency, and "
                      f"{PRICE * 1e6:g} µs for each collective.")
