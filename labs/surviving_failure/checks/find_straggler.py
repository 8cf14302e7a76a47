"""Exercise 8.11: which rank, or the link, makes all steps longer, and since when, from timings."""

import copy
from collections.abc import Callable
from statistics import median

from labs.exercises.generator import new_generator
from labs.exercises.numbers import as_number, require_several, require_signature
from labs.exercises.verdicts import Wrong, check, kind_of
from labs.surviving_failure.checks.straggler_jobs import CAUSES, Straggler, Timings, jobs
from labs.surviving_failure.crashes.slow_ranks import recorded_stragglers

NEAR = 2  # steps that the first slow one may be off by
_HINTS = {
    "compute": "Who computes longer than the other ranks in the same steps? It waits least; the "
               "others wait for it.",
    "data": "Who takes longer for its data than the others do, by a tenth of a step at least?",
    "link": "Nobody computes or loads longer, and all are in collectives longer than in the first "
            "ten steps. No rank can be named.",
    None: "A straggler makes every step longer by a tenth or more, from some step until the end. "
          "One slow step is none; and if all ranks compute longer alike, the job has changed."}


@check("8.11")
def check_find_straggler(find_straggler: Callable):
    """find_straggler(timings) -> (rank, cause, first slow step) or None; timings[rank][step]."""
    require_signature(find_straggler, ("timings",))
    dice = new_generator()
    synthetic = jobs(dice)
    for job in synthetic:
        _judge(find_straggler, job.timings(dice.random()), job.straggler if not job.recovers
               else None, str(job))
    recorded = {name: run for name, run in recorded_stragglers().items() if run.is_clear}
    for name, run in recorded.items():
        _judge(find_straggler, run.timings, run.straggler, f"recorded run {name!r}, {run}")
    return (f"{len(synthetic)} synthetic jobs on 2 to 16 ranks and {len(recorded)} recorded ones: "
            "the rank, the cause and the first slow step")


def _judge(find_straggler, timings: Timings, want: Straggler | None, what: str):
    given = copy.deepcopy(timings)
    got = _straggler(find_straggler(given), what)
    # Invariant: the caller goes on using its timings.
    if given != timings:
        raise Wrong(f"{what}: find_straggler changed its input `timings`", "Work on a copy.",
                    code="changes_input")
    if got is None and want is None:
        return
    if got is None:
        raise Wrong(f"{what}: you say None", _HINTS[want[1]], code="nothing_returned")
    rank, cause, since = got
    if want is None:
        raise Wrong(f"{what}: you say {_words(got)}, and there is no straggler", _HINTS[None],
                    code="no_straggler")
    if (rank, cause) != want[:2]:
        raise Wrong(f"{what}: you say {_words(got)}{_evidence(got, want, timings)}",
                    _HINTS[want[1]], code="wrong_straggler")
    if abs(since - want[2]) > NEAR:
        raise Wrong(f"{what}: {_words(got)} is right, but since step {want[2]}, not {since}",
                    "The first step from which on it stays slow. A single slow step before it is "
                    "none; the median of several steps leaves such a one out.", code="wrong_step")


def _straggler(returned, what) -> Straggler | None:
    if returned is None:
        return None
    rank, cause, since = require_several(returned, ("rank", "cause", "since"),
                                         f"{what}: find_straggler returned",
                                         hint="(rank, cause, first slow step), or None.")
    if cause not in CAUSES:
        raise Wrong(f"{what}: the cause is {cause!r}", f"One of {', '.join(map(repr, CAUSES))}.",
                    code="unknown_name")
    rank, since = (None if rank is None else as_number(rank)), as_number(since)
    if since is None or (rank is None and returned[0] is not None):
        raise Wrong(f"{what}: find_straggler returned {kind_of(returned[0])} and "
                    f"{kind_of(returned[2])} as rank and step", "Both are whole numbers.",
                    code="wrong_type")
    return rank, cause, since


def _words(found: Straggler) -> str:
    rank, cause, _ = found
    return f"{cause!r}" if rank is None else f"rank {rank}, {cause!r}"


def _evidence(got: Straggler, want: Straggler, timings: Timings) -> str:
    """What the timings say of the rank that was blamed."""
    rank, cause, _ = got
    if rank is None or not 0 <= rank < len(timings) or want[1] == "link":
        return ": its own part is as long as that of the others" * (want[1] == "link"
                                                                    and rank is not None)
    slow = [step.collectives for step in timings[want[0]][want[2]:]]
    blamed = [step.collectives for step in timings[rank][want[2]:]]
    if rank != want[0]:
        return (f": it is in collectives for {1e3 * median(blamed):.0f} ms of a step, and rank "
                f"{want[0]} for {1e3 * median(slow):.0f} ms. It waits for that one")
    return f": its {cause} is as long as that of the others"
