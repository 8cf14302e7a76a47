"""Exercise 8.12: what its check must reject, with the words that must say why; and what it must
accept."""

import numpy as np
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

from labs.predictions.failures.replica_groups import kept_share as by_merging
from labs.surviving_failure.checks.kept_share import MISTAKES, Job, check_kept_share

right = definitions("08_surviving_failure").kept_share


def mistaken(number):
    def kept_share(groups, failures, wait, restart, end):
        return MISTAKES[number][0](Job(groups, tuple(failures), wait, restart, end))
    return kept_share


def other_way(change):
    def kept_share(groups, failures, wait, restart, end):
        return change(groups, failures, wait, restart, end)
    return kept_share


def never_empty(groups, failures, wait, restart, end):
    """Somebody always trains."""
    return max(right(groups, failures, wait, restart, end), 1 - 1 / groups)


def ignores_the_group(groups, failures, wait, restart, end):
    return right(groups, [(time, 0) for time, _ in failures], wait, restart, end)


def each_its_own(groups, failures, wait, restart, end):
    if groups < len(failures):
        return right(groups, failures, wait, restart, end)
    return right(groups, [(time, at) for at, (time, _) in enumerate(failures)], wait, restart, end)


def empties(groups, failures, wait, restart, end):
    found = right(groups, failures, wait, restart, end)
    failures.clear()
    return found


WRONG = {
    "nothing": (other_way(lambda *_: None), "nothing .None., not a number"),
    "one": (mistaken(0), "one failure: .*failures cost nothing"),
    "what is lost": (mistaken(1), "without a failure.*that is what is lost"),
    "percent": (mistaken(2), "that is in percent"),
    "seconds": (mistaken(3), "those are seconds"),
    "no wait": (mistaken(4), "one failure: .*the others go on at once"),
    "nobody missing": (mistaken(5), "one failure: .*the group is back after the wait"),
    "all restart": (mistaken(6), "all groups wait for the restart"),
    "one after the other": (mistaken(7), "the restart begins after the wait"),
    "a sum over failures": (mistaken(8), "missing at once: .*each failure costs the same"),
    "failures, not groups": (mistaken(9), "fails while it is missing: .*missing twice"),
    "first restart counts": (mistaken(10), "comes back as if it had not"),
    "beyond the end": (mistaken(11), "missing in the end: .*after the end counts"),
    "never empty": (never_empty, "you say"),
    "no group": (ignores_the_group, "two groups missing at once"),
    "each its own": (each_its_own, "a group that fails while it is missing"),
    "empties its list": (empties, "changed its list of failures"),
    "other arguments": (lambda groups, failures: 1, "restart"),
    "infinite": (other_way(lambda *_: float("inf")), "inf")}


def by_the_second(groups, failures, wait, restart, end):
    """Vectors over all pieces between two changes."""
    times = np.array([time for time, _ in failures], dtype=float)
    hit = np.array([group for _, group in failures], dtype=int)
    cuts = np.unique(np.clip(np.concatenate([[0, end], times, times + wait, times + restart]),
                             0, end))
    since = cuts[:-1, None] - times
    paused = ((since >= 0) & (since < wait)).any(1)
    missing = np.array([len(set(hit[row])) for row in (since >= 0) & (since < restart)])
    return (np.diff(cuts) * ~paused * (1 - missing / groups)).sum() / end


def by_events(groups, failures, wait, restart, end):
    """A clock that goes from event to event."""
    left, back, free, clock, work = list(failures), {}, 0.0, 0.0, 0.0
    while clock < end:
        waiting = [at for at in (free, *back.values()) if at > clock]
        until = min([end, *waiting, *(time for time, _ in left[:1])])
        if clock >= free:
            work += (until - clock) * (1 - sum(at > clock for at in back.values()) / groups)
        clock = until
        while left and left[0][0] <= clock:
            time, group = left.pop(0)
            free, back[group] = max(free, time + wait), time + restart
    return work / end


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    answer, words = WRONG[name]
    assert_rejected(check_kept_share(answer), words)


@pytest.mark.parametrize("answer", [right, by_merging, by_the_second, by_events])
def test_right(answer):
    assert check_kept_share(answer).passed


def test_one_that_is_not_filled_in_waits():
    assert_waits(check_kept_share, "8.12")
