"""What the check of exercise 8.9 must reject, and what it must accept."""

import pytest
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.surviving_failure as lab
from labs.surviving_failure import save_plan as plans

right = definitions("08_surviving_failure")
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


WRONG = [
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
RIGHT = [planned(best), simulated]
@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_save_plan(answer), expected)


@pytest.mark.parametrize("answer", RIGHT)
def test_right(answer):
    verdict = lab.check_save_plan(answer)
    assert verdict.passed is True, str(verdict)


def test_unfilled():
    assert_waits(lab.check_save_plan, "8.9")
