"""Notebook 05's harness: injected faults are in the traces; what it draws, what it models."""

import sys
from functools import partial
from pathlib import Path

import cloudpickle
import pytest
from _build.definitions import definitions

import labs.fsdp_profiling as lab
from labs import launch
from labs.exercises import comparison
from labs.fsdp_profiling import charts, recording, step_model
from labs.fsdp_profiling.checks import common, synthetic_traces
from labs.fsdp_profiling.checks import diagnose as diagnosis
from labs.meters import throughput
from labs.meters import trace_units as units
from labs.meters.trace import PHASES, Span
from labs.predictions import traffic
from labs.training.loop import train

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
ROOT = Path(__file__).resolve().parents[1]
SMALL = recording.preset(layers=3, hidden=64, heads=2, context=32, batch=2)


@pytest.fixture(scope="module")
def solution():
    return definitions("05_fsdp_profiling")


@pytest.fixture(scope="module")
def healthy():
    return lab.record_fsdp(SMALL, "of a test")


# ---- what FSDP2 does, in its traces


def test_every_unit_is_gathered_twice_and_the_root_once(healthy):
    """Said in the notebook, below the table of all-gathers."""
    blocks = [f"transformer.h.{number}" for number in range(3)]
    for trace in healthy:
        owners = [units.owner(trace, one) for one in trace.of("all_gather")]
        assert [one.unit for one in owners if one.phase == "forward"] == ["root", *blocks]
        assert [one.unit for one in owners if one.phase == "backward"] == blocks[::-1]
        assert all(one.prefetched == (one.phase == "backward") for one in owners)
        assert [units.owner(trace, one).unit for one in trace.of("reduce_scatter")] == [
            *blocks[::-1], "root"]


def test_reduce_scatters_lie_between_the_units_work(healthy):
    """Said in the notebook: FSDP2 calls them without asynchrony, so on a CPU the rank waits."""
    for trace in healthy:
        for one in trace.of("reduce_scatter"):
            for work in units.unit_spans(trace):
                assert one.end <= work.begin or one.issued >= work.end


def test_the_bytes_are_those_of_the_units(healthy):
    step = step_model.measured_step(healthy)
    hidden = SMALL.hidden
    block = 12 * hidden**2 + 13 * hidden
    assert [one.name for one in step.work][0] == "root"
    assert {one.bytes for one in step.work[1:]} == {4 * block}
    assert all(one.forward > 0 and one.backward > 0 for one in step.work[1:])
    assert 0 < step.seconds <= healthy[0].seconds
    assert step.seconds == pytest.approx(sum(step.seconds_by_phase.values()))


def test_the_files_lie_where_it_says(healthy):
    assert "experiments/fsdp_profiling/of_a_test_rank0.json.gz" in repr(healthy)
    assert "ui.perfetto.dev" in repr(healthy)
    assert [lab.load(trace.path) for trace in healthy] == list(healthy)


def test_gathers_of_backward_overlap_with_computing_only_if_prefetched():
    """On synthetic traces the meter finds exactly the units that are late."""
    for_prefetch = synthetic_traces.for_prefetch
    assert units.late_units(for_prefetch()) == []
    assert units.late_units(for_prefetch(prefetch=False)) == ["layer.1", "layer.0"]
    assert units.late_units(for_prefetch(late=("layer.0",), latency=3.0)) == ["layer.0"]


# ---- the slow runs


def test_causes_are_injected_and_named_in_runs_recorded_again(solution):
    """A second time, with another seed and other sizes than in the check."""
    slow_runs = lab.slow_runs(seed=3)
    assert sorted(slow_runs.answers.values()) == sorted(set(lab.CAUSES) - {"nothing"})
    for letter, run in slow_runs.runs.items():
        cause, evidence = solution.diagnose(run, slow_runs.healthy)
        assert cause == slow_runs.answers[letter]
        assert diagnosis.is_evidence(cause, evidence, run, slow_runs.healthy)
    table = lab.show_diagnoses(slow_runs, solution.diagnose)
    assert repr(table).count("✓") == 6
    guessing = lab.show_diagnoses(slow_runs, lambda run, healthy: ("slow rank", 7))
    assert repr(guessing).count("✗ evidence") == 1 and "✓" not in repr(guessing)
    assert "not (cause, evidence)" in str(lab.show_diagnoses(slow_runs, lambda run, healthy: None))
    picture = lab.explore_slow_runs(slow_runs)
    assert "run A, rank 1" in repr(picture)
    for letter in slow_runs.runs:
        assert picture.picture(letter).png().startswith(b"\x89PNG")


