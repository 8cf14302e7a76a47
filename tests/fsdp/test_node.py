"""The billion-parameter lab of notebook 04: its sizes follow from the card, and its whole path runs
on CPU ranks at a small size."""

import sys
from dataclasses import replace
from functools import partial

import cloudpickle
import pytest
from _build.definitions import ROOT, definitions

import labs.fsdp as lab
from labs import launch
from labs.checks.verdicts import Verdict
from labs.fsdp import node_charts, node_jobs, node_run, scaling_costs
from labs.fsdp.node_jobs import (
    Node,
    StepSeconds,
    communication_seconds,
    copied_bytes,
    planned,
    step_seconds,
    training_run,
)
from labs.fsdp.node_run import Measured
from labs.predictions import hardware
from labs.predictions.plans.answer import Answer
from labs.training import presets
from labs.training.presets import preset
from labs.workers import cuda, devices
from labs.workers.failures import LaunchError, RanksStuck

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
# A small card, and models in the shape of the two: widths and context are small.
CARD = replace(hardware.gpu("A100-80"), name="small", usable=21e6)
SMALL = {"billion": {"layers": 3, "hidden": 64, "heads": 4, "context": 128, "batch": 2},
         "larger": {"layers": 1, "hidden": 256, "heads": 4, "context": 32, "batch": 1}}
NAMES = ["DDP", "FSDP", "FSDP1", "FSDP, bf16", "larger, FSDP", "… + checkpointing",
         "… + CPU offload"]


@pytest.fixture(scope="module")
def solution():
    return definitions("04_fsdp", PRESET=preset("laptop"))


@pytest.fixture(scope="module")
def strategies(solution):
    return {name: getattr(solution, name)
            for name in ("shard", "mixed", "checkpointed", "offloaded", "fsdp1")}


@pytest.fixture
def small(monkeypatch):
    """Presets of a node whose card is small."""
    for name, sizes in SMALL.items():
        monkeypatch.setitem(presets.PRESETS, name, replace(presets.PRESETS[name], **sizes))


def all_jobs(card, ranks, strategies):
    return (node_jobs.jobs_for(card, ranks, strategies)
            + node_jobs.scaling_jobs(ranks, strategies["checkpointed"]))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name, ranks", [
    ("A10", 8), pytest.param("A100-40", 2, marks=pytest.mark.slow), ("A100-80", 8),
    pytest.param("B200", 8, marks=pytest.mark.slow)])
def test_ddp_cannot_hold_what_fsdp_holds_on_every_card(name, ranks, strategies):
    card = hardware.gpu(name)
    ddp, *others = all_jobs(card, ranks, strategies)
    assert node_jobs.predicted_peak(ddp).total > card.usable
    for job in others:
        peak = node_jobs.predicted_peak(job).total
        assert peak + hardware.overhead(ranks) < card.usable, job.name
    larger = next(job for job in others if job.name.startswith("larger"))
    assert 16 * larger.parameters > card.usable  # DDP's states alone
    assert ddp.parameters == pytest.approx(1.01e9, rel=0.01)


@pytest.mark.slow
def test_all_rows_take_less_than_ten_minutes_on_a100s(strategies):
    """Said in the notebook: about 4 minutes, predicted."""
    card = hardware.gpu("A100-80")
    rows = [node_run.Row(job, None, step_seconds(job, Node(card)))
            for job in all_jobs(card, 8, strategies)]
    assert node_run.predicted_minutes(rows) == pytest.approx(4, abs=0.5)
    assert min(row.seconds for row in rows) > 0.05


