"""The billion-parameter lab's steps on CPU ranks, at the pace of a node that is slowed down."""

import sys
from dataclasses import replace

import cloudpickle
import pytest
from _build.definitions import definitions

import labs.fsdp as lab
from labs.fsdp import node_charts, node_jobs, node_run, paced_run, slowed_node
from labs.fsdp.node_jobs import StepSeconds, step_seconds, training_run
from labs.fsdp.node_run import Measured
from labs.fsdp.slowed_node import NodeLink, OnLink
from labs.predictions.step_time.computation import layer_times
from labs.training.presets import preset

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")


@pytest.fixture(scope="module")
def solution():
    return definitions("04_fsdp", PRESET=preset("laptop"))


@pytest.fixture(scope="module")
def node(solution):
    return lab.slow_down(solution.shard)


# ---- the slowed node


def test_a_block_takes_the_stated_time_and_collectives_their_share_of_computing(node, solution):
    small = node_jobs.NodeJob("FSDP", solution.shard, paced_run.size_of())
    forward, backward = layer_times(training_run(small, node.slowed), node.slowed.constants)
    assert forward.total == pytest.approx(paced_run.BLOCK)
    assert backward.total == pytest.approx(2 * paced_run.BLOCK, rel=0.01)
    real, slow = node.ratios
    assert slow == pytest.approx(real, rel=1e-3) and 0.1 < real < 0.2
    table = lab.show_pace(node)
    factors = [row[3] for row in table.rows]
    assert len(set(factors[1:5])) == 1 and factors[0] != factors[1]  # all bytes by one factor
    assert table.rows[-1][1:3] == (f"{real:.3f} s", f"{real:.3f} s")


def test_the_slowed_node_teaches_the_lesson_of_the_real_one(node, solution):
    steps = {job.name: step_seconds(job, node.slowed) for job in
             [*paced_run.laptop_jobs(solution.shard, solution.checkpointed, solution.offloaded),
              *paced_run.scaled_jobs(solution.checkpointed)]}
    assert steps["FSDP"].communication > 1.4 * steps["DDP"].communication
    larger, checkpointed, offloaded = (steps[name] for name in (
        "larger, FSDP", "… + checkpointing", "… + CPU offload"))
    assert 1.2 < checkpointed.computing / larger.computing < 4 / 3
    assert offloaded.total > 1.3 * checkpointed.total
    per_rank = [steps[f"checkpointed, {n}"].total for n in ("1 rank", "2 ranks", "4 ranks")]
    assert per_rank == sorted(per_rank) and per_rank[2] > 1.03 * per_rank[0]


def test_a_block_that_is_too_short_is_refused(solution):
    with pytest.raises(ValueError, match="1e-06 s for a block are too few"):
        lab.slow_down(solution.shard, 1e-6)


def test_ddp_could_never_hold_the_larger_model(solution):
    from labs.fsdp.memory_limits import CPU_LIMIT

    ddp, fsdp, larger, checkpointed, offloaded = paced_run.laptop_jobs(
        solution.shard, solution.checkpointed, solution.offloaded)
    assert paced_run.predicted_peak(ddp).total > CPU_LIMIT
    assert 16 * larger.parameters > CPU_LIMIT > 16 * fsdp.parameters
    peaks = [paced_run.predicted_peak(job).total for job in (larger, checkpointed, offloaded)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] < 0.6 * CPU_LIMIT


# ---- the link and the pace, by a clock that only sleeping moves


class Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(slowed_node, "time", clock)
    monkeypatch.setattr(slowed_node, "time", clock)
    return clock


def test_copies_come_before_a_gather_and_after_a_reduction(clock):
    link = NodeLink(bytes_per_second=100.0, latency=0.5, pcie=25.0)
    assert link.seconds("all_gather", 400, 4) == 0.5 + 3 + 4  # 300 bytes sent, 100 copied
    assert link.seconds("reduce_scatter", 400, 4) == 7.5
    assert list(link.carried) == [OnLink("all_gather", 104, 107.5),
                                  OnLink("reduce_scatter", 107.5, 111)]
    assert link.free == [115]
    assert link.busy(105, 109) == 4 and link.busy(0, 104) == 0
    clock.now = 110
    assert link.ended() == link.ended("all_gather") == 107.5
    assert link.ended("reduce_scatter") == 0


def test_one_rank_sends_nothing(clock):
    assert NodeLink(1.0, 0.5).seconds("all_gather", 400, 1) == 0


def test_a_device_computes_one_thing_after_the_other(clock):
    rank = slowed_node.Pace(NodeLink(), 0.0)
    rank.begin(2)
    clock.now += 0.5  # the CPU's own work is part of it
    rank.begin(1)
    assert clock.now == 102
    rank.finish()
    assert clock.now == 103


