"""Part 4 of notebook 06: reports read as runs, and what is drawn of them."""

import json
from dataclasses import replace

import pytest

import labs.scaling as lab
from labs.checks.verdicts import Wrong
from labs.meters.own_speed import OwnSpeed, measure_own_speed
from labs.predictions.hardware import GPUS
from labs.predictions.step_time.published_runs import ROWS
from labs.predictions.step_time.reported_runs import (
    efficiency_of,
    printed_mfu,
    reported_runs,
)
from labs.scaling import scaffold
from labs.training.presets import preset


def utilization(run):
    found = efficiency_of(run)
    return found.six_n, found.flops, found.mfu, found.hfu


# ---- reports


@pytest.mark.parametrize("name", list(reported_runs()))
def test_a_reports_mfu_is_the_printed_one(name):
    assert efficiency_of(reported_runs()[name]).mfu == pytest.approx(printed_mfu(name), rel=3e-3)


def test_hfu_is_the_printed_one_where_all_is_recomputed():
    rows = {row["id"]: row for row in json.loads(ROWS.read_text())["rows"]}
    for name, run in reported_runs().items():
        assert 100 * efficiency_of(run).hfu == pytest.approx(rows[name]["hfu"], rel=3e-3)


def test_data_sheets_are_the_table_of_gpus():
    for gpu in GPUS.values():
        assert gpu.sheet_tflops * 1e12 / (1 + gpu.sparse) == pytest.approx(gpu.flops, rel=1e-3)


def test_a_look_up_is_no_product():
    run = lab.reported_run("mosaic-096")
    assert efficiency_of(run).six_n == 6 * run.parameters  # tied: the matrix is the head's
    untied = efficiency_of(replace(run, tied=False))
    assert untied.six_n == 6 * (run.parameters - run.vocabulary * run.hidden)


def test_a_run_shows_students_no_answer():
    assert not {"mfu", "hfu", "flops", "six_n", "peak"} & set(dir(lab.reported_run("mosaic-096")))
    with pytest.raises(Wrong, match="no published run 'x'"):
        lab.reported_run("x")


# ---- pictures; the numbers are said in the notebook


def test_what_the_notebook_says_of_mfu_and_hfu():
    run = efficiency_of(lab.reported_run("mosaic-038"))
    assert (round(100 * run.hfu), round(100 * run.mfu)) == (54, 40)


def test_the_table_of_shares_has_slips_and_the_students_own_run():
    own = scaffold.as_run(OwnSpeed(preset("laptop"), 1_000_000, 1000.0, 5e10, "cpu"))
    table = lab.show_utilization(utilization, own)
    names, _, six_n, causal, halved, hfu, mfu, printed = zip(*table.rows, strict=True)
    assert names[-1].startswith("GPT-2 on one core of this machine") and printed[-1] == "–"
    for one, half in zip(mfu, halved, strict=True):
        assert float(half) == pytest.approx(float(one) / 2, abs=0.06)
    for one, other, least in zip(mfu, causal, six_n, strict=True):
        assert float(other) == pytest.approx((float(one) + float(least)) / 2, abs=0.11)
    assert (causal[4], mfu[4]) == ("22.3", "30.9")  # said in the notebook
    assert float(six_n[4]) < 0.5 * float(mfu[4])  # at 32k tokens attention is over half
    assert float(hfu[1]) == pytest.approx(4 / 3 * float(mfu[1]), abs=0.1)


def test_this_machines_run_is_measured(warm_launcher):
    speed = measure_own_speed(preset("laptop", layers=1, hidden=32, heads=1, ranks=1), rounds=2)
    assert speed.tokens_per_s > 0 and speed.flops_per_s > 1e8
    assert [metric.unit for metric in speed.metrics()] == ["tokens/s", "FLOP/s"]
    run = scaffold.as_run(speed)
    assert run.tied and run.gpus == 1 and 0 < efficiency_of(run).mfu < 1.5
