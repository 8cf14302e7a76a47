"""Slow runs: each with one cause planted, recorded afresh, and the check that wants the cause named
with its evidence."""

import functools
import random
from dataclasses import dataclass

from labs.exercises.verdicts import Verdict, Wrong, check
from labs.fsdp_profiling import calm, recording
from labs.fsdp_profiling.recording import Job
from labs.fsdp_profiling.share_checks import recorded
from labs.meters import trace_units as units

CAUSES = {
    "nothing": "None",
    "item": "one of trace.item_calls: a call that the healthy run does not have",
    "tiny units": "how many all-gathers one rank's step has",
    "one huge unit": "the collective that carries most",
    "no prefetch": "the name of a unit that was gathered late",
    "slow data loader": "one of the data loader's labels that took long",
    "slow rank": "its number"}
"""Cause -> the evidence that goes with it."""
_PLANTED = {
    "nothing": {}, "item": {"fault": "item"}, "tiny units": {"units": "layers"},
    "one huge unit": {"units": "model"}, "no prefetch": {"prefetch": "off"},
    "slow data loader": {"fault": "data"}, "slow rank": {"fault": "rank"}}


@dataclass(frozen=True)
class Patients:
    """healthy: the traces of a run with nothing wrong. runs: letter -> traces with one cause in
    them; which, `answers` knows."""

    healthy: list
    runs: dict
    answers: dict

    def __repr__(self):
        lines = [f"run {letter}, {traces[0]}" for letter, traces in self.runs.items()]
        return "\n".join([*lines, self.runs["A"].files])


def patients(seed: int = 0) -> Patients:
    """A healthy run and one for each cause, in an order that `seed` decides, recorded now. The
    files are called as the runs are."""
    dice = random.Random(seed)
    causes = list(CAUSES)[1:]
    dice.shuffle(causes)
    sizes, letters = recording.preset(), "ABCDEFGH"[:len(causes)]
    jobs = [_job(cause, sizes, f"run {letter}", dice.randrange(sizes.ranks))
            for letter, cause in zip(letters, causes, strict=True)]
    healthy, *rest = calm.record_all([_job("nothing", sizes, "beside the slow runs"), *jobs])
    return Patients(healthy, dict(zip(letters, rest, strict=True)),
                    dict(zip(letters, causes, strict=True)))


def _job(cause, sizes, name, slow_rank: int = 0) -> Job:
    return Job(sizes, name, slow_rank=slow_rank, **_PLANTED[cause])


@functools.cache
def recorded_afresh() -> tuple:
    """(healthy traces, [(cause, traces, how)]), with other sizes than those of `patients`; recorded
    once in a process. A slow rank is there twice, first and last; what is told by seconds also as
    chance could have made it. Raises TooBusy."""
    sizes = recording.preset(layers=3, batch=3)
    wanted = [(cause, 0) for cause in CAUSES] + [("slow rank", sizes.ranks - 1)]
    random.shuffle(wanted)
    jobs = [_job(cause, sizes, f"check {number}", rank)
            for number, (cause, rank) in enumerate([("nothing", 0), *wanted])]
    healthy, *runs = calm.record_all(jobs)
    for run in (healthy, *runs):
        if calm.disturbed(run):
            raise calm.TooBusy(calm.disturbed(run))
    named = [(cause, run, "") for (cause, _), run in zip(wanted, runs, strict=True)]
    return healthy, named + [(cause, calm.by_chance(run), ", as chance could have made it,")
                             for cause, run, _ in named
                             if cause in ("nothing", "slow rank", "slow data loader")]


