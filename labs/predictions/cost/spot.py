"""Interruptible machines: billed hours of a job that the seller may stop, by an event simulation.

Interruptions are independent of each other (a Poisson process). Each loses what was trained since
the last checkpoint, and the restart is billed before training continues; saving takes no time.
"""

import math

from labs.predictions.failures.intervals import expected_wall
from labs.predictions.failures.simulation import exponential_gaps, simulate


def billed_hours(hours: float, rate: float, interval: float, restart: float,
                 seed: int | None = None) -> float:
    """Billed hours until `hours` of training are done, in one simulated run. rate: interruptions
    per billed hour; interval: hours between checkpoints; restart: hours of a restart."""
    gaps = exponential_gaps(1 / rate, seed) if rate else ()
    return simulate(hours, interval, 0, restart, gaps).wall


def expected_hours(hours: float, rate: float, interval: float, restart: float) -> float:
    """What `billed_hours` is on average where `hours` are whole intervals."""
    return expected_wall(hours, interval, 0, restart, 1 / rate) if rate else hours


def first_order_rates(ratio: float, interval: float, restart: float) -> dict[str, float]:
    """Formula of the billed hours for an hour of training -> interruptions per hour at which they
    are `ratio`: two approximations of `break_even_rate` that are right where little is lost.

    An interruption loses interval/2 + restart. "1 + rate·lost" counts no interruption of what is
    trained again or restarted; "1/(1 − rate·lost)" counts them at full price, although an
    interruption that follows another one soon has less to undo.
    """
    lost = interval / 2 + restart
    return {"1 + rate·lost": (ratio - 1) / lost, "1/(1 − rate·lost)": (1 - 1 / ratio) / lost}


def break_even_rate(ratio: float, interval: float, restart: float) -> float:
    """Interruptions per billed hour at which `expected_hours` is `ratio` times the hours: where the
    on-demand price is `ratio` times the spot price. 0 if ratio is 1 or less."""
    low, high = 0.0, math.log(max(1.0, ratio)) / (interval / 2 + restart) * 2
    for _ in range(60):
        middle = (low + high) / 2
        short = expected_hours(1, middle, interval, restart) < ratio
        low, high = (middle, high) if short else (low, middle)
    return low
