"""Exercise 8.12: what its check must reject, with the words that must say why; and what it must
accept."""

import numpy as np
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

from labs.predictions.failures.replica_groups import replica_goodput as by_merging
from labs.surviving_failure.replica_goodput import MISTAKES, Case, check_replica_goodput

right = definitions("08_surviving_failure").replica_goodput


def mistaken(number):
    def replica_goodput(groups, failures, wait, restart, end):
        return MISTAKES[number].number(Case(groups, tuple(failures), wait, restart, end))
    return replica_goodput


def other_way(change):
    def replica_goodput(groups, failures, wait, restart, end):
        return change(groups, failures, wait, restart, end)
    return replica_goodput


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
    "nothing": (other_way(lambda *_: None), "not_a_number nothing"),
    "one": (mistaken(0), "failures_cost_nothing"),
    "what is lost": (mistaken(1), "lost"),
    "percent": (mistaken(2), "in_percent"),
    "seconds": (mistaken(3), "seconds"),
    "no wait": (mistaken(4), "others_go_on_once"),
    "nobody missing": (mistaken(5), "group_back_after_wait"),
    "all restart": (mistaken(6), "all_groups_wait_for_restart"),
    "one after the other": (mistaken(7), "restart_begins_after_wait"),
    "a sum over failures": (mistaken(8), "failure_costs_same"),
    "failures, not groups": (mistaken(9), "group_fails_twice_missing_twice"),
    "first restart counts": (mistaken(10), "group_fails_while_missing_comes"),
    "beyond the end": (mistaken(11), "lost_after_end_counts"),
    "never empty": (never_empty, "wrong_number"),
    "no group": (ignores_the_group, "wrong_number once"),
    "each its own": (each_its_own, "wrong_number fails"),
    "empties its list": (empties, "changes_input"),
    "other arguments": (lambda groups, failures: 1, "wrong_signature"),
    "infinite": (other_way(lambda *_: float("inf")), "not_a_number inf")}


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
    assert_rejected(check_replica_goodput(answer), words)


@pytest.mark.parametrize("answer", [right, by_merging, by_the_second, by_events])
def test_right(answer):
    assert check_replica_goodput(answer).passed


def test_one_that_is_not_filled_in_waits():
    assert_waits(check_replica_goodput, "8.12")
