"""Exercise 5.7: each unit prefetches the next one in forward."""

from labs.exercises.verdicts import Wrong, check
from labs.fsdp_profiling.checks.no_prefetch import raise_if_gathered_twice, record_with
from labs.meters import trace_units


@check("5.7")
def check_forward_prefetch(forward_prefetch):
    """forward_prefetch(blocks): each unit's all-gather is issued before the unit before it is done
    with forward; backward stays as it is."""
    for trace in record_with(forward_prefetch):
        behind = _behind(trace)
        if behind:
            raise Wrong(f"rank {trace.rank}: in forward, the all-gather of {', '.join(behind)} is "
                        "issued only when the unit before it is done",
                        "Each block names the one that comes after it, in a list; the last one "
                        "names none.")
        # Whoever sets backward's prefetch too may turn the default off without noticing.
        if late := trace_units.late_units(trace):
            raise Wrong(f"rank {trace.rank}: in backward, {', '.join(late)} is late now",
                        "Leave backward's prefetch alone: FSDP's default does it.")
        raise_if_gathered_twice(trace)
    return "in forward each unit is gathered while the one before it computes, as the trace says"


def _behind(trace) -> list[str]:
    """Units whose all-gather in forward is issued after the end of the block before them."""
    issued = {owner.unit: one.issued for one in reversed(trace.of("all_gather"))
              if (owner := trace_units.owner(trace, one)).phase == "forward"}
    work = [span for span in trace_units.unit_spans(trace) if span.category == "forward"]
    return [after.name for before, after in zip(work, work[1:], strict=False)
            if issued.get(after.name, after.begin) > before.end]
