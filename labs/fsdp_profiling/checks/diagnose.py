"""Exercise 5.8: the cause of a slow run, with its evidence."""

import functools
import random

from labs.exercises.numbers import as_number
from labs.exercises.verdicts import Verdict, Wrong, check
from labs.fsdp_profiling import recording
from labs.fsdp_profiling.checks.common import recorded, shortened
from labs.fsdp_profiling.recording import RecordedRun, TooNoisy
from labs.fsdp_profiling.scaffold import CAUSES, SlowRuns, config_with
from labs.meters import trace_units


@check("5.8")
def check_diagnose(diagnose):
    """diagnose(run, healthy): (cause, evidence) of a slow run, from the traces of its ranks."""
    once = recorded()
    _diagnosis(diagnose(list(once), list(once)))  # an exercise not filled in is known at once
    try:
        healthy, runs = record_causes()
    except TooNoisy as error:
        return Verdict("5.8", None, "cannot be judged now: this machine does too much else. Of a "
                       f"run that was recorded {recording.ROUNDS} times: {error}",
                       "Run the cell again when it has less to do.")
    for cause, run, how in runs:
        got, evidence = _diagnosis(diagnose(list(run), list(healthy)))
        # Each cause must be distinguished from all others, and a healthy run from all of them.
        if got != cause:
            raise Wrong(f"a run with {_called(cause)}{how} was taken for one with {_called(got)}",
                        _HINTS_ON_SECONDS.get(got) or _HINTS[cause])
        # The evidence must be of this run: a name alone could be guessed.
        if not is_evidence(cause, evidence, run, healthy):
            raise Wrong(f"{_called(cause)} was named, but {shortened(evidence, 70)} is no evidence "
                        "of it", f"The evidence is {CAUSES[cause]}. {_HINTS[cause]}")
    count = sum(not how for _, _, how in runs)
    return f"{count} runs recorded just now, each named with its evidence"


@functools.cache
def record_causes() -> tuple[RecordedRun, list[tuple[str, RecordedRun, str]]]:
    """Returns (healthy run, [(cause, run, how)]), recorded once in a process, with other sizes than
    those of `slow_runs`.

    A slow rank occurs twice, as first and as last rank. Causes that show in seconds occur also with
    as much timing noise as the notebook says (`how`). Raises TooNoisy.
    """
    sizes = recording.preset(layers=3, batch=3)
    wanted = [(cause, 0) for cause in CAUSES] + [("slow rank", sizes.ranks - 1)]
    random.shuffle(wanted)
    configs = [config_with(cause, sizes, f"check {number}", rank)
            for number, (cause, rank) in enumerate([("nothing", 0), *wanted])]
    healthy, *runs = recording.record_clearly(configs)
    for run in (healthy, *runs):
        if recording.contradiction(run):
            raise TooNoisy(recording.contradiction(run))
    named = [(cause, run, "") for (cause, _), run in zip(wanted, runs, strict=True)]
    return healthy, named + [(cause, recording.with_timing_noise(run), ", with timing noise,")
                             for cause, run, _ in named
                             if cause in ("nothing", "slow rank", "slow data loader")]


def judged_runs(diagnose, slow_runs: SlowRuns) -> list[tuple]:
    """Returns (letter, diagnosed cause, evidence, true cause, "✓" or what is wrong) of each run."""
    rows = []
    for letter, run in sorted(slow_runs.runs.items()):
        true = slow_runs.answers[letter]
        cause, evidence = _diagnosis(diagnose(list(run), list(slow_runs.healthy)))
        shown = cause == true and is_evidence(cause, evidence, run, slow_runs.healthy)
        verdict = "✓" if shown else "✗ evidence" if cause == true else "✗"
        rows.append((letter, cause, evidence, true, verdict))
    return rows


def is_evidence(cause: str, evidence, run: RecordedRun, healthy: RecordedRun) -> bool:
    """Whether `evidence` shows that a run has this cause."""
    return _IS_EVIDENCE[cause](evidence, run, healthy)


def _diagnosis(got) -> tuple:
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Wrong(f"diagnose returned {shortened(got, 70)}, not (cause, evidence)")
    if got[0] not in CAUSES:
        raise Wrong(f"{shortened(got[0], 70)} is none of the causes",
                    f"They are {', '.join(CAUSES)}.")
    return tuple(got)


def _called(cause) -> str:
    return {"nothing": "nothing wrong", "item": "an .item()", "no prefetch": "prefetch off",
            "slow data loader": "a slow data loader", "slow rank": "a slow rank"}.get(cause, cause)


_HINTS = {
    "nothing": "It is a healthy run, recorded again: its seconds differ from the other's, its "
               "calls do not.",
    "item": "Count the calls of .item() outside the optimizer, and compare with the healthy run.",
    "tiny units": "Count the all-gathers, and compare with the healthy run.",
    "one huge unit": "Count the all-gathers: fewer than in the healthy run.",
    "no prefetch": "Exercise 5.5 says which units came late.",
    "slow data loader": "Add up the labels that begin with enumerate(DataLoader).",
    "slow rank": "Compare the ranks' computing, lab.total_seconds(trace.compute): the others only "
                 "wait."}
_HINTS_ON_SECONDS = {
    "slow data loader": "A loader's label is so short that chance makes it many times as long: "
                        "compare it with its own step, not with the healthy run's.",
    "slow rank": "Seconds differ by chance, too, from run to run and from rank to rank: compare "
                 "the ranks of one run, and ask for a large factor."}


def _is_item_call(call, run, healthy) -> bool:
    """Whether the call lies where the fault is: in forward, after the last of the units' work. The
    optimizer and the model call .item() too."""
    for trace in run:
        if any(call is one or call == one for one in trace.item_calls):
            forward = trace.enclosing(call.begin, "labs::forward")
            in_unit = trace.enclosing(call.begin, "FSDP::") or [
                span for span in trace_units.unit_spans(trace)
                if span.begin <= call.begin <= span.end]
            later = [label for label in trace.labelled("FSDP::pre_forward")
                     if forward and call.begin < label.begin < forward[0].end]
            earlier = [label for label in trace.labelled("FSDP::post_forward")
                       if forward and forward[0].begin < label.begin < call.begin]
            return bool(forward and earlier) and not in_unit and not later
    return False


def _is_largest(one, run, healthy) -> bool:
    return any(one == other and one.bytes == max(c.bytes for c in trace.collectives)
               for trace in run for other in trace.collectives)


def _is_slow_loading(label, run, healthy) -> bool:
    usual = max(one.seconds for trace in healthy for one in trace.labelled("enumerate(DataLoader)"))
    return any(label == one and one.seconds > usual for trace in run
               for one in trace.labelled("enumerate(DataLoader)"))


_IS_EVIDENCE = {
    "nothing": lambda evidence, run, healthy: evidence is None,
    "item": _is_item_call,
    "tiny units": lambda count, run, healthy: as_number(count) in {
        len(trace.of("all_gather")) for trace in run},
    "one huge unit": _is_largest,
    "no prefetch": lambda unit, run, healthy: any(
        unit in trace_units.late_units(trace) for trace in run),
    "slow data loader": _is_slow_loading,
    "slow rank": lambda rank, run, healthy: as_number(rank) == run.config.slow_rank}
