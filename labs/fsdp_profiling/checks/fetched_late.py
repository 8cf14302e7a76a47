"""Exercise 5.5: the units that were not prefetched in time."""

from labs.exercises.verdicts import Wrong, check
from labs.fsdp_profiling.checks.common import by_rank, recorded
from labs.fsdp_profiling.checks.synthetic_traces import for_prefetch
from labs.fsdp_profiling.injected_faults import without_prefetch
from labs.meters import trace_units


@check("5.5")
def check_fetched_late(fetched_late):
    """fetched_late(trace): the units whose all-gather in backward was issued only when the
    gradients of the unit before them, in backward's order, were complete."""
    traces = {"synthetic, with prefetch": for_prefetch(),
              "synthetic, without": for_prefetch(prefetch=False),
              "synthetic, layer.0 late": for_prefetch(late=("layer.0",)),
              "synthetic, layer.1 late": for_prefetch(late=("layer.1",), latency=0.05),
              "synthetic, slow link": for_prefetch(latency=4.0),
              **by_rank(recorded(), "recorded, prefetch on"),
              **by_rank(recorded(configure=without_prefetch), "recorded, prefetch off")}
    for name, trace in traces.items():
        _compare(fetched_late(trace), trace, f"trace {name!r}")
    return ("late units are named where prefetch is off, and none where it is on: on synthetic "
            "traces, and on every rank of two runs recorded just now")


def _compare(got, trace, what):
    want = trace_units.late_units(trace)
    if not isinstance(got, list | tuple | set) or not all(isinstance(one, str) for one in got):
        raise Wrong(f"{what}: fetched_late returned {got!r}, not a list of units' names",
                    "An empty list where all came in time.")
    # Only the order of two moments counts: the call of a unit's all-gather, and the completion of
    # the gradients before it. When the all-gather is in flight depends on the link.
    if sorted(got) == sorted(want):
        return
    [last, *_] = [span.name for span in trace_units.gradients_done(trace)]
    if last in got and last not in want:
        raise Wrong(f"{what}: {last} has no unit before it in backward, but the root's own work",
                    "Compare each unit with the one whose gradients are complete before its own.")
    missing = [unit for unit in want if unit not in got]
    if missing:
        raise Wrong(f"{what}: {', '.join(missing)} came late, and fetched_late does not say so",
                    "Late is: collective.issued after the begin of the span that gradients_done "
                    "gives for the unit before.")
    extra = [unit for unit in got if unit not in want]
    raise Wrong(f"{what}: {', '.join(extra)} was issued in time, and fetched_late calls it late",
                "Only all-gathers issued in backward count, by collective.issued, not begin.")
