"""Variants measured side by side: turns, and the pace of the slowest rank."""

import pytest
import torch

from labs import launch
from labs.meters import throughput

pytestmark = pytest.mark.usefixtures("warm_launcher")


def test_race_takes_turns():
    def work():
        turns = []
        steps = {name: (lambda name=name: turns.append(name)) for name in "ab"}
        seconds = throughput.seconds_per_step(steps, rounds=2, warmup=1, repeat=2)
        return turns, {name: len(times) for name, times in seconds.items()}

    turns, counts = launch(work, ranks=2, quiet=True)[1]
    assert turns == list("aabb") * 3 and counts == {"a": 2, "b": 2}


def test_on_a_gpu_events_measure_after_enough_warmup(monkeypatch):
    calls = []
    monkeypatch.setenv("LABS_DEVICE", "cuda:0")
    monkeypatch.setattr(throughput.dist, "barrier", lambda: None)
    monkeypatch.setattr(throughput.cuda, "seconds", lambda work: work() and 3.0)
    found = throughput.seconds_per_step({"a": lambda: calls.append(1)}, 2, warmup=1, repeat=3)
    assert found == {"a": [1.0, 1.0]} and len(calls) == 3 * (throughput.WARMUP_ON_GPU + 2)


def test_a_timing_has_a_median_and_bounds():
    timing = throughput.Timing.of([0.012, 0.0105, 0.02])
    assert (timing.median, timing.least, timing.most) == (0.012, 0.0105, 0.02)
    assert str(timing) == "12 ms (10.5 to 20 by round)"


@pytest.mark.gpu
def test_seconds_of_a_gpu_are_its_kernels():
    """A kernel that only waits for 10 million clock cycles: no GPU has 3 GHz. The CPU's clock would
    say what its launch takes, some microseconds."""
    def work():
        return throughput.seconds_per_step({"wait": lambda: torch.cuda._sleep(10_000_000)}, 3)

    [found] = launch(work, ranks=1, quiet=True)
    assert min(found["wait"]) > 1 / 300


def test_the_slowest_rank_sets_the_pace():
    results = [{"a": [1, 2, 3]}, {"a": [4, 4, 4]}]
    assert throughput.tokens_per_second(results, tokens=100) == {"a": 25}
