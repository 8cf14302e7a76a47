"""How fast variants of the same work are, measured in turns on the ranks."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist


def seconds_per_step(steps: Mapping[str, Callable[[], object]], rounds: int = 7, warmup: int = 2,
                     repeat: int = 1) -> dict[str, list[float]]:
    """On a rank: the seconds per step of each variant, one value per round.

    steps: name -> function that does one step. The variants take turns, so that a machine that
    slows down slows down all of them; each turn begins with a barrier and takes `repeat` steps.
    Compare medians, as ratios.
    """
    seconds = {name: [] for name in steps}
    for round_ in range(warmup + rounds):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeat):
                step()
            if round_ >= warmup:
                seconds[name].append((time.perf_counter() - began) / repeat)
    return seconds


def tokens_per_second(results: Sequence[Mapping[str, list[float]]], tokens: int
                      ) -> dict[str, float]:
    """Tokens per second of all ranks together, by variant: the median step of the slowest rank.

    results: what `seconds_per_step` returned on each rank. tokens: what all ranks together process
    in one step.
    """
    return {name: tokens / max(statistics.median(result[name]) for result in results)
            for name in results[0]}
