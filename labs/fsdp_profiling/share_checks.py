"""Checks of exercises 5.1 and 5.2: what of a step is communication, and what of it is exposed."""

import functools

from labs.exercises.verdicts import Wrong, check
from labs.fsdp_profiling import made, recording
from labs.meters.trace import total_seconds, union

COUNTED = ("all_gather", "reduce_scatter")
_TAKEN = {
    "cannot unpack non-iterable": "lab.total_seconds and lab.subtract take intervals: lab.union "
                                  "makes them from spans.",
    "'tuple' object has no attribute 'begin'": "lab.union takes the spans themselves, such as "
                                               "trace.of(kind)."}


@functools.cache
def recorded(**changes):
    """One run for all checks that only look at it: recorded at the first of them."""
    return recording.run(recording.Job(recording.preset(), "for checks", steps=1, **changes))


@check("5.1", hints=_TAKEN)
def check_communication_share(communication_share):
    """communication_share(trace): kind -> share of the steps with such a collective under way."""
    for name, trace in _traces():
        got = communication_share(trace)
        if not isinstance(got, dict) or set(got) != set(COUNTED):
            raise Wrong(f"communication_share returned {_short(got)}, not a share for each of "
                        f"{' and '.join(COUNTED)}", 'A dictionary: {"all_gather": 0.2, ...}')
        for kind in COUNTED:
            _compare(got[kind], trace, trace.of(kind), f"trace {name!r}, {kind}: the share")
    return "the shares are right on made traces, and on every rank of a run recorded just now"


def _traces() -> list:
    run = [(f"recorded, rank {trace.rank}", trace) for trace in recorded()]
    return [*made.shares().items(), *run]


def _compare(got, trace, spans, what):
    seconds = total_seconds(union(spans))
    want = seconds / trace.seconds
    if _same(got, want):
        return
    longest = max(end for _, end in union(spans))
    known = [
        (sum(span.seconds for span in spans) / trace.seconds,
         "counts a moment twice where two collectives are under way",
         "Unite the spans before you add up: lab.union, then lab.total_seconds."),
        (seconds, "is in seconds", "Divide by trace.seconds."),
        (100 * want, "is in percent", "A share lies between 0 and 1."),
        (seconds / (trace.seconds / max(1, len(trace.steps))), "divides by one step's seconds, not "
         "by those of all recorded steps", "trace.seconds is of all of them together."),
        (seconds / longest, "divides by something shorter than the steps", "Use trace.seconds."),
        (total_seconds(union([_from_call(span) for span in spans])) / trace.seconds,
         "counts from the call, not from when the collective was under way",
         "A call may wait in a queue: take begin and end."),
        (len(spans) / max(1, len(trace.collectives)), "counts calls, not seconds",
         "Calls differ in length."),
        (total_seconds(union(trace.collectives)) / trace.seconds, "counts other collectives too",
         "Ask for one kind: trace.of(kind).")]
    _raise(got, want, known, what)


def _raise(got, want, known, what):
    for value, sentence, hint in known:
        if value and _same(got, value):
            raise Wrong(f"{what} {sentence}", hint)
    raise Wrong(f"{what} is {_short(got)}, not {want:.4g}")


def _from_call(span):
    return type(span)(**{**vars(span), "begin": span.issued})


def _same(got, want) -> bool:
    if isinstance(got, bool) or not isinstance(got, int | float):
        return False
    return abs(got - want) <= 1e-9 * max(1.0, abs(want))


def _short(value) -> str:
    words = repr(value)
    return words if len(words) <= 60 else words[:59] + "…"


@check("5.2", hints=_TAKEN)
def check_exposed_share(exposed_share):
    """exposed_share(trace): share of the steps in which the rank only waits for a collective."""
    for name, trace in _traces():
        _compare_exposed(exposed_share(trace), trace, f"trace {name!r}: the exposed share")
    return "what is exposed is right on made traces, and on every rank of a run recorded just now"


def _compare_exposed(got, trace, what):
    want = trace.seconds_of()["exposed"] / trace.seconds
    if _same(got, want):
        return
    times, seconds = trace.seconds_of(), trace.seconds
    few, computed = trace.seconds_of(*COUNTED), total_seconds(trace.compute)
    known = [
        (times["total"] / seconds, "is all communication, hidden or not",
         "Take away the stretches in which the rank computes: lab.subtract."),
        (times["overlapped"] / seconds, "is the part that is hidden", "Exposed is the other one."),
        (times["exposed"], "is in seconds", "Divide by trace.seconds."),
        (100 * want, "is in percent", "A share lies between 0 and 1."),
        (times["exposed"] / (times["total"] or 1), "is a share of the communication, not of the "
         "step", "Divide by trace.seconds."),
        (1 - computed / seconds, "is all the time without computing", "A rank can also be idle: "
         "count only where a collective is under way."),
        (few["exposed"] / seconds, "leaves out the all-reduce", "Exposed is exposed, whatever the "
         "kind: trace.collectives."),
        (max(times["total"] - computed, 0) / seconds, "subtracts seconds from seconds: right only "
         "if all computing overlapped", "Subtract stretches: lab.subtract(stretches, others)."),
        ((computed - times["overlapped"]) / seconds, "is the computing without communication",
         "The other way round: communication without computing."),
        (sum(one.seconds for one in trace.collectives) / seconds - times["overlapped"] / seconds,
         "counts a moment twice where two collectives are under way",
         "Unite the collectives first: lab.union.")]
    _raise(got, want, known, what)