def test_without_gpus_the_billion_is_predicted(solution, strategies, capsys):
    """What the notebook says: its states in the text above the table, and in the Notice what each
    form saves of 8 GPUs."""
    run = lab.billion_parameters(*strategies.values())
    table, steps = lab.show_node_table(run), lab.show_node_steps(run)
    chart = lab.show_node_chart(run)
    assert "On A100-80 with 85.1 GB" in table.title and "Predicted only" in table.note
    assert [row[0] for row in table.rows] == NAMES + [
        f"checkpointed, {n}" for n in ("1 GPU", "2 GPUs", "4 GPUs", "8 GPUs")]
    assert not any("measured" in name for name in [*table.head, *steps.head])
    assert "DDP: peak of a rank: out of memory, needs 87.8 GB" in repr(chart)
    assert "FSDP: peak of a rank predicted 73.6 GB" in repr(chart)
    held = {row[0]: row[4] for row in table.rows}
    text = " ".join((ROOT / "solutions/04_fsdp.py").read_text().replace("#", "").split())
    assert f"from {held['DDP']} GB to {held['FSDP']}" in text
    assert (f"checkpointing reduces {held['larger, FSDP']} GB to {held['… + checkpointing']}"
            in text)
    assert float(held["FSDP, bf16"]) == pytest.approx(float(held["FSDP"]) / 2, rel=0.03)
    parts = {row[0]: row[1:5] for row in steps.rows}
    assert f"exposes {parts['FSDP'][1]} ms instead of {parts['DDP'][1]} ms" in text
    assert f"saves {int(parts['DDP'][2]) - int(parts['FSDP'][2])} ms" in text
    step = {row.job.name: row.step for row in run.rows}
    checkpointed, offloaded = step["… + checkpointing"], step["… + CPU offload"]
    more = checkpointed.computing / step["larger, FSDP"].computing - 1
    assert f"Checkpointing computes {more:.0%} more".replace("%", " %") in text
    assert f"{offloaded.total / checkpointed.total - 1:.0%} longer".replace("%", " %") in text
    ddp = Answer(*planned(run.rows[0].job, Node(run.card)))
    low, middle, high = (f"{1e3 * seconds:,.0f}" for seconds in (
        ddp.seconds_factors.low * ddp.seconds.total, ddp.seconds.total,
        ddp.seconds_factors.high * ddp.seconds.total))
    assert steps.rows[0][5] == f"{middle} ({low}–{high})"
    assert offloaded.host == pytest.approx(  # the root's copies alone are not hidden
        80 * 5.44e9 / (409.6e9 * 0.87), rel=0.01)
    assert f"the work of {8 * node_charts.efficiency(run, run.rows[-1]):.1f}" in text
    one, *_, eight = run.scaling
    for row, (gpus, tokens, seconds) in ((one, scaling_costs.ONE_GPU),
                                         (eight, scaling_costs.EIGHT_GPUS)):
        assert (row.job.size.ranks, row.job.size.tokens, round(row.seconds, 3)) == (
            gpus, tokens, seconds)
    copies, adamw = solution.offload(5.44e9, 8, pcie=32e9, host=410e9)
    assert copies / adamw == pytest.approx(1 / 4, abs=0.02)  # "a quarter of AdamW's time"
    states = 4 * 4 * 1.01e9
    assert (round(states / 1e9, 1), round(states / 8e9, 1)) == (16.2, 2.0)
    sizes = preset("billion")
    assert (sizes.layers, sizes.hidden) == (20, 2048)


@pytest.mark.parametrize("place", [
    pytest.param(place, marks=[pytest.mark.slow] * (place in (2, 3, 4)))
    for place in range(len(NAMES))], ids=NAMES)
def test_a_rank_alone_holds_what_is_predicted(place, strategies, small):
    """DDP's batch is left small: here it has all the machine's memory."""
    job = node_jobs.jobs_for(CARD, 4, strategies)[place]
    job = replace(job, size=replace(job.size, batch=2))
    if job.offload:
        pytest.skip("on a CPU there is no other memory to which it could be offloaded")
    [found] = launch(node_run.run_alone, job, ranks=1, device="cpu", quiet=True)
    assert found.peak == pytest.approx(node_jobs.predicted_peak(job, "cpu").total, rel=1e-4)
    assert found.seconds == []