@check("5.8")
def check_diagnose(diagnose):
    """diagnose(run, healthy): (cause, evidence) of a slow run, from the traces of its ranks."""
    once = recorded()
    _named(diagnose(list(once), list(once)))  # says in a moment what is not filled in yet
    try:
        healthy, runs = recorded_afresh()
    except calm.TooBusy as error:
        return Verdict("5.8", None, f"cannot be judged now: this machine does too much else. Of a "
                       f"run that was recorded {calm.ROUNDS} times: {error}",
                       "Run the cell again when it has less to do.")
    for cause, run, how in runs:
        got, evidence = _named(diagnose(list(run), list(healthy)))
        if got != cause:
            raise Wrong(f"a run with {_called(cause)}{how} was taken for one with {_called(got)}",
                        _BY_SECONDS.get(got) or _HINTS[cause])
        if not is_evidence(cause, evidence, run, healthy):
            raise Wrong(f"{_called(cause)} was named, but {_short(evidence)} is no evidence of it",
                        f"The evidence is {CAUSES[cause]}. {_HINTS[cause]}")
    fresh = sum(not how for _, _, how in runs)
    return f"{fresh} runs recorded just now, each named with its evidence"


def _named(got) -> tuple:
    if not isinstance(got, tuple | list) or len(got) != 2:
        raise Wrong(f"diagnose returned {_short(got)}, not (cause, evidence)")
    if got[0] not in CAUSES:
        raise Wrong(f"{_short(got[0])} is none of the causes", f"They are {', '.join(CAUSES)}.")
    return tuple(got)


def is_evidence(cause, evidence, run, healthy) -> bool:
    """Whether this shows that this is the cause."""
    return _JUDGES[cause](evidence, run, healthy)


def diagnosed(diagnose, patients) -> list:
    """(letter, cause, evidence, planted cause, "✓" or what is wrong) of each of the slow runs."""
    rows = []
    for letter, run in sorted(patients.runs.items()):
        planted = patients.answers[letter]
        cause, evidence = _named(diagnose(list(run), list(patients.healthy)))
        shown = cause == planted and is_evidence(cause, evidence, run, patients.healthy)
        verdict = "✓" if shown else "✗ evidence" if cause == planted else "✗"
        rows.append((letter, cause, evidence, planted, verdict))
    return rows


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
    "slow rank": "Compare the ranks' computing, lab.total_seconds(trace.compute): the "
                 "others only wait."}
_BY_SECONDS = {
    "slow data loader": "A loader's label is so short that chance makes it many times as long: "
                        "compare it with its own step, not with the healthy run's.",
    "slow rank": "Seconds differ by chance, too, from run to run and from rank to rank: compare "
                 "the ranks of one run, and ask for a large factor."}


def _short(value) -> str:
    words = " ".join(repr(value).split())
    return words if len(words) <= 70 else words[:69] + "…"


def _whole(value):
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _is_planted_item(item, run, healthy) -> bool:
    """Read after the model's own forward has ended, before backward: where the fault is planted."""
    for trace in run:
        if any(item is one or item == one for one in trace.item_calls):
            around = trace.enclosing(item.begin, "labs::forward")
            inside = trace.enclosing(item.begin, "FSDP::") or [
                span for span in units.unit_spans(trace) if span.begin <= item.begin <= span.end]
            later = [label for label in trace.labelled("FSDP::pre_forward")
                     if around and item.begin < label.begin < around[0].end]
            ended = [label for label in trace.labelled("FSDP::post_forward")
                     if around and around[0].begin < label.begin < item.begin]
            return bool(around and ended) and not inside and not later
    return False


def _is_count(count, run, healthy) -> bool:
    return _whole(count) in {len(trace.of("all_gather")) for trace in run}


def _is_largest(one, run, healthy) -> bool:
    return any(one == other and one.bytes == max(c.bytes for c in trace.collectives)
               for trace in run for other in trace.collectives)


def _is_late(unit, run, healthy) -> bool:
    return any(unit in units.late_units(trace) for trace in run)


def _is_slow_loading(label, run, healthy) -> bool:
    usual = max(one.seconds for trace in healthy for one in trace.labelled("enumerate(DataLoader)"))
    return any(label == one and one.seconds > usual for trace in run
               for one in trace.labelled("enumerate(DataLoader)"))


def _is_slow_rank(number, run, healthy) -> bool:
    return _whole(number) == run.job.slow_rank


_JUDGES = {"nothing": lambda evidence, run, healthy: evidence is None, "item": _is_planted_item,
           "tiny units": _is_count, "one huge unit": _is_largest, "no prefetch": _is_late,
           "slow data loader": _is_slow_loading, "slow rank": _is_slow_rank}
