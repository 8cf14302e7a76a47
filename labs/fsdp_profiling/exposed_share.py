"""Exercise 5.2: the share of the step that is exposed communication."""

from labs.checks.numbers import Cause, judge_number
from labs.checks.verdicts import check, shows
from labs.fsdp_profiling import recorded_runs
from labs.fsdp_profiling.communication_share import FSDP_KINDS, HINTS, traces
from labs.fsdp_profiling.recorded_runs import RecordedRun
from labs.meters.trace import KINDS, total_seconds
from labs.pictures.tables import Table


@check("5.2", device=None, hints=HINTS)
def check_exposed_share(exposed_share):
    """exposed_share(trace): share of the steps in which the rank only waits for a collective."""
    for name, trace in traces().items():
        # Exposed is the time with a collective of any kind in flight and no computing. Subtracting
        # seconds instead of intervals goes wrong as soon as some computing overlaps with nothing.
        judge_number(exposed_share(trace), trace.seconds_of()["exposed"] / trace.seconds,
                     [cause for cause in _causes(trace) if cause.number],  # 0 has no certain cause
                     f"trace {name!r}: the exposed share")
    return ("the exposed share is right on synthetic traces, and on every rank of a run recorded "
            "just now")


def _causes(trace) -> list[Cause]:
    times, seconds = trace.seconds_of(), trace.seconds
    two_kinds, computed = trace.seconds_of(*FSDP_KINDS), total_seconds(trace.compute)
    return [
        Cause("all_communication", times["total"] / seconds,
              "that is all communication, hidden or not",
              "Take away the intervals in which the rank computes: lab.subtract."),
        Cause("part_hidden", times["overlapped"] / seconds, "that is the part that is hidden",
              "Exposed is the other one."),
        Cause("in_seconds", times["exposed"], "that is in seconds", "Divide by trace.seconds."),
        Cause("in_percent", 100 * times["exposed"] / seconds, "that is in percent",
              "A share lies between 0 and 1."),
        Cause("share_communication", times["exposed"] / (times["total"] or 1),
              "that is a share of the communication, not of the step", "Divide by trace.seconds."),
        Cause("all_time_without_computing", 1 - computed / seconds,
              "that is all the time without computing",
              "A rank can also be idle: count only where a collective is in flight."),
        Cause("leaves_out_all_reduce", two_kinds["exposed"] / seconds,
              "that leaves out the all-reduce",
              "Exposed is exposed, whatever the kind: trace.collectives."),
        Cause("subtracts_seconds_from_seconds", max(times["total"] - computed, 0) / seconds,
              "that subtracts seconds from seconds: right only if all computing overlapped",
              "Subtract intervals: lab.subtract(intervals, others)."),
        Cause("computing_without_communication", (computed - times["overlapped"]) / seconds,
              "that is the computing without communication",
              "The other way round: communication without computing."),
        Cause("overlaps_counted_twice",
              (sum(one.seconds for one in trace.collectives) - times["overlapped"]) / seconds,
              "that counts a moment twice where two collectives are in flight",
              "Unite the collectives first: lab.union.")]


@shows("5.2")
def show_seconds(run: RecordedRun) -> Table:
    """Returns a table of milliseconds by rank and kind: total, exposed, overlapped."""
    recorded_runs.require_usual({run.config.name: run})
    rows = []
    for trace in run:
        for kind in [kind for kind in KINDS if trace.of(kind)]:
            times = trace.seconds_of(kind)
            rows.append((trace.rank, kind, len(trace.of(kind)),
                         *(f"{1e3 * times[part]:.1f}" for part in
                           ("total", "exposed", "overlapped"))))
    return Table("milliseconds of the recorded step", ("rank", "kind", "calls", "total", "exposed",
                                                       "overlapped"), rows, left=1)
