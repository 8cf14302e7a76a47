"""What FSDP2's labels say of a trace: which unit a collective belongs to, in which phase, whether
it was fetched ahead; and when each unit computed and had its gradients."""

import re
from dataclasses import dataclass

from labs.meters.timeline import Span, length, minus

ROOT = "root"  # the outermost unit: FSDP's labels give it no name
PHASES = ("forward", "backward", "optimizer")
_UNIT = re.compile(r"\((.+)\)$")


@dataclass(frozen=True)
class Owner:
    """unit: the module's name ("root" for the outermost), or "" for what is not FSDP's. phase:
    forward, backward, optimizer, or "". prefetched: issued ahead, on behalf of another unit."""

    unit: str
    phase: str
    prefetched: bool


def owner(trace, collective) -> Owner:
    """Whom a collective works for: by the labels around the moment in which it was issued."""
    names = [label.name for label in trace.around(collective.issued)]
    mine = [name for name in names if name.startswith(("FSDP::all_gather",
                                                       "FSDP::post_backward_reduce"))]
    phase = next((name.removeprefix("labs::") for name in names
                  if name.removeprefix("labs::") in PHASES), "")
    ahead = any("_prefetch for " in name for name in names)
    return Owner(unit_of(mine[-1]) if mine else "", phase, ahead)


def unit_of(label: str) -> str:
    """The unit in the name of one of FSDP's labels, FSDP::... (unit)."""
    found = _UNIT.search(label)
    return found[1] if found else ROOT


def units(trace) -> list:
    """The units in the order in which forward first gathers them."""
    owners = [owner(trace, one) for one in trace.of("all_gather")]
    return list(dict.fromkeys(one.unit for one in owners if one.phase == "forward" and one.unit))


def gradients_done(trace) -> list:
    """A span for each unit and backward, named after the unit, that begins when the last gradient
    of the unit was computed."""
    labels = trace.labelled("FSDP::post_backward_accumulate")
    return [Span(unit_of(label.name), "ready", label.begin, label.end) for label in labels]


def working(trace) -> list:
    """When each unit was at work, as spans named after it, of category forward or backward: from
    when its parameters were there to its end. The root's work is what lies outside of the others,
    and has no span."""
    spans = []
    for phase, begins, ends in (("forward", "FSDP::pre_forward", "FSDP::post_forward"),
                                ("backward", "FSDP::pre_backward",
                                 "FSDP::post_backward_accumulate")):
        for begin in trace.labelled(begins):
            unit = unit_of(begin.name)
            end = next((label.begin for label in trace.labelled(ends)
                        if unit_of(label.name) == unit and label.begin >= begin.end), None)
            if end is not None and unit != ROOT:
                spans.append(Span(unit, phase, begin.end, end))
    return sorted(spans, key=lambda span: span.begin)


def computing(trace, unit: str, phase: str) -> float:
    """Seconds that the rank computed for this unit in all recorded steps; without `unit`, in this
    phase in all."""
    if unit == ROOT:
        return computing(trace, "", phase) - sum(computing(trace, other, phase)
                                                 for other in units(trace) if other != ROOT)
    windows = (trace.labelled(f"labs::{phase}") if not unit else
               [span for span in working(trace) if (span.name, span.category) == (unit, phase)])
    return sum(length(within(trace.compute, span)) for span in windows)


def within(stretches, span) -> list:
    """What of disjoint stretches lies in a span."""
    return minus([(max(begin, span.begin), min(end, span.end)) for begin, end in stretches
                  if end > span.begin and begin < span.end], [])


def late(trace) -> list:
    """The units whose all-gather in backward was issued only after the gradients of the unit that
    backward did just before were complete: those that were not fetched in time."""
    done = sorted(gradients_done(trace), key=lambda span: span.begin)
    gathers = [(one.issued, owner(trace, one)) for one in trace.of("all_gather")]
    found = []
    for backward in trace.labelled("labs::backward"):
        asked = {who.unit: at for at, who in reversed(gathers)
                 if backward.begin <= at <= backward.end and who.unit}
        order = [span for span in done if backward.begin <= span.begin <= backward.end
                 and span.name != ROOT]
        found += [after.name for before, after in zip(order, order[1:], strict=False)
                  if asked.get(after.name, before.begin) > before.begin]
    return found
