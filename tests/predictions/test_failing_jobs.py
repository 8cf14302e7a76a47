"""The event simulation of failures against cases by hand, closed forms and published optima."""

import itertools

import pytest

from labs.predictions.failures import reports
from labs.predictions.failures.intervals import (
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
    assert round(100 * (on_gpus - 148 + count) / total, 1) == reports.LLAMA_3_GPU_PERCENT
