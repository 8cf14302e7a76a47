"""Part 2 of notebook 06: what is measured and recorded shows what the notebook says of it."""

from dataclasses import replace

import pytest

import labs.scaling as lab
from labs.checks.verdicts import Verdict
from labs.meters import lost_time, typical_step
from labs.meters.trace import Span, union
from labs.meters.trace_clock import on_one_axis, shifted, without_loading
from labs.scaling import lost_time_runs, lost_time_traces, scaling_runs
from labs.scaling.attribute_overhead import recorded_runs
from labs.training.presets import preset
from labs.workers import devices

pytestmark = pytest.mark.usefixtures("warm_launcher")
TINY = preset("laptop", layers=2, hidden=64, heads=2, context=32, batch=2)


def efficiency(ranks, throughput, alone):
    return throughput / (ranks * alone)


@pytest.fixture(scope="module")
def recorded():
    """Runs that the check records once, too."""
    return recorded_runs(devices.gpus())


# ---- weak and strong scaling


def test_each_number_of_ranks_is_measured(monkeypatch):
    monkeypatch.setattr(scaling_runs, "TRIES", 1)
    found = scaling_runs.measure_scaling(TINY, rounds=1)
    counts, own = scaling_runs.rank_counts()
    assert list(found.weak) == list(found.strong) == counts and found.own == own
    assert found.weak[1] == found.strong[1]  # the same run
    assert all(rate > 0 for rate in [*found.weak.values(), *found.strong.values()])
    assert found.preset.batch % counts[-1] == 0
    picture = lab.show_scaling(found)
    assert [metric.value for metric in picture.metrics() if "efficiency" in metric.name] == [
        efficiency(n, rates[n], rates[1]) for rates in (found.weak, found.strong)
        for n in counts[1:]]


@pytest.mark.parametrize(("cores", "gpus", "counts"), [
    (1, 0, [1, 2]), (2, 0, [1, 2, 4]), (3, 0, [1, 2, 3, 6]), (4, 0, [1, 2, 4, 8]),
    (64, 0, [1, 2, 4, 8, 16]), (64, 1, [1, 2]), (64, 8, [1, 2, 4, 8])])
def test_numbers_of_ranks_follow_the_machine(monkeypatch, cores, gpus, counts):
    monkeypatch.setattr(devices, "cores", lambda: cores)
    monkeypatch.setattr(devices, "gpus", lambda: gpus)
    assert scaling_runs.rank_counts()[0] == counts


def test_the_numbers_of_the_text():
    """100 hours alone are 62.5 hours on two GPUs that are 1.6 times as fast."""
    hours = 100 / 1.6
    assert hours == 62.5 and 2 * hours == 125
    assert efficiency(2, 1.6, 1) == 0.8 and round(0.2 * 1024) == 205


# ---- the division of lost time


def test_the_parts_are_those_of_hand_written_traces():
    cases = lost_time_traces.cases()
    run, alone = cases["one all-reduce"]
    # rank 0: computes 0.25 to 5 and 9 to 10, waits 5 to 6, communicates 6 to 9
    assert lost_time.parts_of_step(run, 0) == {
        "communication": 3, "waiting": 1, "data loading": 0.25, "computing": 5.75}
    # rank 1 begins last: it does not wait
    assert lost_time.parts_of_step(run, 1)["waiting"] == 0
    assert lost_time.lost_seconds(run, alone) == {
        "communication": 3, "waiting": 1, "data loading": 0, "computing": 1}
    run, alone = cases["hidden communication"]
    assert lost_time.parts_of_step(run, 0) == {
        "communication": 0, "waiting": 0, "data loading": 0, "computing": 10}
    run, alone = cases["one waits while another moves"]
    assert lost_time.parts_of_step(run, 0) == {
        "communication": 5, "waiting": 3, "data loading": 0, "computing": 2}


@pytest.mark.parametrize("name", lost_time_traces.cases())
def test_the_parts_sum_to_the_whole(name):
    run, alone = lost_time_traces.cases()[name]
    lost = lost_time.lost_seconds(run, alone)
    step, single = (one[0].seconds / len(one[0].steps) for one in (run, alone))
    assert sum(lost.values()) == pytest.approx(step - single)
    assert lost["communication"] >= 0 and lost["waiting"] >= 0


def test_of_recorded_runs_the_parts_sum_to_the_whole(recorded):
    for run in recorded.values():
        for rank, trace in enumerate(run):
            parts = lost_time.parts_of_step(run, rank)
            assert sum(parts.values()) == pytest.approx(trace.seconds / lost_time_runs.STEPS)
            assert min(parts.values()) >= 0


def test_no_collective_ends_before_all_ranks_have_issued_it(recorded):
    """So the ranks' clocks agree. A collective begins when a rank's link takes it up: on a crowded
    machine gloo may have it done by then."""
    for run in recorded.values():
        for same in zip(*(trace.collectives for trace in run), strict=True):
            assert len({one.kind for one in same}) == 1
            assert min(one.end for one in same) >= max(one.issued for one in same)


