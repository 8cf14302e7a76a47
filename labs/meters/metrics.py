"""One measured number with its unit, for a report that lays runs beside each other."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """name: what was measured, of what. unit: "bytes", "s", "FLOP", "Ψ" (multiples of the number of
    parameters), "layers", "" for a ratio; a picture's is that of its axis, such as "MB". predicted:
    by formula, in the same unit. least, most: over the rounds that `value` is the median of."""

    name: str
    value: float
    unit: str
    predicted: float | None = None
    least: float | None = None
    most: float | None = None

    @classmethod
    def of_rounds(cls, name: str, rounds: Sequence[float], unit: str = "s",
                  predicted: float | None = None) -> "Metric":
        """The median of some rounds, with their spread."""
        return cls(name, statistics.median(rounds), unit, predicted, min(rounds), max(rounds))


def name_of(drawn: str, title: str) -> str:
    """The name of a metric that a picture shows: what the bar or line is called there, and what the
    picture counts, each in one line."""
    return ": ".join(filter(None, (" ".join(drawn.splitlines()), title.partition("\n")[0])))
