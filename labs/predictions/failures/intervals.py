"""How often to save: the formulas of Young and Daly, and the wall time that is expected.

M: the mean time between failures; δ: seconds of a save; R: of a restart; τ: computing between two
saves. All in one unit. Sources: J. W. Young, "A first order approximation to the optimum checkpoint
interval", 1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps", 2006.
"""

import math


def young(mtbf: float, save: float) -> float:
    """√(2δM): first order in δ/M (Young, 1974)."""
    return math.sqrt(2 * save * mtbf)


def daly_first(mtbf: float, save: float) -> float:
    """√(2δM) − δ: the time of a save is taken off (Daly, 2006, equation 13)."""
    return young(mtbf, save) - save


def daly(mtbf: float, save: float) -> float:
    """√(2δM)·(1 + ⅓·√(δ/2M) + ⅑·δ/2M) − δ, and M where δ ≥ 2M (Daly, 2006, equation 37)."""
    if save >= 2 * mtbf:
        return mtbf
    part = save / (2 * mtbf)
    return young(mtbf, save) * (1 + math.sqrt(part) / 3 + part / 9) - save


def expected_wall(work: float, interval: float, save: float, restart: float, mtbf: float) -> float:
    """M·e^(R/M)·(e^((τ+δ)/M) − 1)·work/τ: the mean wall time where failures are a Poisson process
    and `work` is a whole number of intervals (Daly, 2006, equation 20)."""
    pieces = work / interval
    return mtbf * math.exp(restart / mtbf) * math.expm1((interval + save) / mtbf) * pieces


def expected_goodput(interval: float, save: float, restart: float, mtbf: float) -> float:
    """Work over `expected_wall`."""
    return 1 / expected_wall(1, interval, save, restart, mtbf)


def asynchronous_goodput(interval: float, write: float, restart: float, mtbf: float) -> float:
    """(τ/M)·e^(−(δ+R)/M) / (e^(τ/M) − 1): the share of its time that a job keeps which computes
    while it writes for δ, at τ ≥ δ, where failures are a Poisson process.

    Between two restarts, k snapshots are safe if nothing fails for k·τ + δ, so τ·Σ P(T > kτ + δ) of
    the work is kept; that takes M, and M·(e^(R/M) − 1) until a restart has succeeded. The snapshot
    itself is taken to cost nothing.
    """
    kept = interval * math.exp(-write / mtbf) / math.expm1(interval / mtbf)
    return kept / (mtbf * math.exp(restart / mtbf))


def job_mtbf(parts: int, part_mtbf: float) -> float:
    """The mean time between failures of a job that ends when one of its parts fails: the rates of
    independent parts add up."""
    return part_mtbf / parts
