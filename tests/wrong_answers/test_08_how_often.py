"""Exercises 8.7 to 8.9: what their checks must reject, with the words that must say why; and what
they must accept."""

import heapq
import itertools
import math

import numpy as np
import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.surviving_failure as lab
from labs.surviving_failure import save_plan as plans
from labs.surviving_failure import wall_time as walls

right = definitions("08_surviving_failure")
WRONG, RIGHT = {}, {}


# 8.7 wall_time


def job_of(work, interval, save, restart, gaps):
    return walls.Job(work, interval, save, restart, tuple(itertools.islice(gaps, 500)))


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


WRONG[lab.check_wall_time] = [
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
RIGHT[lab.check_wall_time] = [event_heap, in_numpy]


# 8.8 misprint


WRONG[lab.check_misprint] = [
    (lambda causes, total: None, "wrong_count nothing"),
    (lambda causes, total: "Faulty GPU", "wrong_count"),
    (lambda causes, total: ("Faulty GPU", 35.3, 126), "unknown_name"),
    (lambda causes, total: (0, 30.1, 126), "wrong_type"),
    (lambda causes, total: ("Software bug", 12.9, 54), "wrong_row"),
    (lambda causes, total: (right.misprint(causes, total)[0], 30.1, 126), "printed"),
    (lambda causes, total: (right.misprint(causes, total)[0],
                            right.misprint(causes, total)[1] / 100, 126), "fraction"),
    (lambda causes, total: (*right.misprint(causes, total)[:2], 148),
     "count_printed"),
    (lambda causes, total: right.misprint(causes, sum(each.count for each in causes)),
     "sum_counts|wrong_row")]
RIGHT[lab.check_misprint] = [
    lambda causes, total: [*right.misprint(causes, total)],
    lambda causes, total: (right.misprint(causes, total)[0],
                           round(right.misprint(causes, total)[1], 1),
                           round(right.misprint(causes, total)[2]))]


# 8.9 save_plan


def planned(interval, goodput=None):
    """interval and goodput, each of a Cluster (and the interval)."""
    def save_plan(*numbers):
        cluster = plans.Cluster(*numbers)
        at = interval(cluster)
        kept = goodput(cluster, at) if goodput else cluster.goodput(min(at, 50 * cluster.mtbf))
        return {"interval": at, "goodput": kept}

    return lambda gpus, gpu_hours, checkpoint_bytes, bandwidth, restart: save_plan(
        gpus, gpu_hours, checkpoint_bytes, bandwidth, restart)


def best(cluster):
    return lab.daly(cluster.mtbf, cluster.save)


def mtbf_in_hours(gpus, gpu_hours, checkpoint_bytes, bandwidth, restart):
    mtbf, save = gpu_hours / gpus, checkpoint_bytes / bandwidth
    interval = lab.daly(mtbf, save)
    wall = lab.expected_wall(interval, interval, save, restart, mtbf)
    return {"interval": interval, "goodput": interval / wall}


def simulated(gpus, gpu_hours, checkpoint_bytes, bandwidth, restart):
    mtbf, save = 3600 * gpu_hours / gpus, checkpoint_bytes / bandwidth
    interval = lab.daly(mtbf, save)
    work = max(20_000 * mtbf, 50 * interval)
    wall = right.wall_time(work, interval, save, restart, lab.exponential_gaps(mtbf, seed=3))
    return {"interval": interval, "goodput": work / wall}


WRONG[lab.check_save_plan] = [
    (lambda gpus, gpu_hours, checkpoint_bytes, bandwidth, restart: None, "not_a_dictionary"),
    (lambda gpus, gpu_hours, checkpoint_bytes, bandwidth, restart: {"interval": 1}, "wrong_keys"),
    (planned(lambda job: 0.0, lambda *_: 0.9), "not_positive"),
    *((planned(mistake), sentence) for mistake, sentence in zip(
        (mistake.number for mistake in plans.MISTAKES),
        ("for_failures_one_gpu", "hours_where_seconds_belong", "factor_2_missing",
         "half_time_between_two_failures",
         "time_between_two_failures", "young_formula", "young_less_save",
         "restart_for_save", "every_3_hours_whatever_job"), strict=True)),
    (planned(best, lambda job, at: at / (at + job.save)), "failures_cost_nothing"),
    (planned(best, lambda job, at: 1 - (at / 2 + job.restart) / job.mtbf), "saving_costs_nothing"),
    (planned(best, lambda job, at: 1 / (1 + job.save / at + (at / 2 + job.restart) / job.mtbf)),
     "first_order"),
    (planned(best, lambda job, at: 1 - job.save / at - (at / 2 + job.restart) / job.mtbf),
     "first_order"),
    (mtbf_in_hours, "overflow"),
    (planned(best, lambda job, at: 1 / job.goodput(at)), "wall_time_over_work"),
    (planned(best, lambda job, at: 100 * job.goodput(at)), "in_percent")]
RIGHT[lab.check_save_plan] = [planned(best), simulated]

CASES = [pytest.param(check, answer, words, id=f"{check.__name__}-{at}")
         for check, answers in WRONG.items() for at, (answer, words) in enumerate(answers)]


@pytest.mark.parametrize(("check", "answer", "words"), CASES)
def test_wrong_answers(check, answer, words):
    verdict = check(answer)
    print(verdict)
    assert_rejected(verdict, words)


@pytest.mark.parametrize(("check", "answer"), [(check, answer) for check, answers in RIGHT.items()
                                               for answer in answers])
def test_right_answers(check, answer):
    assert check(answer).passed


@pytest.mark.parametrize(("check", "exercise"), [
    (lab.check_wall_time, "8.7"), (lab.check_misprint, "8.8"), (lab.check_save_plan, "8.9")])
def test_unfilled(check, exercise):
    assert_waits(check, exercise)


def test_recursion():
    """As good as a loop until a job is long: then Python's limit shows."""
    assert_rejected(lab.check_wall_time(by_recursion), "raised_RecursionError")
