"""The time that a forward loses under a wrapping (exercise 4.3): its terms, and the mistakes that
lead to another choice."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from labs.fsdp.checks.cost import collectives, gathered_bytes


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
    terms = [f"gather({size:,}) {_ms(machine.gather(size))}" for size in units[:2]]
    terms += [f"max(0, gather({b:,}) {_ms(machine.gather(b))} - compute({a:,}) "
              f"{_ms(machine.compute(a))})" for a, b in _neighbours(units)]
    terms += [f"price {_ms(machine.price)}"] * len(units)
    together = [(len(list(same)), term) for term, same in groupby(terms)]
    return (" + ".join(f"{count} × {term}" if count > 1 else term for count, term in together)
            + f" = {_ms(lost(units, machine))} ms")


def _ms(seconds) -> str:
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
    "The least gathered bytes do not lose least: that decides what fits, not what is fast.":
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