def test_who_fell_behind_catches_up(clock):
    link = NodeLink(bytes_per_second=100.0)
    rank = slowed_node.Pace(link, 0.0)
    rank.begin(2)
    clock.now += 3  # the CPU needed more than the device
    assert link.seconds("all_gather", 100, 2) == 0.5
    assert link.carried[-1].begin == 102  # when the device had computed
    rank.begin(2, "all_gather")  # begins at 102.5, when its parameters were there
    rank.finish()
    assert clock.now == 104.5


def test_a_block_waits_for_its_gather_alone(clock):
    link = NodeLink(bytes_per_second=100.0)
    rank = slowed_node.Pace(link, 0.0)
    link.seconds("reduce_scatter", 100, 2)
    clock.now += 1
    rank.begin(2, "all_gather")
    rank.finish()
    assert clock.now == 102


def test_communication_makes_longer_what_is_computed_beside_it(clock):
    link = NodeLink(bytes_per_second=100.0)
    rank = slowed_node.Pace(link, 0.5)
    rank.begin(2)
    link.seconds("all_gather", 200, 2)
    rank.finish()
    assert clock.now == 102.5


# ---- on ranks


@pytest.mark.parametrize("place", [
    pytest.param(place, marks=[pytest.mark.slow] * (place in (2, 3))) for place in range(5)])
def test_a_job_holds_what_is_predicted_and_ddp_runs_out(place, solution, monkeypatch):
    monkeypatch.setattr(paced_run, "WARM_UP", 1)
    node = lab.slow_down(solution.shard, 0.012)
    job = paced_run.laptop_jobs(solution.shard, solution.checkpointed, solution.offloaded)[place]
    found = paced_run.measure(job, node.slowed, 47e6)
    if job.name == "DDP":
        assert found == Measured(failure="out of memory")
    else:
        assert found.peak == pytest.approx(paced_run.predicted_peak(job).total,
                                           rel=0.12 if job.offload else 0.005)
        assert len(found.seconds) == paced_run.STEPS and min(found.seconds) > 0


def test_where_gpus_have_measured_nothing_is_run_again(node, solution):
    billion = node_run.NodeRun(node.real.card, 2, "measured", [], [])
    assert lab.laptop_steps(node, billion, solution.shard, solution.checkpointed,
                            solution.offloaded) is billion


def test_a_system_without_limits_says_so(node, solution, monkeypatch):
    monkeypatch.setattr(paced_run.memory_limits, "can_limit", lambda: False)
    ddp = paced_run.laptop_jobs(solution.shard, solution.checkpointed, solution.offloaded)[0]
    assert "this system limits no process" in paced_run.measure(ddp, node.slowed, 47e6).failure


def paced(solution, node, slower=1.0):
    """A run of which each step took `slower` times what is predicted."""
    chosen = paced_run.laptop_jobs(solution.shard, solution.checkpointed, solution.offloaded)
    scaled = paced_run.scaled_jobs(solution.checkpointed)
    rows = [node_run.Row(job, paced_run.predicted_peak(job), step, Measured(
        int(paced_run.predicted_peak(job).total), [slower * step.total] * 3))
        for job in chosen + scaled for step in [step_seconds(job, node.slowed)]]
    rows[0] = replace(rows[0], measured=Measured(failure="out of memory"))
    card = replace(node.slowed.card, usable=47e6)
    return node_run.NodeRun(card, 4, "paced", rows, rows[5:])


def test_the_tables_and_the_chart_lay_the_prediction_beside_it(solution, node):
    run = paced(solution, node, 1.05)
    table, steps = lab.show_node_table(run), lab.show_node_steps(run)
    chart = lab.show_node_chart(run)
    assert table.title.startswith("A rank with 47.0 MB: a GPT-2 with 2.53 million parameters")
    assert table.rows[0][4:] == ("51.3", "out of memory")
    assert "Measured on 4 ranks of a CPU" in table.note
    rows = {row[0]: row for row in steps.rows}
    assert rows["FSDP"][6].endswith(" (-5 %)") and "(" not in rows["FSDP"][5]
    assert rows["checkpointed, 1 rank"][7] == "100%"
    assert rows["checkpointed, 4 ranks"][7].startswith("95% (predicted 95%, exposed ")
    assert "reaches 66% of the tokens/s" in steps.note and "busy" not in steps.note
    words = repr(chart)
    assert "DDP: peak of a rank: out of memory, needs 51.3 MB" in words
    assert "ms per token and 10⁶ Ψ" in words and "predicted" in words.splitlines()[1]


def test_a_busy_machine_is_named(solution, node):
    assert "run the cell again" in lab.show_node_steps(paced(solution, node, 1.4)).note
    assert node_charts.BUSY < 1 / 3


def test_parts_of_a_step_are_named_as_the_charts_have_them():
    assert tuple(StepSeconds(1, 2, 3, 4).by_name()) == node_charts.PARTS
