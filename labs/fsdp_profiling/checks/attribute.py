"""Exercise 5.3: the unit and the phase that an all-gather belongs to."""

from labs.exercises.verdicts import Wrong, check
from labs.fsdp_profiling.checks import synthetic_traces
from labs.fsdp_profiling.checks.common import by_rank, recorded
from labs.meters import trace_units


@check("5.3", hints={"list index out of range":
                     "No label was found there. A call lies inside of its label, and "
                     "collective.issued says when it was; the collective may be in flight long "
                     "after the label's end."})
def check_attribute(attribute):
    """attribute(trace, collective): (unit, phase) of an all-gather, by the labels around it."""
    synthetic = {"synthetic": synthetic_traces.for_prefetch(),
                 "synthetic, without prefetch": synthetic_traces.for_prefetch(prefetch=False),
                 "synthetic, slow link": synthetic_traces.for_prefetch(latency=4.0)}
    for name, trace in {**synthetic, **by_rank(recorded())}.items():
        for number, gather in enumerate(trace.of("all_gather")):
            _compare(attribute(trace, gather), trace, gather,
                     f"trace {name!r}, all-gather {number}")
    return ("every all-gather has its unit and its phase, prefetched or not, on synthetic traces "
            "and on every rank of a run recorded just now")


def _compare(got, trace, gather, what):
    owner = trace_units.owner(trace, gather)
    # The labels around the call decide: when the collective begins or ends, the rank is already at
    # another unit, on a slow link even in another phase. Of nested labels the innermost counts: the
    # outer one is the unit that prefetches.
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Wrong(f"{what}: attribute returned {got!r}, not (unit, phase)",
                    'For example ("root", "forward").')
    unit, phase = got
    if phase != owner.phase:
        begun = trace.enclosing(gather.begin, f"labs::{phase}")
        raise Wrong(f"{what}: issued in {owner.phase}, not in {phase or 'no phase'}",
                    "Look around the moment of the call, collective.issued, not around its begin."
                    if begun else "The label around the call is labs::forward or labs::backward.")
    if unit != owner.unit:
        _explain_unit(unit, owner, trace, gather, what)


def _explain_unit(unit, owner, trace, gather, what):
    at_work = [trace_units.unit_of(label.name)
               for label in trace.enclosing(gather.issued, "FSDP::pre_")]
    if owner.prefetched and unit in at_work:
        raise Wrong(f"{what}: it is for {owner.unit}; {unit} is the unit that prefetched it",
                    "The innermost label, FSDP::all_gather (unit), says whose parameters are "
                    "gathered.")
    if owner.unit == trace_units.ROOT:
        raise Wrong(f"{what}: it is for the root, and attribute says {unit!r}",
                    'A label FSDP::all_gather without a unit is the root\'s: return "root".')
    at_begin = trace.enclosing(gather.begin, "FSDP::all_gather")
    raise Wrong(f"{what}: it is for {owner.unit}, not for {unit!r}",
                "When it is in flight, no label lies around it any more: look around the moment of "
                "the call, collective.issued." if unit == trace_units.ROOT and not at_begin else
                "The unit's name stands in brackets, as the module is called in the model.")
