"""Exercise 5.6: backward without prefetch."""

from labs.exercises.verdicts import Wrong, check
from labs.fsdp_profiling import recording
from labs.meters import trace_units


@check("5.6")
def check_no_prefetch(no_prefetch):
    """no_prefetch(blocks): afterwards each unit is gathered only when backward arrives at it."""
    for trace in record_with(no_prefetch):
        late, order = trace_units.late_units(trace), trace_units.units(trace)
        # The first unit of backward has none before it that could prefetch it. Every other one must
        # be late: plain FSDP2, or an empty list, leaves the default prefetch on.
        want = [unit for unit in reversed(order) if unit != trace_units.ROOT][1:]
        prefetched = [unit for unit in want if unit not in late]
        if prefetched:
            raise Wrong(f"rank {trace.rank}: the all-gather of {', '.join(prefetched)} is still "
                        "issued ahead, before the gradients of the unit before it are complete",
                        "An empty list means FSDP's default, which prefetches. Name what is there "
                        "already while a unit computes.")
        raise_if_gathered_twice(trace)
    return "without prefetch every unit is gathered late, on every rank, as the trace says"


def record_with(configure) -> recording.RecordedRun:
    """Records a small model whose units `configure` has been applied to."""
    sizes = recording.preset(layers=3, hidden=64, heads=2, context=32, batch=2)
    config = recording.RunConfig(sizes, "for a check of prefetch", configure=configure)
    return recording.record_runs([config])[0]


def raise_if_gathered_twice(trace) -> None:
    """Raises Wrong where a unit is gathered more than once in one phase: who prefetches a unit that
    was used and freed pays for a collective that nothing needs."""
    seen = set()
    for one in trace.of("all_gather"):
        owner = trace_units.owner(trace, one)
        if (owner.unit, owner.phase) in seen:
            raise Wrong(f"rank {trace.rank}: {owner.unit} is gathered twice in {owner.phase}",
                        "A unit that has been used is freed, so prefetching it gathers it again, "
                        "for nothing. A unit itself is there while it computes.")
        seen.add((owner.unit, owner.phase))
