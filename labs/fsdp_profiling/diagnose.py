"""Exercise 5.8: the cause of a slow run, with its evidence."""

import functools
from collections.abc import Callable
from dataclasses import replace

from labs.checks.generator import is_graded, new_generator
from labs.checks.numbers import as_number
from labs.checks.verdicts import Verdict, Wrong, check, shows
from labs.fsdp_profiling import recorded_runs
from labs.fsdp_profiling.recorded_runs import RecordedRun, TooNoisy
from labs.fsdp_profiling.scaffold import CAUSES, SlowRuns, config_with
from labs.fsdp_profiling.shared_recording import as_pair, recorded, shortened
from labs.meters import trace_units
from labs.meters.trace import Trace
from labs.meters.trace_events import kernel_name
from labs.pictures import timelines, widgets
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.workers import devices


@check("5.8", device=None)
def check_diagnose(diagnose):
    """diagnose(run, healthy): (cause, evidence) of a slow run, from the traces of its ranks."""
    once = recorded()
    _diagnosis(diagnose(list(once), list(once)))  # an exercise not filled in is known at once
    try:
        healthy, runs = record_causes()
    except TooNoisy as error:
        return Verdict("5.8", None, "cannot be judged now: this machine does too much else. Of a "
                       f"run that was recorded {recorded_runs.ROUNDS} times: {error}",
                       "Run the cell again when it has less to do.")
    # The healthy run first: a rule that takes it for another is wrong, whatever else it finds.
    for cause, run, how in sorted(runs, key=lambda row: row[0] != "nothing"):
        # Plain lists: a RecordedRun's `config` says which fault it has.
        got, evidence = _diagnosis(diagnose(list(run), list(healthy)))
        # Each cause must be distinguished from all others, and a healthy run from all of them.
        if got != cause:
            # Where points are given, the right cause is not said, nor the hint that belongs to it.
            run_of = "another cause" if is_graded() else f"{_called(cause)}{how}"
            raise Wrong(f"a run with {run_of} was taken for one with {_called(got)}",
                        _HINTS_IF_NAMED.get(got) or ("" if is_graded() else _HINTS[cause]),
                        code="wrong_diagnosis")
        # The evidence must be of this run: a name alone could be guessed.
        if not is_evidence(cause, evidence, run, healthy):
            if cause == "nothing":
                raise Wrong(f"a healthy run was named so, with {shortened(evidence, 70)} as "
                            "evidence: there is none", 'Return ("nothing", None).',
                            code="evidence_of_nothing")
            raise Wrong(f"{_called(cause)} was named, but {shortened(evidence, 70)} is no evidence "
                        "of it", f"The evidence is {CAUSES[cause]}. {_HINTS[cause]}",
                        code="no_evidence")
    count = sum(not how for _, _, how in runs)
    return f"{count} runs recorded just now, each named with its evidence"


def record_causes() -> tuple[RecordedRun, list[tuple[str, RecordedRun, str]]]:
    """Returns (healthy run, [(cause, run, how)]), recorded once in a process for each choice of the
    device, with other sizes than those of `slow_runs`.

    A slow rank occurs twice, as first and as last rank. Causes that show in seconds occur also with
    as much timing noise as the notebook says (`how`). Raises TooNoisy.
    """
    return _record_causes(devices.gpus())


@functools.cache
def _record_causes(gpus) -> tuple:
    sizes = recorded_runs.preset(layers=3, batch=3)
    wanted = [(cause, 0) for cause in CAUSES] + [("slow rank", sizes.ranks - 1)]
    # The files are numbered: in a fixed order their names would tell the cause.
    new_generator().shuffle(wanted)
    configs = [config_with(cause, sizes, f"check {number}", rank)
            for number, (cause, rank) in enumerate([("nothing", 0), *wanted])]
    healthy, *runs = recorded_runs.record_clearly(configs)
    for run in (healthy, *runs):
        if recorded_runs.contradiction(run):
            raise TooNoisy(recorded_runs.contradiction(run))
    named = [(cause, run, "") for (cause, _), run in zip(wanted, runs, strict=True)]
    return healthy, named + [(cause, with_timing_noise(run), ", with timing noise,")
                             for cause, run, _ in named
                             if cause in ("nothing", "slow rank", "slow data loader")]


def with_timing_noise(run: RecordedRun) -> RecordedRun:
    """Returns a copy with as much noise as does not yet contradict the fault: how long the ranks
    compute and the data loaders take is a tenth away from the margins."""
    fault = run.config.fault
    ratio = 1.1 * recorded_runs.SLOW_RATIO if fault == "rank" else 0.9 * recorded_runs.HEALTHY_RATIO
    loading = (1.1 * recorded_runs.LONG_LOADING if fault == "data"
               else 0.9 * recorded_runs.SHORT_LOADING)
    busy, slow = recorded_runs.compute_seconds(run), run.config.slow_rank
    # Not longer than recorded: the slow rank's computing is shortened, never invented.
    longest = min(busy[slow], ratio * min(busy[:slow] + busy[slow + 1:]))
    return RecordedRun(
        [_scaled(trace, (longest if rank == slow else longest / ratio) / busy[rank], loading)
         for rank, trace in enumerate(run)], run.config)