@pytest.mark.parametrize("name", ["DDP", pytest.param("FSDP1", marks=pytest.mark.slow),
                                  pytest.param("… + CPU offload", marks=pytest.mark.slow)])
def test_ranks_train_a_job_and_time_it(name, strategies, small):
    """The others' strategies are those of the notebook's checks."""
    job = node_jobs.jobs_for(CARD, 2, strategies)[NAMES.index(name)]
    job = replace(job, size=replace(job.size, batch=1))
    found = node_run.measure(job)
    assert found.peak > 0 and not found.failure
    assert node_run.FEWEST <= len(found.seconds) <= node_run.MOST and min(found.seconds) > 0


def node_of(gpus, monkeypatch):
    """CPU ranks in the place of so many GPUs of the small card."""
    monkeypatch.setattr(cuda, "count", lambda: gpus)
    monkeypatch.setattr(node_run, "launch", partial(launch, device="cpu"))
    monkeypatch.setattr(node_run, "find_card", lambda: (CARD, gpus if gpus > 1 else 8))


def test_a_node_measures_every_row_and_one_that_fails_is_a_row(strategies, small, monkeypatch,
                                                                capsys):
    node_of(2, monkeypatch)
    measure = node_run.measure

    def measured(job, alone):
        return (Measured(failure="out of memory") if job.name == "DDP" else
                Measured(5_000_000, [0.5, 0.4, 0.6], copied=2_000_000_000, pinned=10**9)
                if job.name != "larger, FSDP" else measure(job, alone))

    monkeypatch.setattr(node_run, "measure", measured)
    run = lab.billion_parameters(*strategies.values())
    table, steps = lab.show_node_table(run), lab.show_node_steps(run)
    rows = {row[0]: row for row in steps.rows}
    assert list(rows) == [*NAMES, "checkpointed, 1 GPU", "checkpointed, 2 GPUs"]
    assert table.rows[0][5] == "out of memory" and rows["DDP"][6:] == ("–", "")
    assert float(rows["larger, FSDP"][6].split()[0].replace(",", "")) > 0
    assert rows["FSDP"][6].startswith("500 (") and rows["checkpointed, 1 GPU"][7] == "100%"
    # twice the tokens in the same time
    assert rows["checkpointed, 2 GPUs"][7].startswith("100% (predicted ")
    assert "Measured on 2 GPUs" in table.note
    note = steps.note
    assert "2000.0 measured, with 1000.0 MB of pinned memory" in note
    assert "reaches 100% of the tokens/s of the row above" in note
    words = repr(lab.show_node_chart(run))
    assert "DDP: peak of a rank: out of memory" in words and "FSDP: peak" in words
    assert "a step predicted" in words.splitlines()[1]  # of DDP, which ran out of memory
    assert "a step predicted" not in words.splitlines()[2]


@pytest.mark.slow
def test_one_gpu_runs_one_rank_alone_and_says_what_that_is_not(strategies, small, monkeypatch,
                                                                capsys):
    node_of(1, monkeypatch)
    measure = node_run.measure
    monkeypatch.setattr(node_run, "measure", lambda job, alone: measure(job, alone)
                        if job.name == "FSDP" else Measured(failure="out of memory"))
    run = lab.billion_parameters(*strategies.values())
    table = lab.show_node_table(run)
    assert "rank 0 of each job in a fake process group" in table.note and "no loss" in table.note
    assert float(table.rows[1][5]) >= 0
    assert lab.show_node_steps(run).rows[1][6:] == ("–", "")
    assert lab.show_node_chart(run).png().startswith(b"\x89PNG")


def steps_on(name, strategies):
    """Name of a job -> its predicted step on 8 such GPUs."""
    card = hardware.gpu(name)
    return {job.name: step_seconds(job, Node(card)) for job in all_jobs(card, 8, strategies)}


