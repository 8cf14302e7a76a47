"""What the check of exercise 8.7 must reject, and what it must accept."""

import heapq
import itertools
import math

import numpy as np
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.surviving_failure as lab
from labs.surviving_failure import wall_time as walls

right = definitions("08_surviving_failure")
# 8.7 wall_time


def job_of(work, interval, save, restart, gaps):
    return walls.Case(work, interval, save, restart, tuple(itertools.islice(gaps, 500)))


def mistaken(number):
    def wall_time(work, interval, save, restart, gaps):
        return walls.MISTAKES[number].number(job_of(work, interval, save, restart, gaps))
    return wall_time


def closed_form(work, interval, save, restart, gaps):
    gaps = list(itertools.islice(gaps, 100)) or [1e9]
    return lab.expected_wall(work, interval, save, restart, sum(gaps) / len(gaps))


def half_interval(work, interval, save, restart, gaps):
    pieces = math.ceil(work / interval)
    wall, failures = work + pieces * save, 0
    for end in itertools.accumulate(gaps):
        if end > wall:
            break
        failures += 1
        wall += interval / 2 + restart
    return wall


def reads_all(work, interval, save, restart, gaps):
    return right.wall_time(work, interval, save, restart, list(gaps))


def gaps_run_out(work, interval, save, restart, gaps):
    gaps, clock, done, waiting = iter(gaps), 0.0, 0.0, 0.0
    left = next(gaps)
    while done < work:
        piece = min(interval, work - done)
        if waiting + piece + save <= left:
            clock, left = clock + waiting + piece + save, left - waiting - piece - save
            done, waiting = done + piece, 0.0
        else:
            clock, waiting, left = clock + left, restart, next(gaps)
    return clock


def by_recursion(work, interval, save, restart, gaps):
    gaps = iter(gaps)

    def finish(done, waiting, left):
        if done >= work:
            return 0.0
        piece = min(interval, work - done)
        needed = waiting + piece + save
        if needed <= left:
            return needed + finish(done + piece, 0.0, left - needed)
        return left + finish(done, restart, next(gaps, math.inf))

    return finish(0.0, 0.0, next(gaps, math.inf))


def event_heap(work, interval, save, restart, gaps):
    gaps, done, number = iter(gaps), 0.0, 0
    events = [(min(interval, work) + save, 0, 0)]  # (when, 0: saved or 1: failed, attempt)
    heapq.heappush(events, (next(gaps, math.inf), 1, 0))
    while True:
        clock, failed, attempt = heapq.heappop(events)
        if failed:
            number, begins = number + 1, clock + restart
            heapq.heappush(events, (clock + next(gaps, math.inf), 1, 0))
        elif attempt != number:
            continue
        else:
            done, begins = done + min(interval, work - done), clock
            if done >= work:
                return clock
        heapq.heappush(events, (begins + min(interval, work - done) + save, 0, number))


def in_numpy(*job):
    return np.float64(right.wall_time(*job))


WRONG = [
    (lambda work, interval, save, restart, gaps: None, "not_a_number"),
    (lambda work, interval: work, "wrong_signature"),
    (mistaken(0), "work_alone"), (mistaken(1), "failures_cost_nothing"),
    (mistaken(2), "last_piece_not_saved"),
    (mistaken(3), "last_piece_long_others"),
    (mistaken(4), "restarts_take_no_time"), (mistaken(5), "first_start_takes_restart"),
    (mistaken(6), "failure_undoes_takes_no_time"),
    (mistaken(7), "failure_costs_half_interval"),
    (mistaken(8), "piece_counts_although_failure_came"),
    (mistaken(9), "computed_before_failure_kept"),
    (mistaken(10), "no_failure_comes_during_restart"),
    (mistaken(11), "time_next_failure_begins_when"),
    (mistaken(12), "time_next_failure_starts_anew"),
    (closed_form, "wrong_number"), (half_interval, "wrong_number"), (reads_all, "endless_list"),
    (gaps_run_out, "raised_StopIteration")]
RIGHT = [event_heap, in_numpy]
@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_wall_time(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_wall_time(answer)
    assert verdict.passed is True, str(verdict)


def test_unfilled():
    assert_waits(lab.check_wall_time, "8.7")


def test_recursion():
    """As good as a loop until a job is long: then Python's limit shows."""
    assert_rejected(lab.check_wall_time(by_recursion), "raised_RecursionError")
