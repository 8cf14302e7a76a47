"""Exercise 5.5: the units that were not prefetched in time."""

from collections.abc import Iterable

from labs.checks.generator import is_graded, new_generator
from labs.checks.verdicts import Wrong, check
from labs.fsdp_profiling import synthetic_traces
from labs.fsdp_profiling.injected_faults import without_prefetch
from labs.fsdp_profiling.shared_recording import by_rank, recorded, shortened
from labs.meters import trace_units


@check("5.5", device=None)
def check_fetched_late(fetched_late):
    """fetched_late(trace): the units whose all-gather in backward was issued only when the
    gradients of the unit before them, in backward's order, were complete."""
    rng = new_generator()
    build, eleven = synthetic_traces.for_prefetch, synthetic_traces.ELEVEN
    traces = {"synthetic, with prefetch": build(), "synthetic, without": build(prefetch=False),
              "synthetic, layer.0 late": build(late=("layer.0",)),
              "synthetic, layer.1 late": build(late=("layer.1",), latency=0.05),
              "synthetic, slow link": build(latency=4.0),
              "synthetic, eleven layers": build(units=eleven, late=(eleven[9], eleven[1])),
              "synthetic, layer.1 is not freed after forward": build(prefetch=False,
                                                                      kept=("layer.1",)),
              **by_rank(recorded(), "recorded, prefetch on"),
              **by_rank(recorded(configure=without_prefetch), "recorded, prefetch off"),
              "of drawn units": synthetic_traces.drawn_for_prefetch(rng),
              "of other drawn units": synthetic_traces.drawn_for_prefetch(rng)}
    for name, trace in traces.items():
        _compare(fetched_late(trace), trace, f"trace {name!r}")
    return ("late units are named where prefetch is off, and none where it is on: on synthetic "
            "traces, and on every rank of two runs recorded just now")


def _compare(got, trace, what):
    names = _names(got)
    if names is None:
        raise Wrong(f"{what}: fetched_late returned {shortened(got)}, not a list of units' names",
                    "An empty list where all came in time.", code="wrong_type")
    want = trace_units.late_units(trace)
    # Only the order of two moments counts: the call of a unit's all-gather, and the completion of
    # the gradients before it. When the all-gather is in flight depends on the link.
    if names == set(want):
        return
    for other, sentence, hint in _causes(trace):
        if names == other:
            raise Wrong(f"{what}: {sentence}", hint, code="begin_not_issue")
    # Backward's first unit, the last one of forward.
    [last, *_] = [span.name for span in trace_units.gradients_done(trace)]
    if last in names and last not in want:
        raise Wrong(f"{what}: {last} has no unit before it in backward, but the root's own work",
                    "Compare each unit with the one whose gradients are complete before its own.",
                    code="extra_entry")
    missing = [unit for unit in want if unit not in names]
    if missing:
        late = "a unit" if is_graded() else ", ".join(missing)
        raise Wrong(f"{what}: {late} came late, and fetched_late does not say so",
                    "Late is: its all-gather in backward was issued after the begin of the span "
                    "that gradients_done gives for the unit before.", code="missing_entry")
    raise Wrong(f"{what}: {', '.join(sorted(names - set(want)))} was issued in time, and "
                "fetched_late calls it late",
                "Only all-gathers that are issued in backward count. A unit that backward does not "
                "gather is not late.", code="extra_entry")


def _names(got) -> set[str] | None:
    """The names in a list, tuple, set, array or the like; None if it holds anything else."""
    if isinstance(got, str | bytes) or not isinstance(got, Iterable):
        return None
    names = list(got)
    return set(map(str, names)) if all(isinstance(one, str) for one in names) else None


def _causes(trace) -> list[tuple[set[str], str, str]]:
    """What some mistakes lead to, where that differs from the right answer."""
    owners = [(one, trace_units.owner(trace, one)) for one in trace.of("all_gather")]
    begins = {owner.unit: one.begin for one, owner in owners if owner.phase == "backward"}
    done = [span for span in trace_units.gradients_done(trace) if span.name != trace_units.ROOT]
    by_begin = {after.name for before, after in zip(done, done[1:], strict=False)
                if begins.get(after.name, before.begin) > before.begin}
    return [] if by_begin == set(trace_units.late_units(trace)) else [
        (by_begin, "that says when an all-gather began to be in flight, not when it was issued",
         "On a slow link even a prefetched all-gather begins late: take collective.issued.")]
