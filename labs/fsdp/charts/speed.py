"""Seconds in words below a picture: on GPUs, where they mean something."""

import textwrap

from labs.exercises.comparison import Comparison
from labs.training.presets import Preset
from labs.workers import devices

ROUNDS = 7  # of timed steps: the median counts, lowest and highest are its spread
LINE = 112  # characters
SHARED_CARD = ("The ranks share a GPU, and gloo carries their data through the host: memory is "
               "that of a node's ranks, and seconds are not.")


def on_gpus_of_their_own(size: Preset) -> bool:
    """Whether each of the preset's ranks has a GPU here, so that seconds are those of a node."""
    return "nccl" in devices.plan(size.ranks).backend


def rounds_of(size: Preset) -> int:
    """Returns how many rounds are timed in a picture that needs no seconds to make its point: none,
    unless each rank has a GPU."""
    return ROUNDS * on_gpus_of_their_own(size)


def speeds(compared: Comparison) -> str:
    """Returns the median step of each strategy and its spread; nothing without GPUs, and of ranks
    that share one, that their seconds are not a node's."""
    timed = {name: one for name, one in compared.results.items() if one.rounds}
    if not timed or not on_gpus_of_their_own(compared.preset):
        return SHARED_CARD if timed and devices.gpus() else ""
    found = [f"{' '.join(name.split())} {1e3 * one.seconds:,.3g} ({1e3 * min(one.rounds):,.3g} to "
             f"{1e3 * max(one.rounds):,.3g})" for name, one in timed.items()]
    return "ms per step, median and spread: " + ", ".join(found)


def below(*texts: str) -> str:
    """Returns the lines below a picture; empty texts are left out."""
    return "\n".join("\n".join(textwrap.wrap(line, LINE)) for text in texts if text
                     for line in text.splitlines())
