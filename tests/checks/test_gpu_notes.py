"""What pictures say below on GPUs: seconds with their spread, and what the allocators say."""

import pytest

from labs.checks import gpu_notes
from labs.checks.comparison import Comparison, Measured
from labs.manual_ddp import variants
from labs.meters import memory
from labs.meters.gpu_allocator import Allocator
from labs.meters.trace import Span, Trace
from labs.meters.typical_step import TypicalStep
from labs.pictures import timelines
from labs.training.memory_categories import Memory
from labs.training.presets import preset
from labs.workers import cuda

SIZE = preset("laptop")  # 2 ranks
SPREAD = "ms per step, median and spread: torch DDP 200 (100 to 300); bucketed 40 (30 to 50)"


def report(allocator=None):
    held = {phase: Memory(parameters=2_000_000) for phase in memory.PHASES}
    return memory.Report(held, Memory(parameters=5_000_000), held, allocator=allocator)


def made(allocator=None):
    """A comparison of two strategies, whose ranks took turns in three rounds."""
    def recorded(*seconds):
        one = sorted(seconds)[1]
        trace = Trace(0, "nccl", (), ((0.0, one),), tuple(
            Span(name, "label", 0.0, one) for name in ("labs::step", "labs::forward")))
        return TypicalStep(trace, list(seconds), list(seconds), seconds.index(one))

    rounds = {"torch DDP": (0.3, 0.1, 0.2), "bucketed": (0.05, 0.03, 0.04)}
    return Comparison(SIZE, 1_000_000, 10, {name: Measured(
        report(allocator), [], [1.0], [list(seconds), [one / 2 for one in seconds]],
        [None], [recorded(*seconds)]) for name, seconds in rounds.items()})


@pytest.mark.parametrize(("gpus", "rounds", "words"), [
    (0, 0, ""), (1, 0, gpu_notes.SHARED_CARD), (2, gpu_notes.ROUNDS, SPREAD)])
def test_seconds_are_said_where_each_rank_has_a_gpu(gpus, rounds, words, monkeypatch):
    monkeypatch.setattr(cuda, "count", lambda: gpus)
    assert gpu_notes.speeds(made()) == words and gpu_notes.rounds_of(SIZE) == rounds
    for show in (variants.show_throughput, variants.show_phases):
        text = str(show(made()))
        assert words in " ".join(text.split()) and ("spread" in text) is (gpus == 2)
    assert ("The recorded step nearest to the median is drawn." in text) is (gpus > 0)
    life = timelines.Lifecycle({"forward": (0, 1)}, {"unit": []}, {"unit": []}, {"unit": 4})
    assert str(timelines.gathered_layers(life, words)).endswith(words)


def test_nothing_timed_says_nothing(monkeypatch):
    monkeypatch.setattr(cuda, "count", lambda: 2)
    assert gpu_notes.spreads({}, SIZE) == ""


def test_what_the_allocator_says_stands_beside_what_was_recorded():
    gpu = Allocator(peak=4_999_488, difference=512, rounding=0, workspaces=0, reserved=6_291_456,
                    used=900_000_000)
    lines = str(made(gpu)).splitlines()
    assert len(lines) == 5 and lines[1].startswith("torch DDP: 2.0 MB after backward, ")
    assert lines[2] == ("    the allocator's own peak of the run is 4,999,488 bytes, 512 bytes "
                        "less than recorded; reserved 6,291,456, the driver shows 900,000,000")
    assert gpu_notes.allocators(made(gpu)) == (
        "the allocator's own peak of the run: torch DDP 512 bytes less than recorded (reserved "
        "0.00629 GB, the driver shows 0.9); bucketed 512 bytes less than recorded (reserved "
        "0.00629 GB, the driver shows 0.9)")
    assert "as recorded" in str(made(Allocator(5_000_000, 0, 0, 0, 1, 1)))


def test_a_cpu_has_no_such_allocator():
    assert len(str(made()).splitlines()) == 3 and gpu_notes.allocators(made()) == ""
    assert "allocator" not in str(made())
