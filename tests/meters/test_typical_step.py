"""Which recorded step is drawn, and when none is: with seconds that the tests give."""

from types import SimpleNamespace

import pytest

from labs.checks.verdicts import Verdict, shows
from labs.meters import typical_step
from labs.meters.typical_step import is_typical, require_typical, usual_seconds
from labs.workers import devices
from labs.workers.launcher import launch

SECONDS = [(0.5, 0.4), (0.31, 0.3), (0.2, 0.31), (0.7, 0.29), (0.32, 0.6)]  # recorded, measured


@pytest.mark.parametrize("seconds, yes", [(1, True), (1.33, True), (0.67, True), (1.34, False),
                                          (0.66, False), (3.2, False), (0, False)])
def test_a_step_is_usual_within_a_third(seconds, yes):
    assert is_typical(0.15 * seconds, 0.15) is yes


def test_a_step_that_is_not_usual_is_named_with_what_to_do():
    require_typical({"a": (1.2, 1), "b": (0.8, 1)}, "this cell")
    with pytest.raises(typical_step.NotTypical, match="^not drawn, because 2 recorded steps took "
                       r"over a third longer or shorter than usual \(b: 485 ms, but usually 153 ms "
                       r"and c: 10 ms, but usually 20 ms\): another .* run this cell again when"):
        require_typical({"a": (1, 1), "b": (0.485, 0.153), "c": (0.01, 0.02)}, "this cell")


def test_the_usual_seconds_are_those_without_the_profiler(monkeypatch):
    assert usual_seconds([3, 4, 8], [1, 2, 9]) == 2
    assert usual_seconds([3, 4, 8], []) == 4
    monkeypatch.setattr(devices, "gpus", lambda: 1)  # where the profiler lengthens a short step
    assert usual_seconds([3, 4, 8], [1, 2, 9]) == 4


def test_a_refused_picture_is_a_verdict_that_stops_no_notebook():
    @shows("A picture")
    def show(seconds):
        require_typical({"the step": (seconds, 1)}, "the cell above")
        return "a picture"

    assert show(1.3) == "a picture"
    refused = show(1.4)
    assert isinstance(refused, Verdict) and refused.passed is None
    assert str(refused).startswith("○ A picture  not drawn, because 1 recorded step took")


@pytest.mark.usefixtures("warm_launcher")
def test_all_ranks_keep_the_step_nearest_to_the_median_and_only_a_few_in_memory():
    def work():
        import torch.distributed as dist

        found = typical_step._Recordings()
        for number, (recorded, measured) in enumerate(SECONDS):
            # rank 0 is faster now and then: the slowest rank counts
            share = 1 - 0.5 * (dist.get_rank() == number % 2)
            found.add(SimpleNamespace(seconds=share * recorded, write=lambda n=number: n),
                      share * measured)
            assert len(found.kept) <= typical_step.KEPT_RECORDINGS
        return found.typical()

    one, other = launch(work, ranks=2, quiet=True)
    assert one == other
    assert one.trace == one.chosen == 1
    assert one.seconds == 0.31 and one.usual == 0.31
    assert list(zip(one.recorded, one.measured, strict=True)) == SECONDS
