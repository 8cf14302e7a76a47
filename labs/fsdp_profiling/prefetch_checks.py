"""Checks of exercises 5.5 to 5.7: what was fetched in time, told from the trace."""

from labs.exercises.verdicts import Wrong, check
from labs.fsdp_profiling import made, recording
from labs.fsdp_profiling.share_checks import recorded
from labs.meters import trace_units as units
from labs.meters.trace_units import ROOT


@check("5.5")
def check_fetched_late(fetched_late):
    """fetched_late(trace): the units whose all-gather in backward was issued only when the
    gradients of the unit before them, in backward's order, were complete."""
    cases = {"made, with prefetch": made.fetching(), "made, without": made.fetching(ahead=False),
             "made, layer.0 late": made.fetching(late=("layer.0",)),
             "made, layer.1 late": made.fetching(late=("layer.1",), flight=0.05),
             "made, slow wire": made.fetching(flight=4.0)}
    for prefetch, run in (("on", recorded()), ("off", recorded(prefetch="off"))):
        for trace in run:
            cases[f"recorded, prefetch {prefetch}, rank {trace.rank}"] = trace
    for name, trace in cases.items():
        _compare_late(fetched_late(trace), trace, f"trace {name!r}")
    return ("late units are named where prefetch is off, and none where it is on: on made traces, "
            "and on every rank of two runs recorded just now")


def _compare_late(got, trace, what):
    want = units.late_units(trace)
    if not isinstance(got, list | tuple | set) or not all(isinstance(one, str) for one in got):
        raise Wrong(f"{what}: fetched_late returned {got!r}, not a list of units' names",
                    "An empty list where all came in time.")
    if sorted(got) == sorted(want):
        return
    [last, *_] = [span.name for span in units.gradients_done(trace)]
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


@check("5.6")
def check_no_prefetch(no_prefetch):
    """no_prefetch(blocks): afterwards each unit is gathered only when backward arrives at it."""
    for trace in _run(no_prefetch):
        late, order = units.late_units(trace), units.units(trace)
        want = [unit for unit in reversed(order) if unit != ROOT][1:]
        ahead = [unit for unit in want if unit not in late]
        if ahead:
            raise Wrong(f"rank {trace.rank}: the all-gather of {', '.join(ahead)} is still issued "
                        "ahead, before the gradients of the unit before it are complete",
                        "An empty list means FSDP's default, which prefetches. Name what is there "
                        "already while a unit computes.")
        _once(trace)
    return "without prefetch every unit is gathered late, on every rank, as the trace says"


@check("5.7")
def check_forward_prefetch(forward_prefetch):
    """forward_prefetch(blocks): each unit's all-gather is issued before the unit before it is done
    with forward; backward stays as it is."""
    for trace in _run(forward_prefetch):
        behind = _behind(trace)
        if behind:
            raise Wrong(f"rank {trace.rank}: in forward, the all-gather of {', '.join(behind)} is "
                        "issued only when the unit before it is done",
                        "Each block names the one that comes after it, in a list; the last one "
                        "names none.")
        if late := units.late_units(trace):
            raise Wrong(f"rank {trace.rank}: in backward, {', '.join(late)} is late now",
                        "Leave backward's prefetch alone: FSDP's default does it.")
        _once(trace)
    return "in forward each unit is gathered while the one before it computes, as the trace says"


def _behind(trace) -> list:
    """Units whose all-gather in forward is issued after the end of the block before."""
    asked = {owner.unit: one.issued for one in reversed(trace.of("all_gather"))
             if (owner := units.owner(trace, one)).phase == "forward"}
    work = [span for span in units.unit_spans(trace) if span.category == "forward"]
    return [after.name for before, after in zip(work, work[1:], strict=False)
            if asked.get(after.name, after.begin) > before.end]


def _once(trace):
    """Raises Wrong where a unit is gathered more than once in one phase."""
    seen = set()
    for one in trace.of("all_gather"):
        owner = units.owner(trace, one)
        if (owner.unit, owner.phase) in seen:
            raise Wrong(f"rank {trace.rank}: {owner.unit} is gathered twice in {owner.phase}",
                        "A unit that is done is freed: who names it then fetches it again, for "
                        "nothing. A unit itself is there while it computes.")
        seen.add((owner.unit, owner.phase))


def _run(configure):
    sizes = recording.preset(layers=3, hidden=64, heads=2, context=32, batch=2)
    return recording.run(recording.Job(sizes, "for a check of prefetch", configure=configure))
