"""Exercise 5.2: the share of the step that is exposed communication."""

from labs.exercises.verdicts import check
from labs.fsdp_profiling.checks.common import raise_wrong, same
from labs.fsdp_profiling.checks.communication_share import HINTS, KINDS, traces
from labs.meters.trace import total_seconds


@check("5.2", hints=HINTS)
def check_exposed_share(exposed_share):
    """exposed_share(trace): share of the steps in which the rank only waits for a collective."""
    for name, trace in traces().items():
        _compare(exposed_share(trace), trace, f"trace {name!r}: the exposed share")
    return ("the exposed share is right on synthetic traces, and on every rank of a run recorded "
            "just now")


def _compare(got, trace, what):
    times, seconds = trace.seconds_of(), trace.seconds
    want = times["exposed"] / seconds
    # Exposed is the time with a collective of any kind in flight and no computing. Subtracting
    # seconds instead of intervals goes wrong as soon as some computing overlaps with nothing.
    if same(got, want):
        return
    two_kinds, computed = trace.seconds_of(*KINDS), total_seconds(trace.compute)
    raise_wrong(got, want, [
        (times["total"] / seconds, "is all communication, hidden or not",
         "Take away the intervals in which the rank computes: lab.subtract."),
        (times["overlapped"] / seconds, "is the part that is hidden", "Exposed is the other one."),
        (times["exposed"], "is in seconds", "Divide by trace.seconds."),
        (100 * want, "is in percent", "A share lies between 0 and 1."),
        (times["exposed"] / (times["total"] or 1), "is a share of the communication, not of the "
         "step", "Divide by trace.seconds."),
        (1 - computed / seconds, "is all the time without computing", "A rank can also be idle: "
         "count only where a collective is in flight."),
        (two_kinds["exposed"] / seconds, "leaves out the all-reduce", "Exposed is exposed, "
         "whatever the kind: trace.collectives."),
        (max(times["total"] - computed, 0) / seconds, "subtracts seconds from seconds: right only "
         "if all computing overlapped", "Subtract intervals: lab.subtract(intervals, others)."),
        ((computed - times["overlapped"]) / seconds, "is the computing without communication",
         "The other way round: communication without computing."),
        (sum(one.seconds for one in trace.collectives) / seconds - times["overlapped"] / seconds,
         "counts a moment twice where two collectives are in flight",
         "Unite the collectives first: lab.union.")], what)
