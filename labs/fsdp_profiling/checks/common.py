"""What the checks of notebook 05 share: the recording that they read, and how a wrong number is
explained."""

import functools
import math

from labs.exercises.verdicts import Wrong
from labs.fsdp_profiling import recording
from labs.fsdp_profiling.recording import RecordedRun, RunConfig
from labs.meters.trace import Trace


@functools.cache
def recorded(**changes) -> RecordedRun:
    """Returns one recording for all checks that only read it. changes: fields of `RunConfig`."""
    return recording.record_runs([RunConfig(recording.preset(), "for checks", **changes)])[0]


def by_rank(traces: RecordedRun, what: str = "recorded") -> dict[str, Trace]:
    """Returns the traces with a name for each, as messages call them."""
    return {f"{what}, rank {trace.rank}": trace for trace in traces}


def same(got, want: float, abs_tol: float = 1e-12) -> bool:
    """Whether `got` is a number and equal up to rounding."""
    return (isinstance(got, int | float) and not isinstance(got, bool)
            and math.isclose(got, want, rel_tol=1e-9, abs_tol=abs_tol))


def raise_wrong(got, want: float, mistakes: list[tuple], what: str, unit: str = ""):
    """Raises Wrong about a number. mistakes: (the number that a mistake leads to, what it is, a
    hint)."""
    for value, sentence, hint in mistakes:
        if value and same(got, value):
            raise Wrong(f"{what} {sentence}", hint)
    raise Wrong(f"{what} is {shortened(got)}{unit}, not {want:.4g}{unit}")


def shortened(value, most: int = 60) -> str:
    """Returns a value as a message shows it: on one line of at most `most` characters."""
    words = " ".join(repr(value).split())
    return words if len(words) <= most else words[:most - 1] + "…"