# ---- recordings that can be judged by their seconds


def synthetic_run(fault="", busy=(5.0, 5.0), loads=(0.01, 0.01), slow_rank=0):
    """Each rank computes from the begin of its ten seconds, and waits in the rest of them."""
    return recording.RecordedRun(
        [synthetic_traces.trace([("all_gather", 0, 10)], [(0, seconds)],
                    labels=[Span("enumerate(DataLoader)", "label", 0, load)])
         for seconds, load in zip(busy, loads, strict=True)],
        recording.RunConfig(SMALL, fault=fault, slow_rank=slow_rank))


@pytest.mark.parametrize("run, sentence", [
    (synthetic_run(), ""), (synthetic_run(busy=(2, 3.9)), ""),
    (synthetic_run("rank", busy=(9, 1)), ""),
    (synthetic_run("data", loads=(6, 7)), ""), (synthetic_run("item", loads=(0.9, 0)), ""),
    (synthetic_run(busy=(1.5, 3.9)), "one rank computed 2.6 times as long as another, by chance"),
    (synthetic_run(busy=(4.5, 9)), "one rank waited longer than another by 0.45 of the step"),
    (synthetic_run("rank", busy=(8, 2)), "its slow rank computed only 4.0 times as long"),
    (synthetic_run("rank", busy=(9, 1), slow_rank=1), "its slow rank computed only"),
    (synthetic_run("rank", busy=(5, 0.5)), "one rank waited longer than another by 0.45"),
    (synthetic_run("data", loads=(4, 7)), "its data loader took 0.70 of the step"),
    (synthetic_run(loads=(0, 1.1)), "its data loader took 0.11 of the step")])
def test_a_noisy_run_is_known_by_its_seconds(run, sentence):
    assert recording.contradiction(run)[:len(sentence) or None] == sentence


def test_a_noisy_run_is_recorded_again(monkeypatch):
    once, always, good = synthetic_run(busy=(1, 3)), synthetic_run(busy=(1, 4)), synthetic_run()
    answers = [[once, good, always], [good, always], [always], [always], [always]]
    asked = []
    monkeypatch.setattr(recording, "record_runs",
                        lambda configs: asked.append(configs) or answers.pop(0))
    assert recording.record_clearly(["a", "b", "c"], rounds=5) == [good, good, always]
    assert asked == [["a", "b", "c"], ["a", "c"], ["c"], ["c"], ["c"]]


def test_on_a_busy_machine_the_check_says_so(monkeypatch, solution):
    def busy():
        raise recording.TooNoisy("one rank computed 9.0 times as long as another, by chance")

    monkeypatch.setattr(diagnosis, "record_causes", busy)
    verdict = lab.check_diagnose(solution.diagnose)
    assert verdict.passed is None and "computed 9.0 times" in verdict.sentence


@pytest.mark.parametrize("run, ratio, share", [
    (synthetic_run(busy=(4.0, 5.0)), 1.8, 0.09), (synthetic_run(busy=(1.0, 0.8)), 1.8, 0.09),
    (synthetic_run("rank", busy=(0.5, 9), slow_rank=1), 1 / 5.5, 0.09),
    (synthetic_run("rank", busy=(9.0, 1.75)), 5.5, 0.09),
    (synthetic_run("data", loads=(8, 7)), 1.8, 0.55)])
