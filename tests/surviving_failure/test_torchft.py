"""Replica groups: one is killed, the other goes on, and a replacement gets its state."""

import tomllib
from itertools import pairwise
from pathlib import Path

import leaks
import pytest
from _build.definitions import definitions

from labs.checks.verdicts import Verdict
from labs.surviving_failure import elastic_metrics, replica_runs
from labs.surviving_failure.elastic_kills import ElasticRun, Kill
from labs.surviving_failure.replica_charts import show_digests, show_replicas, show_time_lost
from labs.surviving_failure.replica_runs import GROUPS, REPLACEMENT, ReplicaRun, Step
from labs.surviving_failure.restarts import AgentEvent

ROOT = Path(__file__).resolve().parents[2]
needs_torchft = pytest.mark.skipif(not replica_runs.has_torchft(),
                                   reason="torchft is not installed")


def own_processes() -> set[str]:
    return leaks.programs("surviving_failure/replica_", "surviving_failure.replica_")


def run_of() -> ReplicaRun:
    """A run as it should be, shortened: two steps together, one alone, then together again."""
    def step(time, number, groups, seconds=0.1):
        return Step(time, number, groups, 1.0, seconds)

    survivor = [step(10.0, 1, 2), step(10.1, 2, 2), step(12.1, 3, 1, 2.0), step(12.2, 4, 1),
                step(12.3, 5, 2)]
    return ReplicaRun(10.15, 11.0, {
        GROUPS[0]: survivor, GROUPS[1]: [step(10.0, 1, 2), step(10.1, 2, 2)],
        REPLACEMENT: [step(12.25, 4, 1), step(12.35, 5, 2)]},
        {GROUPS[0]: "ab" * 32, REPLACEMENT: "ab" * 32})


@needs_torchft
@pytest.mark.slow
def test_the_survivor_goes_on_and_the_replacement_ends_equal():
    train = definitions("08_surviving_failure").train_replica
    run = replica_runs.run_replicas(train)
    assert isinstance(run, ReplicaRun), run
    # every step was finished by the one process that nobody restarted, and none twice
    numbers = [step.step for step in run.survivor]
    assert all(after - before in (0, 1) for before, after in pairwise(numbers)), numbers
    assert run.survivor[-1].step == run.steps[REPLACEMENT][-1].step
    # the replacement took no part in the first steps: it got their result from the survivor
    assert run.steps[REPLACEMENT][0].step > replica_runs.KILLED_AT
    assert set(run.digests) == {GROUPS[0], REPLACEMENT} and len(set(run.digests.values())) == 1
    # no new quorum before the lighthouse has given up the killed group
    assert 0.5 * replica_runs.SILENT < run.stall.seconds < 20 < replica_runs.LIMIT
    assert any(step.groups == 1 and step.time > run.killed_at for step in run.survivor)
    for draw in (show_replicas, show_digests):
        assert not isinstance(draw(run), Verdict)
    assert not own_processes()


@needs_torchft
def test_a_group_that_raises_is_a_verdict_with_its_line():
    def train(name):
        raise ValueError(f"no model for {name}")

    said = replica_runs.run_replicas(train)
    assert isinstance(said, Verdict) and said.passed is False
    assert "ended with exit code 1" in str(said) and "no model for group" in str(said)
    assert not own_processes()


def test_without_torchft_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(replica_runs, "has_torchft", lambda: False)
    said = replica_runs.run_replicas(lambda name: None)
    assert said.passed is None and f"%pip install torchft=={replica_runs.VERSION}" in str(said)
    for draw in (show_replicas, show_digests):
        assert draw(said) is said
    assert show_time_lost(said, None) is said


def test_the_version_is_that_of_the_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["ft"] == [f"torchft=={replica_runs.VERSION}"]


def test_times_count_from_the_first_step_together():
    run = run_of()
    assert run.survivor[0].time == 0 and run.killed_at == pytest.approx(0.15)
    assert run.stall.seconds == 2.0 and run.alone == pytest.approx(2.2)


def test_lost_work_counts_half_while_one_group_is_missing():
    steps = [elastic_metrics.Step(0, 1.0, 2, 0, 0.0, 1.0),
             elastic_metrics.Step(0, 1.0, 2, 1, 8.0, 9.0)]
    metrics = elastic_metrics.Metrics("none.jsonl")
    metrics.steps, metrics.joined = steps, [elastic_metrics.Joined((1, 2), 2, 1, 7.0)]
    log = [AgentEvent("noticed", 2.0), AgentEvent("rendezvous", 2.5), AgentEvent("starting", 3.0)]
    restarted = ElasticRun(metrics, 0.0, [Kill(1, 0, 1.0)], log=log)
    table = show_time_lost(run_of(), restarted)
    # 2 s in which nobody trained, and 0.2 s with one of two groups
    assert [row[1:] for row in table.rows] == [("2.0 s", "0.2 s", "2.1 s"),
                                               ("8.0 s", "0 s", "8.0 s")]


def test_the_picture_says_whether_the_parameters_are_equal():
    run = run_of()
    assert "end are equal" in show_replicas(run).text
    run.digests[REPLACEMENT] = "cd" * 32
    assert "NOT equal" in show_replicas(run).text
