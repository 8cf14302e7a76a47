"""The event simulation of failures against cases by hand, closed forms and published optima."""

import itertools

import pytest

from labs.predictions.failures import reports
from labs.predictions.failures.intervals import (
    asynchronous_goodput,
    daly,
    daly_first,
    expected_goodput,
    expected_wall,
    job_mtbf,
    young,
)
from labs.predictions.failures.simulation import (
    best_interval,
    exponential_gaps,
    simulate,
    weibull_gaps,
)

MINUTES = {1440: 117, 360: 57, 15: 9.1}  # M -> optimum, with δ = 5 and R = 10: Daly, 2006


@pytest.mark.parametrize(("gaps", "wall", "lost", "restarting"), [
    ((), 66, 0, 0),
    ((30,), 79, 8, 5),  # 22 minutes are saved, 8 are lost
    ((43.5,), 92.5, 21.5, 5),  # during the second save
    ((30, 3), 82, 8, 8),  # during the restart, which begins anew
    ((22,), 71, 0, 5),  # when the first save has just ended
    ((66,), 66, 0, 0)])  # at the end
def test_by_hand(gaps, wall, lost, restarting):
    run = simulate(60, 20, 2, 5, gaps)
    assert (run.wall, run.lost, run.restarting) == (wall, lost, restarting)
    assert run.goodput == 60 / wall


def test_the_last_piece_is_shorter():
    assert simulate(50, 20, 2, 5, ()).wall == 56


@pytest.mark.parametrize(("mean", "published"), MINUTES.items())
def test_published_optima_are_found(mean, published):
    """By the closed form's least and by Daly's formula; the simulation's wall time is the closed
    form's within 1 % there."""
    best = best_interval(lambda interval: expected_wall(1, interval, 5, 10, mean), 1, 3 * mean)
    assert best == pytest.approx(published, abs=0.5 if published > 10 else 0.1)
    assert daly(mean, 5) == pytest.approx(best, rel=0.005)
    work = 8000 * best
    run = simulate(work, best, 5, 10, exponential_gaps(mean, seed=3))
    assert run.wall == pytest.approx(expected_wall(work, best, 5, 10, mean), rel=0.01)


def test_the_optimum_is_flat():
    over = [expected_wall(1, young(mean, 5), 5, 10, mean)
            / expected_wall(1, daly(mean, 5), 5, 10, mean) - 1 for mean in MINUTES]
    assert over == pytest.approx([0.0000, 0.0003, 0.028], abs=5e-4)


def test_failures_in_clusters_have_the_same_mean_and_cost_less():
    gaps = list(itertools.islice(weibull_gaps(60, 0.7, seed=1), 50_000))
    assert sum(gaps) / len(gaps) == pytest.approx(60, rel=0.02)
    clustered = simulate(60_000, 21, 5, 10, weibull_gaps(60, 0.5, seed=1))
    assert clustered.wall < 0.95 * simulate(60_000, 21, 5, 10, exponential_gaps(60, seed=1)).wall


def test_formulas():
    assert daly_first(360, 5) == young(360, 5) - 5
    assert daly(2, 5) == 2  # a save longer than twice the time between failures
    assert expected_goodput(57, 5, 10, 360) == pytest.approx(1 / expected_wall(1, 57, 5, 10, 360))
    assert job_mtbf(16_384, 50_677) == pytest.approx(3.093, abs=1e-3)


def kept_beside_computing(interval, write, restart, gaps):
    """The share that a job keeps which writes in the background: snapshots follow each other every
    `interval`, and each is safe `write` later."""
    kept = time = 0.0
    runs = True  # else it restarts, and a failure begins that again
    for gap in gaps:
        time += gap if runs else min(gap, restart)
        if not runs and gap > restart:
            runs, gap = True, gap - restart
            time += gap
        if runs:
            kept += interval * max(0, (gap - write) // interval)
            runs = False
    return kept / time


@pytest.mark.parametrize(("interval", "write", "mean"), [(5, 5, 60), (20, 5, 60), (10, 9, 15)])
def test_a_job_that_computes_while_it_saves_keeps_what_a_simulation_keeps(interval, write, mean):
    gaps = itertools.islice(exponential_gaps(mean, seed=5), 100_000)
    found = kept_beside_computing(interval, write, 10, gaps)
    assert asynchronous_goodput(interval, write, 10, mean) == pytest.approx(found, rel=0.01)


def test_a_write_that_takes_no_time_is_a_save_that_takes_none():
    found = asynchronous_goodput(20, 0, 10, 60)
    assert found == pytest.approx(expected_goodput(20, 0, 10, 60))
    assert asynchronous_goodput(20, 5, 10, 60) > expected_goodput(20, 5, 10, 60)


def test_the_rate_of_hosts_is_metas_projection_and_not_its_measurement():
    """Notebook 08's numbers: 6.5 failures in 1,000 days of a host of 8 GPUs (arXiv 2410.21680)."""
    measured, projected = (rate for rate in reports.RATES if "Meta" in rate.name)
    by_hosts = {rate.gpus: 24 / (6.5 / 1000 * rate.gpus / 8) for rate in (measured, projected)}
    assert by_hosts[projected.gpus] == pytest.approx(projected.mtbf_hours, rel=0.01)
    assert by_hosts[measured.gpus] == pytest.approx(28.8, abs=0.1)
    per_gpu = [rate.gpus * rate.mtbf_hours for rate in (measured, projected)]
    assert per_gpu[1] / per_gpu[0] == pytest.approx(3.6, abs=0.1)


def test_llama_3s_table():
    """The counts add up; one printed percentage does not follow from its count, and what it would
    be explains the text's share of GPUs."""
    total = reports.LLAMA_3_TOTAL
    assert sum(cause.count for cause in reports.LLAMA_3) == total
    wrong = [cause for cause in reports.LLAMA_3
             if abs(100 * cause.count / total - cause.percent) > 0.051]
    assert [cause.name for cause in wrong] == ["Faulty GPU"]
    on_gpus = sum(cause.count for cause in reports.LLAMA_3 if cause.is_gpu)
    assert round(100 * on_gpus / total, 1) == 64.0
    count = round(wrong[0].percent * total / 100)
    assert count == 126
    assert round(100 * (on_gpus - 148 + count) / total, 1) == reports.LLAMA_3_ON_GPUS
