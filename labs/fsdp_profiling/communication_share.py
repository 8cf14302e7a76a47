"""Exercise 5.1: the shares of the step in which collectives are in flight, and exposed, by kind."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, judge_number
from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp_profiling import recorded_runs, synthetic_traces
from labs.fsdp_profiling.recorded_runs import RecordedRun
from labs.fsdp_profiling.shared_recording import as_pair, by_rank, recorded, shortened
from labs.meters.trace import KINDS, Trace, subtract, total_seconds, union
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table

FSDP_KINDS = ("all_gather", "reduce_scatter")
ALL = "all"  # of the answer: collectives of every kind
HINTS = {
    "cannot unpack non-iterable": "lab.total_seconds and lab.subtract take intervals: lab.union "
                                  "makes them from spans."}


@check("5.1", device=None, hints=HINTS)
def check_communication_share(communication_share):
    """communication_share(trace): kind, or "all" -> (share of the steps with such a collective in
    flight, share in which the rank only waits for one)."""
    rng = new_generator()
    drawn = {f"of drawn moments, {number}": synthetic_traces.drawn_for_shares(rng)
             for number in (1, 2)}
    cases = {name: (trace, _answer(communication_share(trace)))
             for name, trace in {**traces(), **drawn}.items()}
    for name, (trace, got) in cases.items():
        for kind, spans in _groups(trace).items():
            # A share is the time with at least one collective in flight, from begin to end, by the
            # time of all recorded steps.
            want = total_seconds(union(spans)) / trace.seconds
            judge_number(got[kind][0], want, _causes(want, trace, spans),
                         f"trace {name!r}, {kind}: the share in flight")
    # "all" first: it is where a collective that is not FSDP's may be left out.
    for kind in (ALL, *FSDP_KINDS):
        for name, (trace, got) in cases.items():
            # Exposed is the time with such a collective in flight and no computing. Subtracting
            # seconds instead of intervals goes wrong as soon as some computing overlaps with
            # nothing.
            kinds = () if kind == ALL else (kind,)
            judge_number(got[kind][1], trace.seconds_of(*kinds)["exposed"] / trace.seconds,
                         [cause for cause in _exposed_causes(trace, kinds) if cause.number],
                         f"trace {name!r}, {kind}: the exposed share")  # 0 has no certain cause
    return ("both shares are right for each kind and for all together, on synthetic traces and on "
            "every rank of a run recorded just now")


def traces() -> dict[str, Trace]:
    """Returns the traces that the exercise is judged by, but those that are drawn."""
    return {**synthetic_traces.for_shares(), **by_rank(recorded())}


def _groups(trace) -> dict[str, list]:
    """kind, or "all" -> the collectives."""
    return {**{kind: trace.of(kind) for kind in FSDP_KINDS}, ALL: list(trace.collectives)}


def _answer(got) -> dict[str, tuple]:
    """The answer, as pairs by kind."""
    names = (*FSDP_KINDS, ALL)
    if not isinstance(got, Mapping) or set(got) != set(names):
        raise Wrong(f"communication_share returned {shortened(got)}, not an entry for each of "
                    f"{', '.join(names)}", 'A dictionary: {"all_gather": (0.2, 0.1), ...}',
                    code="wrong_type")
    for kind in names:
        if as_pair(got[kind]) is None:
            raise Wrong(f"communication_share returned {shortened(got[kind])} for {kind}, not "
                        "(in flight, exposed)", 'Two shares: {"all_gather": (0.2, 0.1), ...}',
                        code="wrong_type")
    return {kind: as_pair(got[kind]) for kind in names}


def _causes(want, trace, spans) -> list[Cause]:
    """Each gives another number than the right one on at least one synthetic trace."""
    if not spans:
        return []
    # The right share, back in seconds.
    seconds = want * trace.seconds
    # From the call to the end, as if a collective were in flight while it waits in a queue.
    from_call = [replace(span, begin=span.issued) for span in spans]
    exposed = total_seconds(subtract(union(spans), trace.compute)) / trace.seconds
    return [
        *([Cause("shares_swapped", exposed, "that is the exposed share",
                 "(in flight, exposed): the exposed share is the second one.")] if exposed else []),
        Cause("overlaps_counted_twice", sum(span.seconds for span in spans) / trace.seconds,
              "that counts a moment twice where two collectives are in flight",
              "Unite the spans before you add up: lab.union, then lab.total_seconds."),
        Cause("in_seconds", seconds, "that is in seconds", "Divide by trace.seconds."),
        Cause("in_percent", 100 * want, "that is in percent", "A share lies between 0 and 1."),
        Cause("divides_one_step_seconds", want * max(1, len(trace.steps)),
              "that divides by one step's seconds, not by those of all recorded steps",
              "trace.seconds is of all of them together."),
        Cause("divides_time_since_recording_began", seconds / trace.ends,
              "that divides by the time since the recording began, not by that of the steps",
              "Use trace.seconds."),
        Cause("divides_something_shorter", seconds / max(span.end for span in spans),
              "that divides by something shorter than the steps", "Use trace.seconds."),
        Cause("time_from_first_begin_last",
              (max(span.end for span in spans) - min(span.begin for span in spans)) / trace.seconds,
              "that is the time from the first begin to the last end",
              "Between two collectives there may be none in flight: lab.union keeps the gaps."),
        Cause("takes_away_only_two_neighbours", _neighbours(spans) / trace.seconds,
              "that takes away only what two neighbours share", "Three can be in flight at once, "
              "or one inside another: lab.union handles all of that."),
        Cause("unites_spans_if_began", _in_order_of_issue(spans) / trace.seconds,
              "that unites the spans as if they began in the order in which they were issued",
              "Sort them by begin, or use lab.union."),
        Cause("counts_from_call", total_seconds(union(from_call)) / trace.seconds,
              "that counts from the call, not from when the collective was in flight",
              "A call may wait in a queue: take begin and end."),
        Cause("counts_calls", len(spans) / max(1, len(trace.collectives)),
              "that counts calls, not seconds", "Calls differ in length."),
        Cause("counts_other_collectives_too",
              total_seconds(union(trace.collectives)) / trace.seconds,
              "that counts other collectives too", "Ask for one kind: trace.of(kind).")]


def _neighbours(spans) -> float:
    """The durations less what each shares with the next one."""
    order = sorted(spans, key=lambda span: (span.begin, span.end))
    return sum(span.seconds for span in order) - sum(
        max(0.0, min(one.end, other.end) - other.begin)
        for one, other in zip(order, order[1:], strict=False))


def _in_order_of_issue(spans) -> float:
    """The seconds of a union that takes the spans as they come."""
    merged = []
    for span in spans:
        if merged and span.begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], span.end)
        else:
            merged.append([span.begin, span.end])
    return total_seconds(merged)


def _exposed_causes(trace, kinds) -> list[Cause]:
    """Mistakes of the exposed share of these kinds; no kinds: of all."""
    times, every, seconds = trace.seconds_of(*kinds), trace.seconds_of(), trace.seconds
    two_kinds, computed = trace.seconds_of(*FSDP_KINDS), total_seconds(trace.compute)
    spans = trace.of(*kinds) if kinds else trace.collectives
    causes = [
        Cause("all_communication", times["total"] / seconds,
              "that is all communication, hidden or not",
              "Take away the intervals in which the rank computes: lab.subtract."),
        Cause("part_hidden", times["overlapped"] / seconds, "that is the part that is hidden",
              "Exposed is the other one."),
        Cause("in_seconds", times["exposed"], "that is in seconds", "Divide by trace.seconds."),
        Cause("in_percent", 100 * times["exposed"] / seconds, "that is in percent",
              "A share lies between 0 and 1."),
        Cause("share_communication", times["exposed"] / (times["total"] or 1),
              "that is a share of the communication, not of the step", "Divide by trace.seconds."),
        Cause("all_time_without_computing", 1 - computed / seconds,
              "that is all the time without computing",
              "A rank can also be idle: count only where a collective is in flight."),
        Cause("subtracts_seconds_from_seconds", max(times["total"] - computed, 0) / seconds,
              "that subtracts seconds from seconds: right only if all computing overlapped",
              "Subtract intervals: lab.subtract(intervals, others)."),
        Cause("computing_without_communication", (computed - times["overlapped"]) / seconds,
              "that is the computing without communication",
              "The other way round: communication without computing."),
        Cause("overlaps_counted_twice",
              (sum(one.seconds for one in spans) - times["overlapped"]) / seconds,
              "that counts a moment twice where two collectives are in flight",
              "Unite the collectives first: lab.union.")]
    if kinds:
        return [*causes, Cause("counts_other_collectives_too", every["exposed"] / seconds,
                               "that counts other collectives too",
                               "Ask for one kind: trace.of(kind).")]
    return [*causes, Cause("leaves_out_all_reduce", two_kinds["exposed"] / seconds,
                           "that leaves out the all-reduce",
                           "Exposed is exposed, whatever the kind: trace.collectives.")]


@shows("5.1")
def show_shares(run: RecordedRun, communication_share: Callable) -> Picture:
    """Draws the share of the step in each kind of collective and in all, by rank, the exposed
    share, and the guess."""
    recorded_runs.require_usual({run.config.name: run})
    rows = []
    for trace in run:
        shares = _answer(communication_share(trace))
        rows += [Bar(f"rank {trace.rank}, {kind.replace('_', '-')}", shares[kind][0])
                 for kind in FSDP_KINDS]
        in_flight, exposed = shares[ALL]
        rows += [Bar(f"rank {trace.rank}, {ALL}", in_flight, guessed=guessed("5.1")),
                 Bar(f"rank {trace.rank}, {ALL}, exposed", exposed)]
    return bars(rows, "", "share of the recorded step (1: all of it)", lesson=(
        f"{rows[2].measured:.0%} of rank 0's step has a collective in flight, "
        f"{rows[3].measured:.0%} is exposed"))


@shows("5.1")
def show_seconds(run: RecordedRun) -> Table:
    """Returns a table of milliseconds by rank and kind: total, exposed, overlapped."""
    recorded_runs.require_usual({run.config.name: run})
    rows = []
    for trace in run:
        for kind in [kind for kind in KINDS if trace.of(kind)]:
            times = trace.seconds_of(kind)
            rows.append((trace.rank, kind, len(trace.of(kind)),
                         *(f"{1e3 * times[part]:.1f}" for part in
                           ("total", "exposed", "overlapped"))))
    return Table("milliseconds of the recorded step", ("rank", "kind", "calls", "total", "exposed",
                                                       "overlapped"), rows, left=1)
