"""What is said below a picture on GPUs only: seconds, which mean something there, and what each
GPU's allocator says beside the peak that was recorded."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence

from labs.checks.comparison import Comparison
from labs.training.presets import Preset
from labs.workers import devices

ROUNDS = 7  # of timed steps: the median counts, lowest and highest are its spread
LINE = 112  # characters
SHARED_CARD = ("The ranks share a GPU, and gloo carries their data through the host: memory is "
               "that of a node's ranks, and seconds are not.")


def on_gpus_of_their_own(size: Preset) -> bool:
    """Whether each of the preset's ranks has a GPU here, so that seconds are those of a node."""
    return devices.plan(size.ranks).library == "nccl"


def rounds_of(size: Preset) -> int:
    """Returns how many rounds are timed in a picture that needs no seconds to make its point: none,
    unless each rank has a GPU."""
    return ROUNDS * on_gpus_of_their_own(size)


def speeds(compared: Comparison) -> str:
    """Returns the median step of each strategy and its spread; nothing without GPUs, and of ranks
    that share one, that their seconds are not a node's."""
    return spreads({name: one.rounds for name, one in compared.results.items() if one.rounds},
                   compared.preset)


def spreads(rounds: Mapping[str, Sequence[float]], size: Preset) -> str:
    """Returns the same of seconds by round, measured on the preset's ranks."""
    if not rounds or not on_gpus_of_their_own(size):
        return SHARED_CARD if rounds and devices.gpus() else ""
    found = [f"{' '.join(name.split())} {1e3 * statistics.median(seconds):,.3g} "
             f"({1e3 * min(seconds):,.3g} to {1e3 * max(seconds):,.3g})"
             for name, seconds in rounds.items()]
    return "ms per step, median and spread: " + "; ".join(found)


def spreads_of_recorded(seconds: Mapping[str, Sequence[float]], size: Preset) -> str:
    """Returns the lines below a picture of a recorded step: `spreads` of all that were recorded."""
    note = spreads(seconds, size)
    return below(note, "The fastest of the recorded steps is drawn." if note else "")


def allocators(compared: Comparison) -> str:
    """Returns what the GPUs' allocators say of each strategy's recorded peak; nothing on a CPU."""
    found = {name: one.report.allocator for name, one in compared.results.items() if one.report}
    words = [f"{' '.join(name.split())} {one.agreement} (reserved {one.reserved / 1e9:.3g} GB, the "
             f"driver shows {one.used / 1e9:.3g})" for name, one in found.items() if one]
    return "the allocator's own peak of the run: " + "; ".join(words) if words else ""


def measured_on_gpus(compared: Comparison) -> str:
    """Returns `speeds` and `allocators`, each in lines of its own."""
    return below(speeds(compared), allocators(compared))


def below(*texts: str) -> str:
    """Returns the lines below a picture; empty texts are left out."""
    return "\n".join("\n".join(textwrap.wrap(line, LINE)) for text in texts if text
                     for line in text.splitlines())