def test_timing_noise_within_the_margins_is_no_contradiction(run, ratio, share):
    changed = recording.with_timing_noise(run)
    first, second = recording.compute_seconds(changed)
    assert first == pytest.approx(ratio * second)
    assert recording.loading_shares(changed) == pytest.approx([share, share])
    assert recording.contradiction(changed)[:16] in ("", "one rank waited ")


def test_an_exercise_not_filled_in_is_known_before_all_is_recorded(monkeypatch):
    def unfilled(run, healthy):
        raise NotImplementedError("Exercise 5.8")

    monkeypatch.setattr(diagnosis, "record_causes", lambda: pytest.fail("recorded"))
    assert lab.check_diagnose(unfilled).passed is None


def test_the_notebook_says_what_is_recorded_again():
    source = (ROOT / "solutions/05_fsdp_profiling.py").read_text()
    text = " ".join(source.replace("#", "").split())
    assert (f"at least {recording.SLOW_RATIO:.0f} times as long as the others (healthy ranks "
            f"differ by a factor of {recording.HEALTHY_RATIO:.0f} at most)") in text
    assert "over half of the step, any other under a tenth" in text
    assert (recording.LONG_LOADING, recording.SHORT_LOADING) == (1 / 2, 1 / 10)
    assert "about 18 % faster: without it, 15 % are lost" in text and round(1 - 1 / 1.18, 2) == 0.15


# ---- the pictures


def test_pictures_say_what_they_show(healthy, solution):
    picture = lab.show_timeline(healthy)
    assert "of a test, rank 1" in repr(picture) and picture.png().startswith(b"\x89PNG")
    assert "rank 0, both: measured" in repr(lab.show_shares(healthy, solution.communication_share))
    assert repr(lab.show_seconds(healthy)).count("all_gather") == 2
    assert repr(lab.show_all_gathers(healthy, solution.attribute)).count("transformer.h.1") == 2


def test_other_collectives_are_those_that_fsdp_did_not_call(solution):
    run = common.recorded(stacks=True, before_sharding=lab.watch_activations)
    assert {(one.kind, one.elements) for one in charts.non_fsdp_collectives(run[0])} == {
        ("all_reduce", 1)}
    table = lab.show_non_fsdp_collectives(run, solution.call_site)
    assert "injected_faults.py" in repr(table)


def test_throughput_is_measured_in_turns(solution):
    picture = lab.show_throughput(SMALL, {"default": None, "off": solution.no_prefetch}, rounds=2)
    assert [row.name for row in picture.data] == ["default", "off"]
    assert all(row.measured > 0 for row in picture.data)


def test_a_slow_link_delays_every_all_gather():
    """One at a time, none before it is due: a step cannot be shorter than all of them."""
    def work():
        pair = comparison.build(partial(recording.configured_fsdp2, all_gather_delay=0.03), SMALL)
        steps = {"step": partial(train, *pair, comparison.batches(SMALL, 1))}
        return throughput.seconds_per_step(steps, rounds=2, warmup=1)["step"]

    gathers = 1 + 2 * SMALL.layers
    for seconds in launch(work, ranks=2, quiet=True, verify=False):
        assert min(seconds) > gathers * 0.03


def test_throughput_on_a_slow_link_says_so(solution):
    variants = {"default": None, "off": solution.no_prefetch}
    picture = lab.show_throughput(SMALL, variants, all_gather_delay=0.2, rounds=2)
    assert "all-gathers take 0.2 of a step longer" in repr(picture)


def test_an_unfilled_exercise_makes_pictures_wait(healthy):
    def unfilled(*_):
        raise NotImplementedError("Exercise 5.3")

    verdicts = [lab.show_all_gathers(healthy, unfilled), lab.show_links(healthy, unfilled),
                lab.record_fsdp(SMALL, configure=unfilled)]
    verdicts.append(lab.show_prefetch(healthy, verdicts[-1]))
    assert all(verdict.passed is None and "5.3" in str(verdict) for verdict in verdicts)


# ---- the model of a step on other links


