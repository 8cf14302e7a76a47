"""Exercise 5.1: the share of the step in which an all-gather, or a reduce-scatter, is in flight."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from labs.checks.guesses import guessed
from labs.checks.numbers import Cause, judge_number
from labs.checks.verdicts import Wrong, check, shows
from labs.fsdp_profiling import recorded_runs, synthetic_traces
from labs.fsdp_profiling.recorded_runs import RecordedRun
from labs.fsdp_profiling.shared_recording import by_rank, recorded, shortened
from labs.meters.trace import Trace, total_seconds, union
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import Picture

FSDP_KINDS = ("all_gather", "reduce_scatter")
HINTS = {
    "cannot unpack non-iterable": "lab.total_seconds and lab.subtract take intervals: lab.union "
                                  "makes them from spans."}


@check("5.1", device=None, hints=HINTS)
def check_communication_share(communication_share):
    """communication_share(trace): kind -> share of the steps with such a collective in flight."""
    for name, trace in traces().items():
        got = communication_share(trace)
        if not isinstance(got, Mapping) or set(got) != set(FSDP_KINDS):
            raise Wrong(f"communication_share returned {shortened(got)}, not a share for each of "
                        f"{' and '.join(FSDP_KINDS)}", 'A dictionary: {"all_gather": 0.2, ...}',
                        code="wrong_type")
        for kind in FSDP_KINDS:
            # A share is the time with at least one collective in flight, from begin to end, by the
            # time of all recorded steps.
            want = total_seconds(union(trace.of(kind))) / trace.seconds
            judge_number(got[kind], want, _causes(want, trace, trace.of(kind)),
                         f"trace {name!r}, {kind}: the share")
    return ("the shares are right on synthetic traces, and on every rank of a run recorded just "
            "now")


def traces() -> dict[str, Trace]:
    """Returns the traces that exercises 5.1 and 5.2 are judged by."""
    return {**synthetic_traces.for_shares(), **by_rank(recorded())}


def _causes(want, trace, spans) -> list[Cause]:
    """Each gives another number than the right one on at least one synthetic trace."""
    if not spans:
        return []
    # The right share, back in seconds.
    seconds = want * trace.seconds
    # From the call to the end, as if a collective were in flight while it waits in a queue.
    from_call = [replace(span, begin=span.issued) for span in spans]
    return [
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


@shows("5.1")
def show_shares(run: RecordedRun, communication_share: Callable) -> Picture:
    """Draws the share of the step in each kind of collective, by rank, and the guess."""
    recorded_runs.require_usual({run.config.name: run})
    rows = []
    for trace in run:
        shares = communication_share(trace)
        rows += [Bar(f"rank {trace.rank}, {kind.replace('_', '-')}", share)
                 for kind, share in shares.items()]
        both = total_seconds(union(trace.of(*shares))) / trace.seconds  # a moment counts once
        rows.append(Bar(f"rank {trace.rank}, both", both, guessed=guessed("5.1")))
    return bars(rows, "", "of the recorded step")
