"""Puts the traces of several ranks on one time axis.

Each trace counts its seconds from the rank's own first step. The profiler's clock is that of the
host, which all its processes share, so `Trace.started` says how far the traces of one host lie
apart. Clocks of several hosts differ by milliseconds or more: there, first shift the traces of each
host so that the ends of the same barrier agree, since no rank leaves a barrier before the last one
has come. What is left is the link's latency.
"""

from collections.abc import Sequence
from dataclasses import replace

from labs.meters.trace import Trace, subtract, union


def on_one_axis(traces: Sequence[Trace]) -> list[Trace]:
    """Returns the traces of ranks on one host with all times in seconds since the first of them
    began its first recorded step."""
    first = min(trace.started for trace in traces)
    return [shifted(trace, trace.started - first) for trace in traces]


def shifted(trace: Trace, seconds: float) -> Trace:
    """Returns the trace with `seconds` added to all times, and `started` at the same moment."""
    def later(spans):
        return tuple(replace(span, begin=span.begin + seconds, end=span.end + seconds)
                     for span in spans)

    return replace(
        trace, labels=later(trace.labels), item_calls=later(trace.item_calls),
        executed_labels=later(trace.executed_labels), ends=trace.ends + seconds,
        collectives=tuple(replace(one, issued=one.issued + seconds)
                          for one in later(trace.collectives)),
        compute=tuple((begin + seconds, end + seconds) for begin, end in trace.compute),
        started=trace.started - seconds)


def without_loading(trace: Trace) -> Trace:
    """Returns a trace of ranks on CPUs in which what the data loader computes by itself, inside its
    label, is no computing of the step. On a GPU kernels compute, and the loader runs beside
    them."""
    if trace.executed_labels:
        return trace
    loading = union(trace.labelled("enumerate(DataLoader)"))
    return replace(trace, compute=tuple(subtract(trace.compute, loading)))
