"""Exercise 5.3: the unit and the phase that an all-gather belongs to."""

from collections.abc import Callable
from dataclasses import replace

from labs.checks.generator import new_generator, unless_graded
from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp_profiling import recorded_runs, synthetic_traces
from labs.fsdp_profiling.recorded_runs import RecordedRun
from labs.fsdp_profiling.shared_recording import as_pair, by_rank, recorded, shortened
from labs.meters import trace_units
from labs.pictures.tables import Table


@check("5.3", device=None, hints={"list index out of range":
                     "Either no label was found there: a call lies inside of its label, and "
                     "collective.issued says when it was; the collective may be in flight long "
                     "after the label's end. Or the label names no unit in brackets: then it is "
                     "the root's."})
def check_attribute(attribute):
    """attribute(trace, collective): (unit, phase) of an all-gather, by the labels around it."""
    build = synthetic_traces.for_prefetch
    synthetic = {"synthetic": build(), "synthetic, without prefetch": build(prefetch=False),
                 "synthetic, slow link": build(latency=4.0),
                 "synthetic, eleven layers": build(units=synthetic_traces.ELEVEN),
                 "synthetic, two steps in which layer.2 is not freed after forward":
                     build(steps=2, kept=("layer.2",))}
    rng = new_generator()
    drawn = {f"of drawn units, {number}": synthetic_traces.drawn_for_prefetch(rng)
             for number in (1, 2)}
    for name, trace in {**synthetic, **by_rank(recorded()), **drawn}.items():
        gathers = trace.of("all_gather")
        # All answers first: whether another moment was looked at shows in all of them together.
        answers = [attribute(trace, gather) for gather in gathers]
        for number, (got, gather) in enumerate(zip(answers, gathers, strict=True)):
            _compare(got, trace, gather, f"trace {name!r}, all-gather {number}",
                     _ISSUED if _from_another_moment(trace, answers) else "")
    return ("every all-gather has its unit and its phase, prefetched or not, on synthetic traces "
            "and on every rank of a run recorded just now")


def _compare(got, trace, gather, what, hint):
    owner = trace_units.owner(trace, gather)
    # The labels around the call decide: when the collective begins or ends, the rank is already at
    # another unit, on a slow link even in another phase. Of nested labels the innermost counts: the
    # outer one is the unit that prefetches.
    pair = as_pair(got)
    if pair is None:
        raise Wrong(f"{what}: attribute returned {shortened(got)}, not (unit, phase)",
                    'For example ("root", "forward").', code="wrong_type")
    unit, phase = pair
    if phase != owner.phase:
        raise Wrong(f"{what}: issued in {owner.phase}, not in {shortened(phase)}", hint or
                    'The label around the call is labs::forward or labs::backward; the phase is '
                    '"forward" or "backward".', code="wrong_phase")
    if unit != owner.unit:
        _explain_unit(unit, owner, trace, gather, what, hint)


_ISSUED = ("When it is in flight, other labels lie around it, or none: look around the moment of "
           "the call, collective.issued.")


def _from_another_moment(trace, answers) -> bool:
    """Whether all units, or all phases, are those around the begin, or the end, of the flight,
    where these are others than around the call."""
    answered = list(zip(*(as_pair(got) or (None, None) for got in answers), strict=True))
    truth = _around(trace, "issued")
    return any(got == other != true for moment in ("begin", "end") for got, other, true in
               zip(answered, _around(trace, moment), truth, strict=True))


def _around(trace, moment) -> list[tuple[str, ...]]:
    """Units and phases of all all-gathers by the labels around this one of their moments."""
    owners = [trace_units.owner(trace, replace(gather, issued=getattr(gather, moment)))
              for gather in trace.of("all_gather")]
    return list(zip(*((one.unit or trace_units.ROOT, one.phase) for one in owners), strict=True))


def _explain_unit(unit, owner, trace, gather, what, hint):
    at_work = [trace_units.unit_of(label.name)
               for label in trace.enclosing(gather.issued, "FSDP::pre_")]
    if owner.prefetched and unit in at_work:
        raise Wrong(f"{what}: it is for {unless_graded(owner.unit)}; {unit} is the unit that "
                    "prefetched it",
                    "The innermost label, FSDP::all_gather (unit), says whose parameters are "
                    "gathered.", code="prefetching_unit")
    if owner.unit == trace_units.ROOT:
        raise Wrong(f"{what}: it is for the root, and attribute says {unit!r}",
                    'A label FSDP::all_gather without a unit is the root\'s: return "root".',
                    code="root_missed")
    raise Wrong(f"{what}: it is for {unless_graded(owner.unit)}, not for {unit!r}",
                hint or "The unit's name stands in the brackets of the label, as the module is "
                        "called in the model.", code="wrong_unit")


@shows("5.3")
def show_all_gathers(run: RecordedRun, attribute: Callable) -> Table:
    """Returns a table of rank 0's all-gathers, as `attribute` explains them, in order of issue."""
    recorded_runs.require_usual({run.config.name: run})
    trace = run[0]
    rows = [(number, *attribute(trace, one), f"{1e3 * one.issued:.1f}",
             f"{1e3 * (one.end - one.issued):.1f}", f"{one.bytes / 1e6:.2f}")
            for number, one in enumerate(trace.of("all_gather"))]
    return Table("all-gathers of rank 0", ("#", "unit", "phase", "issued at, ms",
                                           "complete after, ms", "MB"), rows, left=2)
