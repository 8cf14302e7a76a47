"""How long a reduce-scatter takes on this backend, done in three ways."""

import statistics

import torch
import torch.distributed as dist

from labs.exercises.verdicts import shows
from labs.meters import throughput
from labs.pictures import measured, palette
from labs.training.presets import Preset
from labs.workers import devices
from labs.workers.collectives import reduce_scatter_single
from labs.workers.launcher import launch
from labs.zero_stages.collectives import reduce_scatter

ELEMENTS = 1 << 21  # 8 MiB in fp32
ROUNDS, WARMUP = 9, 2


@shows("3.2")
def show_reduce_scatter(preset: Preset):
    """Milliseconds of a reduce-scatter of 8 MiB: torch's own, the lab's, and the all-reduce of
    which it is half; medians of the slowest rank."""
    results = launch(_race, ranks=preset.ranks, quiet=True, verify=False, hang_after=60)
    rows = [measured.Bar(name, 1e3 * max(statistics.median(result[name]) for result in results),
                         colour=palette.PHASES["communication"]) for name in results[0]]
    return measured.bars(rows, "ms", f"for 8 MiB on {preset.ranks} ranks, {results[0].backend}")


class _Times(dict):
    backend = ""


def _race() -> dict:
    torch.set_num_threads(1)
    size = ELEMENTS // dist.get_world_size() * dist.get_world_size()
    flat = torch.zeros(size, device=devices.device())
    shard = flat.new_empty(size // dist.get_world_size())
    flats = [flat.clone() for _ in range(ROUNDS + WARMUP)]  # the lab's takes over what it is given
    times = _Times(throughput.seconds_per_step({
        "all_reduce, keep a piece": lambda: dist.all_reduce(flat),
        "torch's reduce_scatter": lambda: reduce_scatter_single(shard, flat),
        "lab.reduce_scatter": lambda: reduce_scatter(flats.pop()).wait()}, ROUNDS, WARMUP))
    times.backend = dist.get_backend()
    return times
