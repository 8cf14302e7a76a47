"""The arithmetic of spans, and a recorded step on real ranks."""

import time

import pytest
import torch
import torch.distributed as dist

from labs import launch
from labs.meters import throughput, timeline
from labs.meters.timeline import Span, Timeline
from labs.training import data, models


def test_union_closes_overlaps_and_small_gaps():
    spans = [Span("", "", *pair) for pair in ((2, 3), (0, 1), (0.5, 1.5), (3.1, 4))]
    assert timeline.union(spans) == [(0, 1.5), (2, 3), (3.1, 4)]
    assert timeline.union(spans, gap=0.2) == [(0, 1.5), (2, 4)]


def test_minus_cuts_at_both_ends_and_in_the_middle():
    assert timeline.minus([(0, 10)], [(2, 3), (5, 6)]) == [(0, 2), (3, 5), (6, 10)]
    assert timeline.minus([(0, 4), (6, 8)], [(3, 7)]) == [(0, 3), (7, 8)]
    assert timeline.minus([(1, 2)], [(0, 3)]) == []


def test_exposed_is_communication_without_computing():
    line = Timeline((Span("a", "compute", 0, 2), Span("b", "communication", 1, 4),
                     Span("c", "compute", 3, 5), Span("forward", "forward", 0, 5)))
    assert line.communication == 3 and line.exposed == [(2, 3)] and line.exposed_seconds == 1


def test_a_recorded_step_has_phases_marks_and_waits():
    """Rank 1 comes late to the all-reduce: what rank 0 waits is exposed communication."""

    class Waits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = models.EdgeCaseModel()

        def forward(self, **batch):
            time.sleep(0.15 * dist.get_rank())
            dist.all_reduce(torch.ones(1))
            return self.model(**batch)

    def work():
        module = Waits()
        timeline.mark_gradients(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return timeline.record(module, optimizer, data.xy_batches(1, 4)[0])

    first, second = launch(work, ranks=2, quiet=True)
    for line in (first, second):
        phases = [line.of(name)[0] for name in ("forward", "backward", "optimizer")]
        assert [p.end <= q.begin for p, q in zip(phases, phases[1:], strict=False)] == [True, True]
        assert {span.name for span in line.of("ready")} >= {"model.first.weight"}
        assert len(line.of("issued")) == len(line.of("communication")) == 1
    assert first.exposed_seconds > 0.1 > second.exposed_seconds


def test_race_takes_turns():
    def work():
        turns = []
        steps = {name: (lambda name=name: turns.append(name)) for name in "ab"}
        seconds = throughput.seconds_per_step(steps, rounds=2, warmup=1, repeat=2)
        return turns, {name: len(times) for name, times in seconds.items()}

    turns, counts = launch(work, ranks=2, quiet=True)[1]
    assert turns == list("aabb") * 3 and counts == {"a": 2, "b": 2}


def test_the_slowest_rank_sets_the_pace():
    results = [{"a": [1, 2, 3]}, {"a": [4, 4, 4]}]
    assert throughput.tokens_per_second(results, tokens=100) == {"a": 25}


pytestmark = pytest.mark.usefixtures("warm_launcher")