@pytest.mark.parametrize("name", ["A10", "A100-80", "H100"])
def test_the_planner_gives_the_labs_answer(name, strategies):
    """One function stands behind both: the same seconds, in other groups."""
    node = Node(hardware.gpu(name))
    for job in all_jobs(node.card, 8, strategies):
        own, answer = step_seconds(job, node), Answer(*planned(job, node)).seconds
        assert own.total == pytest.approx(answer.total)
        assert own.communication == pytest.approx(answer.sharding + answer.all_reduce)
        run = training_run(job, node)
        assert (run.fp32, run.param_bytes) == ((True, 4) if job.recipe == "fp32" else (False, 2))
        assert (run.offload, run.recompute) == (job.offload, job.checkpointing)


@pytest.mark.parametrize("name", ["A10", "A100-80", "H100"])
def test_scaling_sharding_checkpointing_and_offload_cost_something(name, strategies):
    """The lesson of the lab; the old prediction said 100 %, and nothing for offload."""
    steps = steps_on(name, strategies)
    per_gpu = [steps[f"checkpointed, {n}"].total for n in ("1 GPU", "2 GPUs", "4 GPUs", "8 GPUs")]
    assert per_gpu == sorted(per_gpu) and per_gpu[1] > 1.02 * per_gpu[0]
    assert steps["FSDP"].communication > 1.4 * steps["DDP"].communication
    assert steps["FSDP"].optimizer == pytest.approx(steps["DDP"].optimizer / 8)
    checkpointed, offloaded = steps["… + checkpointing"], steps["… + CPU offload"]
    assert 1.2 < checkpointed.computing / steps["larger, FSDP"].computing < 4 / 3
    assert offloaded.total > 1.2 * checkpointed.total and offloaded.optimizer == 0


def test_fsdp_is_slower_than_ddp_where_the_link_is_slow(strategies):
    """On NVLink AdamW on a shard saves about what FSDP's communication costs, as the text says."""
    steps = steps_on("A10", strategies)
    assert steps["FSDP"].total > 1.1 * steps["DDP"].total
    steps = steps_on("A100-80", strategies)
    assert steps["FSDP"].total == pytest.approx(steps["DDP"].total, rel=0.01)


def test_fsdp_sends_one_and_a_half_times_what_ddp_sends(strategies):
    card = hardware.gpu("A100-80")
    ddp, fsdp = node_jobs.jobs_for(card, 8, strategies)[:2]
    seconds = [communication_seconds(job, Node(card)) for job in (ddp, fsdp)]
    assert seconds[1] / seconds[0] == pytest.approx(1.5, rel=0.06)  # and a latency for each unit


def test_offload_copies_layers_three_times_and_the_root_twice(strategies):
    card = hardware.gpu("A100-80")
    job = node_jobs.jobs_for(card, 8, strategies)[-1]
    run = training_run(job, Node(card))
    assert copied_bytes(run) == pytest.approx(3 * 4 * job.parameters / 8, rel=0.01)
    assert step_seconds(job, Node(card)).copied == copied_bytes(run)
    assert copied_bytes(replace(run, offload=False)) == 0


def test_a_rows_loss_is_named_by_the_part_that_grew_most():
    def row(ranks, *seconds):
        job = node_jobs.NodeJob(f"{ranks}", None, preset("billion", ranks=ranks))
        return node_run.Row(job, None, StepSeconds(*seconds))

    rows = [row(1, 1.0, 0.0, 0.5, 0.0), row(2, 1.0, 0.2, 0.25, 0.0), row(4, 1.0, 0.1, 0.1, 0.3),
            row(8, 0.9, 0.0, 0.1, 0.0)]
    run = node_run.NodeRun(CARD, 8, "predicted", rows, rows)
    assert [node_charts.lost_to(run, row) for row in rows] == [
        "", ", exposed 200 ms", ", host 300 ms", ""]