def _scaled(trace, factor, loading) -> Trace:
    """The trace with `factor` times its computing, and a data loader that takes `loading` of the
    step."""
    loader = trace.labelled("enumerate(DataLoader)")[0]
    other = replace(loader, end=loader.begin + loading * trace.seconds)
    return replace(
        trace, labels=tuple(other if label == loader else label for label in trace.labels),
        compute=tuple((begin, begin + factor * (end - begin)) for begin, end in trace.compute))


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
    pair = as_pair(got)
    if pair is None:
        raise Wrong(f"diagnose returned {shortened(got, 70)}, not (cause, evidence)",
                    code="wrong_type")
    if not isinstance(pair[0], str) or pair[0] not in CAUSES:
        raise Wrong(f"{shortened(pair[0], 70)} is none of the causes",
                    f"They are {', '.join(CAUSES)}.", code="unknown_name")
    return pair


def _called(cause) -> str:
    return {"nothing": "nothing wrong", "item": "an .item()", "no prefetch": "prefetch off",
            "slow data loader": "a slow data loader", "slow rank": "a slow rank"}.get(cause, cause)


_HINTS = {
    "nothing": "It is a healthy run, recorded again: its seconds differ from the other's, its "
               "calls do not.",
    "item": "Count the calls of .item() outside the optimizer, and compare with the healthy run. "
            "The model has calls of its own, at the beginning of forward.",
    "tiny units": "Count the all-gathers, and compare with the healthy run.",
    "one huge unit": "Count the all-gathers: fewer than in the healthy run.",
    "no prefetch": "Exercise 5.5 says which units came late.",
    "slow data loader": "Add up the labels that begin with enumerate(DataLoader).",
    "slow rank": "Compare the ranks' computing, lab.total_seconds(trace.compute): the others only "
                 "wait."}
_HINTS_IF_NAMED = {  # of a cause that the run does not have
    "slow data loader": "A loader's label is so short that chance makes it many times as long: "
                        "compare it with its own step, not with the healthy run's.",
    "slow rank": "Seconds differ by chance, too, from run to run and from rank to rank: compare "
                 "the ranks of one run, and ask for a large factor.",
    "tiny units": 'Count trace.of("all_gather") alone, not all collectives: tiny units have more '
                  "than the healthy run.",
    "item": "Compare the number of calls outside the optimizer with the healthy run's: the model "
            "makes some itself, at the beginning of forward."}


def _is_item_call(call, run, healthy) -> bool:
    """Whether the call reads the answer of a collective that is not FSDP's: that is the fault. The
    optimizer and the model call .item() too."""
    for trace in run:
        # The fault issues an all-reduce of its own, and then reads it: the first .item() after the
        # call.
        asked = [one.issued for one in trace.collectives if not trace_units.owner(trace, one).unit]
        reads = [min((item for item in trace.item_calls if item.begin >= at),
                     key=lambda item: item.begin, default=None) for at in asked]
        if any(call is one or call == one for one in reads if one is not None):
            return True
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


@shows("Six slow runs")
def explore_slow_runs(slow_runs: SlowRuns) -> widgets.Controls:
    """Draws the slow run chosen from a menu; without a live kernel, the first one."""
    recorded_runs.require_usual({f"run {letter}": run for letter, run in slow_runs.runs.items()})

    def picture(run):
        return timelines.by_rank({f"run {run}": list(slow_runs.runs[run])})

    letters = sorted(slow_runs.runs)
    choice = widgets.Choice("run", "run", [(letter, letter) for letter in letters], letters[0],
                            "menu")
    return widgets.Controls([choice], picture)


@shows("5.8")
def show_diagnoses(slow_runs: SlowRuns, diagnose: Callable) -> Table:
    """Returns a table of what `diagnose` says of each run, and its true cause."""
    rows = [(letter, cause, _described(evidence), *rest) for letter, cause, evidence, *rest in
            judged_runs(diagnose, slow_runs)]
    return Table("diagnoses", ("run", "diagnosed", "evidence", "cause", ""), rows, left=3)


def _described(evidence) -> str:
    if not hasattr(evidence, "seconds"):
        return str(evidence)
    size = f", {evidence.bytes / 1e6:.1f} MB" if getattr(evidence, "bytes", 0) else ""
    return (f"{kernel_name(evidence.name.split('#')[0])} at {1e3 * evidence.begin:.0f} ms, for "
            f"{1e3 * evidence.seconds:.1f} ms{size}")


@shows("A slow rank")
def show_waiting(slow_runs: SlowRuns) -> Picture:
    """Draws all ranks of the run with the slow rank."""
    [letter] = [letter for letter, cause in slow_runs.answers.items() if cause == "slow rank"]
    recorded_runs.require_usual({f"run {letter}": slow_runs.runs[letter]})
    return timelines.by_rank({f"run {letter}": list(slow_runs.runs[letter])})
