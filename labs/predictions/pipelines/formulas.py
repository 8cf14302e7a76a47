"""Closed forms of the known schedules: time lost in the bubble, and activations at the peak.

They leave out transfers, and take equal stages. p: ranks, m: micro-batches, v: chunks a rank; F, B
and W: one micro-batch's times through all of a rank's layers.

Two ways of quoting a bubble: as a share of the ideal time m(F + B + W), for 1F1B (p - 1)/m
(Narayanan et al. 2021, section 2.2.1), or of the whole step, (p - 1)/(m + p - 1) (GPipe, Huang et
al. 2019, section 2.3 gives it as O((K - 1)/(M + K - 1))).

Zero bubble: arXiv 2401.10241, table 1, for m >= p (ZB-H1) and m >= 2p - 1 (ZB-H2), where
(p - 1)(F + B - W) and (p - 1)(F + B - 2W) are lost. With fewer micro-batches fewer W can fill the
gap: m - 1 of them. That of ZB-H2 is by the clock of one rank (simulate.RANK). Both need W <= F, B.
"""

from collections.abc import Callable
from dataclasses import dataclass

from labs.predictions.pipelines.schedule import Schedule
from labs.predictions.pipelines.schedules import gpipe, interleaved, one_f_one_b, zb_h1, zb_h2
from labs.predictions.pipelines.simulate import Times


@dataclass(frozen=True)
class Kind:
    """A known schedule: how it is made, and its closed forms.

    build: (p, m, v) -> the schedule. lost: (p, m, v, F, B, W) -> the time in which a rank is
    idle. peak: (p, m, v, rank) -> activations in flight on this rank, each of one chunk.
    """

    name: str
    build: Callable[[int, int, int], Schedule]
    lost: Callable[[int, int, int, float, float, float], float]
    peak: Callable[[int, int, int, int], int]

    def bubble(self, p: int, m: int, v: int = 1, times: Times | None = None) -> float:
        """The share of the whole step in which a rank is idle, from 0 to 1."""
        lost, ideal = self._lost_and_ideal(p, m, v, times or Times())
        return lost / (ideal + lost)

    def bubble_of_ideal(self, p: int, m: int, v: int = 1, times: Times | None = None) -> float:
        """The idle time as a share of the time that the step would take without it."""
        lost, ideal = self._lost_and_ideal(p, m, v, times or Times())
        return lost / ideal

    def length(self, p: int, m: int, v: int = 1, times: Times | None = None) -> float:
        """The time of the step."""
        return sum(self._lost_and_ideal(p, m, v, times or Times()))

    def _lost_and_ideal(self, p, m, v, times) -> tuple[float, float]:
        return (max(0.0, self.lost(p, m, v, times.F, times.B, times.W)),
                m * (times.F + times.B + times.W))


GPIPE = Kind("GPipe", lambda p, m, v: gpipe(p, m),
             lambda p, m, v, F, B, W: (p - 1) * (F + B + W),
             lambda p, m, v, rank: m)
ONE_F_ONE_B = Kind("1F1B", lambda p, m, v: one_f_one_b(p, m),
                   lambda p, m, v, F, B, W: (p - 1) * (F + B + W),
                   lambda p, m, v, rank: min(m, p - rank))
INTERLEAVED = Kind("1F1B-I", interleaved,
                   lambda p, m, v, F, B, W: (p - 1) * (F + B + W) / v,
                   lambda p, m, v, rank: min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1))
ZB_H1 = Kind("ZB-H1", lambda p, m, v: zb_h1(p, m),
             lambda p, m, v, F, B, W: (p - 1) * (F + B) - min(p - 1, m - 1) * W,
             lambda p, m, v, rank: min(m, p))
ZB_H2 = Kind("ZB-H2", lambda p, m, v: zb_h2(p, m),
             lambda p, m, v, F, B, W: (p - 1) * (F + B) - min(2 * p - 2, m - 1) * W,
             lambda p, m, v, rank: min(m, 2 * p - 1))

KINDS = {kind.name: kind for kind in (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZB_H2)}