def test_efficiency_counts_from_the_fewest_gpus_that_ran():
    sizes = [preset("billion", ranks=n) for n in (1, 2, 4)]
    rows = [node_run.Row(node_jobs.NodeJob(f"{size.ranks}", None, size), None,
                         StepSeconds(1.0, 0, 0, 0), measured)
            for size, measured in zip(sizes, (Measured(failure="out of memory"),
                                              Measured(9, [1.0]), Measured(9, [1.25])),
                                      strict=True)]
    run = node_run.NodeRun(CARD, 4, "measured", rows, rows)
    assert [node_charts.efficiency(run, row) for row in rows] == [None, 1, 0.8]
    assert node_charts.base_of(run) == 2


def test_a_row_that_takes_too_long_or_too_much_of_the_host_is_a_row(strategies, small, monkeypatch):
    job = node_jobs.jobs_for(CARD, 2, strategies)[-1]
    monkeypatch.setattr(node_run, "host_memory", lambda: 10**6)
    assert node_run.measure(job).failure == "the host has only 0 GB"
    stuck = RanksStuck("not done after 100 s", [], "That is the timeout=100 of this launch.",
                       code="timed_out")
    monkeypatch.setattr(node_run, "host_memory", lambda: 10**12)
    monkeypatch.setattr(node_run, "launch", raising(stuck))
    assert node_run.measure(job).failure == "stopped after 100 s"
    monkeypatch.setattr(node_run, "launch", raising(
        RanksStuck("rank 1 waits", [], code="no_progress")))
    with pytest.raises(RanksStuck, match="rank 1 waits"):
        node_run.measure(job)


def raising(error):
    def launch(*_, **__):
        raise error

    return launch


def test_a_failure_is_called_by_the_labs_title(strategies, monkeypatch, capsys):
    monkeypatch.setattr(node_run, "find_card", raising(LaunchError("the ranks failed")))
    verdict = lab.billion_parameters(*strategies.values())
    assert isinstance(verdict, Verdict) and verdict.exercise == "Training a billion parameters"
    assert all(shown(verdict) is verdict
               for shown in (lab.show_node_table, lab.show_node_steps, lab.show_node_chart))


@pytest.mark.gpu
def test_the_card_is_found():
    card, ranks = node_run.find_card()
    assert card.usable > 1e9 and ranks == (cuda.count() if cuda.count() > 1 else 8)


@pytest.mark.gpu
@pytest.mark.slow
def test_a_rank_alone_on_a_gpu_holds_what_is_predicted(strategies):
    size = preset("billion", ranks=8, layers=4, hidden=512, heads=8)
    for job in node_jobs.jobs_for(hardware.gpu("A100-80"), 8, strategies):
        job = replace(job, size=size)
        [found] = launch(node_run.run_alone, job, ranks=1, quiet=True)
        assert found.peak == pytest.approx(node_jobs.predicted_peak(job).total, rel=0.1), job.name


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(devices.gpus() < 2, reason="needs two GPUs")
def test_a_node_measures_what_it_predicts(strategies):
    run = lab.billion_parameters(*strategies.values())
    assert run.rows[0].measured.failure == "out of memory"
    for row in run.rows[1:]:
        assert row.measured.seconds, row.job.name
        assert row.measured.peak == pytest.approx(row.peak.total, rel=0.15), row.job.name


def test_the_students_prices_are_a_table_and_an_empty_answer_waits():
    def efficiency(few, many):
        return many[1] / many[2] / many[0] / (few[1] / few[2] / few[0])

    def ratio(psi, ranks, tokens, flops, link):
        return 12 * psi * (ranks - 1) / ranks / link * flops / (6 * psi * tokens)

    def unwritten(*_, **__):
        raise NotImplementedError("Exercise 4.11")

    table = lab.show_scaling_costs(efficiency, ratio, lambda psi, ranks, pcie, host: (
        12 * psi / ranks / pcie, 80 * psi / host))
    assert [row[1] for row in table.rows] == ["94.9%", "0.222 s", "0.255 s", "1.061 s"]
    assert "waiting" in repr(lab.show_scaling_costs(unwritten, unwritten, unwritten))
