"""Variants measured side by side: turns, and the pace of the slowest rank."""

import pytest

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


def test_the_slowest_rank_sets_the_pace():
    results = [{"a": [1, 2, 3]}, {"a": [4, 4, 4]}]
    assert throughput.tokens_per_second(results, tokens=100) == {"a": 25}