def step_of(layers, forward=1.0, backward=2.0, nbytes=1, optimizer=0.5):
    root = step_model.UnitWork("root", 0.0, 0.0, 0)
    work = [step_model.UnitWork(f"layer.{n}", forward, backward, nbytes) for n in range(layers)]
    return step_model.ModelledStep((root, *work), optimizer, 64, 1000)


@pytest.mark.parametrize("order", step_model.ORDERS)
def test_a_free_link_costs_nothing(order):
    step = step_of(4)
    assert step_model.step_seconds(step, lambda nbytes: 0.0, order) == step.seconds == 12.5


def test_the_orders_by_hand():
    """Two layers, 1 s forward, 2 s backward each, half a second for a collective of a layer.

    prefetch: forward begins when layer 0 is there (0.5), layer 1 came meanwhile: 2.5; its gather
    for backward 3.0; layer 0's comes meanwhile: backward ends at 7.0; the last reduce-scatter 7.5.
    no prefetch: in backward layer 0 is gathered behind a reduce-scatter: one second later.
    """
    step, in_flight = step_of(2, optimizer=0.0), lambda nbytes: 0.5 * nbytes
    assert step_model.step_seconds(step, in_flight, "prefetch") == 7.5
    assert step_model.step_seconds(step, in_flight, "no prefetch") == 8.5
    assert step_model.step_seconds(step, in_flight, "nothing overlaps") == 6 + 6 * 0.5


@pytest.mark.parametrize("slow", [0.01, 0.3, 1.0, 5.0])
def test_better_orders_are_never_slower_and_the_link_is_a_bound(slow):
    step = step_of(6)
    seconds = [step_model.step_seconds(step, lambda nbytes: slow * nbytes, order)
               for order in step_model.ORDERS]
    assert seconds == sorted(seconds) and seconds[0] >= step.seconds
    assert seconds[0] >= 3 * 6 * slow  # two all-gathers and a reduce-scatter for each layer


def test_what_the_notebook_says_of_the_links(healthy, solution):
    """A slow link stays exposed on a GPU in any order; where this CPU computes, hardly any does."""
    here, there = lab.show_links(healthy, solution.collective_seconds).data.values()

    def share(rows, link, order):
        [(computing, exposed)] = [row[2:] for row in rows if row[:2] == (link, order)]
        return exposed / (computing + exposed)

    assert all(share(here, link, "prefetch") < 0.05 for link in step_model.LINKS)
    assert share(there, "100 GbE", "prefetch") > 0.3 > share(there, "NVLink", "prefetch")
    assert share(there, "PCIe 4", "prefetch") < share(there, "PCIe 4", "no prefetch")


@pytest.mark.parametrize("backward, optimizer", [(1.5, 1.0), (2.0, 4.0), (2.5, 8.0)])
def test_prefetch_gains_most_on_the_link_in_between(backward, optimizer):
    """Said below the chart. The units are the notebook's; their times are synthetic: what a machine
    disturbs while it records can be otherwise."""
    root = step_model.UnitWork("root", 0.5, 1.0, 164_864)
    blocks = [step_model.UnitWork(str(n), 1.0, backward, 793_088) for n in range(4)]
    parameters = sum(one.bytes for one in (root, *blocks)) // 4
    step = step_model.ModelledStep((root, *blocks), optimizer, 256, parameters).on_gpu(8192)

    def seconds(speed, order):
        return step_model.step_seconds(
            step, lambda nbytes: traffic.all_gather(nbytes, 8) / speed, order)

    gains = {link: 1 - seconds(speed, "prefetch") / seconds(speed, "no prefetch")
             for link, speed in step_model.LINKS.items()}
    assert max(gains, key=gains.get) == "PCIe 4"


def test_a_ring_is_what_the_traffic_room_predicts(solution):
    assert solution.collective_seconds(1e9, 4, 2.0) == traffic.all_gather(1e9, 4) / 2


def test_labels_nest(healthy):
    trace = healthy[0]
    [step] = trace.steps
    assert isinstance(step, Span)
    phases = [trace.labelled(f"labs::{phase}")[0] for phase in PHASES]
    assert all(step.begin <= phase.begin <= phase.end <= step.end for phase in phases)