def test_the_checks_own_runs_leave_no_files_where_the_students_are(recorded):
    assert {trace.path for run in [*recorded.values(), recorded.alone] for trace in run} == {""}
    assert "ui.perfetto.dev" not in repr(recorded)


def test_the_rank_that_is_alone_communicates_with_nobody(recorded):
    [trace] = recorded.alone
    assert not trace.collectives and len(trace.steps) == lost_time_runs.STEPS


def test_a_waterfall_ends_at_the_efficiency(recorded, monkeypatch):
    # Recording is most of so short a step.
    monkeypatch.setattr(typical_step, "MAX_DEVIATION", float("inf"))
    picture = lab.show_lost_time(recorded, lost_time.lost_seconds)
    found = {metric.name: metric.value for metric in picture.metrics()}
    alone = recorded.alone[0].seconds / lost_time_runs.STEPS
    for name in recorded:
        lost = lost_time.lost_seconds(recorded[name], recorded.alone)
        assert found[f"{name}: efficiency"] == pytest.approx(alone / (alone + sum(lost.values())))
    assert [text.get_text() for text in picture.figure.axes[0].texts][-1].endswith(" %")


def test_a_gain_is_drawn_to_the_right():
    run, alone = lost_time_traces.cases()["faster than alone"]
    runs = lost_time_runs.RunsOnRanks({"gains": run}, alone, None)
    picture = lab.show_lost_time(runs, lost_time.lost_seconds)
    assert "computing -1500.0 ms" in repr(picture)


def test_a_run_that_does_not_show_its_fault_is_recorded_again(monkeypatch):
    cases, recorded = lost_time_traces.cases(), []
    waits, (_, alone) = cases["rank 0 is slow"][0], cases["a slow data loader"]

    def record_once(preset, names, folder):
        run = waits if len(recorded) < 2 else cases["a slow data loader"][0]
        recorded.append(lost_time_runs.RunsOnRanks(dict.fromkeys(names, run), alone, None))
        return recorded[-1]

    monkeypatch.setattr(lost_time_runs, "record_once", record_once)
    assert lost_time_runs.record_lost_time(TINY, ("slow data loader", "healthy")) is recorded[2]
    assert recorded[0].unclear() == ["slow data loader"] and recorded[2].unclear() == []
    recorded.clear()
    monkeypatch.setattr(lost_time_runs, "ROUNDS", 2)
    found = lost_time_runs.record_lost_time(TINY, ("slow data loader",))
    assert len(recorded) == 2 and found in recorded
    picture = lab.show_lost_time(found, lost_time.lost_seconds)
    assert "busy with something else: slow data loader would" in repr(picture)


@pytest.mark.parametrize("share, drawn", [(1, True), (0.8, True), (1.4, True), (0.7, False),
                                          (1.6, False)])
def test_a_step_unlike_the_unrecorded_ones_is_recorded_again_and_not_drawn(share, drawn):
    run, alone = lost_time_traces.cases()["a slow data loader"]
    seconds = max(trace.seconds / len(trace.steps) for trace in run)
    runs = lost_time_runs.RunsOnRanks({"slow data loader": run}, alone, None,
                                      {"slow data loader": share * seconds})
    assert runs.unclear() == ["slow data loader"] * (not drawn)
    picture = lab.show_lost_time(runs, lost_time.lost_seconds)
    assert isinstance(picture, Verdict) is not drawn
    if not drawn:
        assert picture.passed is None
        assert f"but usually {1e3 * share * seconds:.0f} ms" in picture.sentence


# ---- one time axis


def test_traces_are_shifted_to_the_first_ranks_begin():
    run, _ = lost_time_traces.cases()["rank 0 is slow"]
    apart = [replace(trace, started=100 + rank) for rank, trace in enumerate(run)]
    together = on_one_axis(apart)
    assert {trace.started for trace in together} == {100}
    for rank, (before, after) in enumerate(zip(apart, together, strict=True)):
        assert after.seconds == before.seconds
        assert after.compute[0][0] == before.compute[0][0] + rank
        assert after.collectives[0].begin == before.collectives[0].begin + rank
        assert after.collectives[0].issued == before.collectives[0].issued + rank
        assert shifted(after, -rank) == before


def test_what_a_loader_computes_is_loading_on_a_cpu():
    run, _ = lost_time_traces.cases()["loading under computing"]
    assert without_loading(run[0]).compute == ((0, 1), (4, 6), (9, 10))
    on_gpu = replace(run[0], executed_labels=run[0].labels)
    assert without_loading(on_gpu) is on_gpu


def test_intervals_and_spans_are_united():
    spans = [Span("", "", 1, 3), (2, 4), (9, 8), (6, 7)]  # one ends before it begins
    assert union(spans) == [(1, 4), (6, 7)]
