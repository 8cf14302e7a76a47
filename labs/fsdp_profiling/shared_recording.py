"""What the checks of notebook 05 share: the recording that they read, and how messages name it."""

import functools

from labs.fsdp_profiling import recorded_runs
from labs.fsdp_profiling.recorded_runs import RecordedRun, RunConfig
from labs.meters.trace import Trace
from labs.workers import devices


def recorded(**changes) -> RecordedRun:
    """Returns one recording for all checks that only read it. changes: fields of `RunConfig`."""
    return _recorded(devices.gpus(), **changes)


@functools.cache
def _recorded(gpus, **changes) -> RecordedRun:
    """gpus: that are used; another choice of the device is another recording."""
    config = RunConfig(recorded_runs.preset(), "for checks", **changes)
    return recorded_runs.record_runs([config])[0]


def by_rank(traces: RecordedRun, what: str = "recorded") -> dict[str, Trace]:
    """Returns the traces with a name for each, as messages call them."""
    return {f"{what}, rank {trace.rank}": trace for trace in traces}


def shortened(value, most: int = 60) -> str:
    """Returns a value as a message shows it: on one line of at most `most` characters."""
    words = " ".join(repr(value).split())
    return words if len(words) <= most else words[:most - 1] + "…"


def as_pair(value) -> tuple | None:
    """Returns the two entries of a tuple, a list or an array; None for anything else."""
    if isinstance(value, str | bytes | dict) or not hasattr(value, "__len__") or len(value) != 2:
        return None
    return tuple(value)
