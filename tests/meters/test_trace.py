"""The arithmetic of intervals, exposed communication, and a recorded step on real ranks."""

import time

import pytest
import torch
import torch.distributed as dist

from labs import launch
from labs.meters import trace
from labs.meters.trace import Collective, Span, Trace
from labs.meters.trace_file import record_step, record_trace
from labs.training import data, loop, models

pytestmark = pytest.mark.usefixtures("warm_launcher")


def test_union_closes_overlaps_and_small_gaps():
    spans = [Span("", "", *pair) for pair in ((2, 3), (0, 1), (0.5, 1.5), (3.1, 4))]
    assert trace.union(spans) == [(0, 1.5), (2, 3), (3.1, 4)]
    assert trace.union(spans, gap=0.2) == [(0, 1.5), (2, 4)]


def test_subtract_cuts_at_both_ends_and_in_the_middle():
    assert trace.subtract([(0, 10)], [(2, 3), (5, 6)]) == [(0, 2), (3, 5), (6, 10)]
    assert trace.subtract([(0, 4), (6, 8)], [(3, 7)]) == [(0, 3), (7, 8)]
    assert trace.subtract([(1, 2)], [(0, 3)]) == []


def test_exposed_is_communication_without_computing():
    labels = (Span("labs::step", "label", 0, 6), Span("labs::forward", "label", 0, 2.5),
              Span("labs::backward", "label", 2.5, 5), Span("labs::optimizer", "label", 5, 6))
    one = Trace(0, "gloo", (Collective("b", "communication", 1, 4, "all_reduce"),),
                ((0, 2), (3, 6)), labels)
    assert one.seconds_of()["total"] == 3 and one.exposed == [(2, 3)] and one.exposed_seconds == 1
    assert one.seconds_by_phase == {"forward": 2, "backward": 2, "exposed": 1, "optimizer": 1}


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
        loop.mark_gradients(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        [batch] = data.xy_batches(1, 4)
        return record_trace(lambda: loop.labelled_step(module, optimizer, batch))

    first, second = launch(work, ranks=2, quiet=True)
    for line in (first, second):
        phases = [line.labelled(f"labs::{name}")[0] for name in trace.PHASES]
        assert [p.end <= q.begin for p, q in zip(phases, phases[1:], strict=False)] == [True, True]
        assert "labs::ready model.first.weight" in {label.name for label in line.labels}
        [collective] = line.collectives
        assert collective.issued <= collective.begin and line.path == ""
    assert first.exposed_seconds > 0.1 > second.exposed_seconds


def test_recorded_steps_are_written_later_in_any_order():
    """torch keeps each recording until it is written."""
    def work():
        def step(number):
            with torch.profiler.record_function(f"labs::{number}"):
                time.sleep(0.02 * number)

        recorded = [record_step(lambda number=number: step(number)) for number in range(3)]
        return [one.seconds for one in recorded], [one.write() for one in reversed(recorded)]

    [(seconds, traces)] = launch(work, ranks=1, quiet=True)
    assert all(took >= 0.02 * number for number, took in enumerate(seconds))
    for number, found in zip((2, 1, 0), traces, strict=True):
        assert {label.name for label in found.labels} == {"labs::step", f"labs::{number}"}
