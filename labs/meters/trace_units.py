"""What FSDP2's labels say about a trace: which unit a collective serves, in which phase, whether it
was prefetched; and when each unit computed and had its gradients.

FSDP2 writes these labels on a CPU as on a GPU. The call of a collective lies inside of them; the
collective itself may be in flight long after they have ended. Orders are those of the program,
seconds those of the device, which on a GPU comes later to what the program has launched.
"""

import re
from dataclasses import dataclass

from labs.meters.trace import PHASES, Collective, Span, Trace, clip, total_seconds

ROOT = "root"  # the outermost unit: FSDP's labels give it no name
_UNIT = re.compile(r"\((.+)\)$")


@dataclass(frozen=True)
class Owner:
    """unit: the module's name ("root" for the outermost), or "" for a collective that is not
    FSDP's. phase: forward, backward, optimizer, or "". prefetched: issued on behalf of another unit
    than the one at work."""

    unit: str
    phase: str
    prefetched: bool


def owner(trace: Trace, collective: Collective) -> Owner:
    """Returns the unit that a collective serves, from the labels that enclose its call."""
    names = [label.name for label in trace.enclosing(collective.issued)]
    served = [name for name in names if name.startswith(("FSDP::all_gather",
                                                         "FSDP::post_backward_reduce"))]
    phase = next((phase for phase in PHASES if f"labs::{phase}" in names), "")
    prefetched = any("_prefetch for " in name for name in names)
    return Owner(unit_of(served[-1]) if served else "", phase, prefetched)


def unit_of(label: str) -> str:
    """Returns the unit in the name of one of FSDP's labels, "FSDP::... (unit)"."""
    found = _UNIT.search(label)
    return found[1] if found else ROOT


def units(trace: Trace) -> list[str]:
    """Returns the units in the order in which forward first gathers them."""
    owners = [owner(trace, one) for one in trace.of("all_gather")]
    return list(dict.fromkeys(one.unit for one in owners if one.phase == "forward" and one.unit))


def gradients_done(trace: Trace) -> list[Span]:
    """Returns one span for each unit and backward, in order. Its name is the unit, its begin the
    moment at which the program came to the end of the unit's last gradient: on a GPU it has been
    launched, not computed."""
    labels = trace.labelled("FSDP::post_backward_accumulate")
    return [Span(unit_of(label.name), "ready", label.begin, label.end) for label in labels]


def unit_spans(trace: Trace) -> list[Span]:
    """Returns when the device worked on each unit: spans named after it, of category forward or
    backward, from when its parameters are gathered to its end. The root has none: its work lies
    before, after and between those of the others."""
    return _unit_spans(trace.executed)


def _unit_spans(labelled) -> list[Span]:
    """The spans between the labels that labelled(beginning) returns."""
    spans = []
    for phase, begins, ends in (("forward", "FSDP::pre_forward", "FSDP::post_forward"),
                                ("backward", "FSDP::pre_backward",
                                 "FSDP::post_backward_accumulate")):
        for begin in labelled(begins):
            unit = unit_of(begin.name)
            end = next((label.begin for label in labelled(ends)
                        if unit_of(label.name) == unit and label.begin >= begin.end), None)
            if end is not None and unit != ROOT:
                spans.append(Span(unit, phase, begin.end, end))
    return sorted(spans, key=lambda span: span.begin)


def unit_seconds(trace: Trace, unit: str, phase: str) -> float:
    """Returns the seconds that the rank computed for this unit in all recorded steps."""
    if unit == ROOT:
        return phase_seconds(trace, phase) - sum(unit_seconds(trace, other, phase)
                                                 for other in units(trace) if other != ROOT)
    return sum(total_seconds(clip(trace.compute, span)) for span in unit_spans(trace)
               if (span.name, span.category) == (unit, phase))


def phase_seconds(trace: Trace, phase: str) -> float:
    """Returns the seconds that the rank computed in this phase of all recorded steps."""
    return sum(total_seconds(clip(trace.compute, label))
               for label in trace.executed(f"labs::{phase}"))


def late_units(trace: Trace) -> list[str]:
    """Returns the units that were not prefetched in time: in backward, their all-gather was issued
    only after the gradients of the unit before them were complete."""
    done = gradients_done(trace)
    gathers = [(one.issued, owner(trace, one)) for one in trace.of("all_gather")]
    late = []
    for backward in trace.labelled("labs::backward"):
        # Reversed, so that of two all-gathers of one unit the earlier is kept.
        issued = {served.unit: at for at, served in reversed(gathers)
                  if backward.begin <= at <= backward.end and served.unit}
        order = [span for span in done if backward.begin <= span.begin <= backward.end
                 and span.name != ROOT]
        late += [after.name for before, after in zip(order, order[1:], strict=False)
                 if issued.get(after.name, before.begin) > before.begin]
    return late


def order_of_events(trace: Trace, phase: str) -> list[tuple[str, str]]:
    """Returns what happens to the units but the root in the first such phase, in order: ("gather",
    unit) where an all-gather is issued, ("done", unit) where its work in this phase ends."""
    label = trace.labelled(f"labs::{phase}")[0]
    gathers = [(one.issued, "gather", owner(trace, one).unit) for one in trace.of("all_gather")
               if label.begin <= one.issued <= label.end]
    done = [(span.end, "done", span.name) for span in _unit_spans(trace.labelled)
            if span.category == phase and label.begin <= span.begin <= label.end]
    return [(what, unit) for _, what, unit in sorted([*gathers, *done]) if unit not in ("", ROOT)]


def most_gathered(trace: Trace, phase: str) -> int:
    """Returns how many units, without the root, are gathered or being gathered at the same time, if
    each is freed when its work in this phase is done."""
    most = now = 0
    for what, _ in order_of_events(trace, phase):
        now += 1 if what == "gather" else -1
        most = max(most, now)
    return most


def exposed_in_forward(trace: Trace) -> float:
    """Returns the seconds in forward in which the rank only waits for a collective."""
    return sum(total_seconds(clip(trace.exposed, label))
               for label in trace.executed("labs::forward"))
