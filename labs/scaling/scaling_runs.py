"""Weak and strong scaling, measured on 1 to N ranks of one launch: numbers of ranks take turns, so
that whatever else the machine does disturbs all of them.

On a CPU each rank computes with one thread, so that one rank uses one core, and its collectives
pass a slow link: gloo itself would take the cores of the ranks.
"""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from labs.checks import comparison
from labs.meters import throughput
from labs.meters.metrics import Metric
from labs.training import models, presets
from labs.training.loop import ModuleAndOptimizer, train
from labs.training.presets import Preset
from labs.words import counted
from labs.workers import devices
from labs.workers.launcher import launch
from labs.workers.other_load import name_load
from labs.workers.slow_link import Link, link_bytes, slow_link

ROUNDS, TRIES = 5, 2  # tries: while strong scaling seems to lose less than weak scaling
# Of a step of one rank alone: how long the bytes of all gradients take, and the latency of one
# collective. In strong scaling the bytes stay, and the computing that could hide them does not.
BYTES, LATENCY = 0.5, 0.01
MOST_ON_A_CPU = 8  # ranks that have a core each: more would only take longer to start


@dataclass(frozen=True)
class Scaling:
    """What was measured. weak, strong: ranks -> tokens per second of all ranks together, the median
    round. own: the most ranks that have a core or a GPU of their own."""

    preset: Preset
    weak: dict[int, float]
    strong: dict[int, float]
    own: int

    def __repr__(self):
        def line(ranks):
            return (f"{ranks} rank{'s' * (ranks > 1)}: {self.weak[ranks]:,.0f} tokens/s weak, "
                    f"{self.strong[ranks]:,.0f} strong")

        return "\n".join([f"median of {ROUNDS} rounds, {self.preset.batch} × "
                          f"{self.preset.context} tokens on 1 rank", *map(line, self.weak)])

    def metrics(self) -> list[Metric]:
        """The throughputs, of all ranks together."""
        return [Metric(f"{kind} scaling, {counted(ranks, 'rank')}: throughput", found, "tokens/s")
                for kind, by_ranks in (("weak", self.weak), ("strong", self.strong))
                for ranks, found in by_ranks.items()]


def rank_counts() -> tuple[list[int], int]:
    """Returns (numbers of ranks to measure, the most that have a core or a GPU of their own): 1, 2,
    4 … of those, and once twice as many."""
    own = max(1, devices.gpus() or min(MOST_ON_A_CPU, devices.cores()))
    counts = [1]
    while 2 * counts[-1] <= own:
        counts.append(2 * counts[-1])
    if counts[-1] < own:
        counts.append(own)
    return ([*counts, 2 * own] if own < 8 or not devices.gpus() else counts), own


def measure_scaling(preset: Preset | None = None, rounds: int = ROUNDS) -> Scaling:
    """Trains the preset's GPT-2 with DDP and returns its throughput by number of ranks. preset: of
    one rank; its batch becomes one that every number of ranks divides."""
    counts, own = rank_counts()
    most = counts[-1]
    chosen = preset or small_preset()
    chosen = replace(chosen, ranks=most, batch=-(-chosen.batch // most) * most)
    name_load()
    for _ in range(TRIES):
        # One launch of the most ranks: those that do not take part wait in the next barrier.
        by_rank = launch(_measure, chosen, counts, rounds, ranks=most, quiet=True, verify=False,
                         hang_after=60, timeout=None)
        found = Scaling(chosen, *(_throughputs(by_rank, kind, chosen, counts)
                                  for kind in ("weak", "strong")), own)
        if all(found.strong[n] < found.weak[n] for n in counts[1:]):
            break  # else the machine was busy in some rounds
    return found


def _throughputs(by_rank, kind, preset, counts) -> dict[int, float]:
    """Ranks -> tokens per second of all together."""
    tokens = preset.batch * preset.context
    return {n: (n if kind == "weak" else 1) * tokens / _seconds(by_rank, kind, n) for n in counts}


def small_preset() -> Preset:
    """Returns this machine's preset; on a laptop a smaller one, since ranks that take turns take
    their time."""
    chosen = presets.preset()
    return replace(chosen, layers=4) if chosen.name == "laptop" else chosen


def _seconds(by_rank, kind, ranks) -> float:
    """Seconds of a step: of the slowest rank, which the others wait for, the median round."""
    name = "weak" if ranks == 1 else kind  # with one rank they are the same run
    rounds = [one[f"{name} {ranks}"] for one in by_rank[:ranks]]
    return throughput.Timing.of([max(ranks) for ranks in zip(*rounds, strict=True)]).median


def _measure(preset, counts, rounds) -> dict[str, list[float]]:
    """On a rank: name of a run, such as "strong 2" -> seconds of a step by round."""
    one_thread()
    # All ranks make all groups, those that they are not in, too.
    groups = {n: dist.new_group(list(range(n))) for n in counts if n > 1}
    steps = {}
    for n in counts:
        for kind, batch in (("weak", preset.batch), ("strong", preset.batch // n)):
            if n > 1 or kind == "weak":
                steps[f"{kind} {n}"] = _step(replace(preset, batch=batch), n, groups.get(n))
    link = link_for(preset, steps["weak 1"], BYTES)
    with slow_link(link) if link else contextlib.nullcontext():
        return throughput.seconds_per_step(steps, rounds, warmup=1)


def _step(preset, ranks, group) -> Callable:
    """On a rank: a step on so many ranks; nothing on a rank that does not take part in it."""
    if dist.get_rank() >= ranks:
        return lambda: None
    module, optimizer = comparison.build(partial(ddp_in, group, preset.cap_bytes), preset)
    return partial(train, module, optimizer, comparison.batches(preset, 1))


def ddp_in(group, cap_bytes: int, model, optimizer_class, **settings) -> ModuleAndOptimizer:
    """The strategy of these runs: torch's DDP among the ranks of a group; without one the model as
    it is, for a rank that trains alone."""
    module = model if group is None else DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=cap_bytes / 2**20)
    return module, optimizer_class(module.parameters(), **settings)


def one_thread() -> None:
    """On a rank: one rank a core, also for a rank that is alone on the machine."""
    if devices.device().type == "cpu":
        torch.set_num_threads(1)


def link_for(preset: Preset, alone: Callable, share: float) -> Link | None:
    """On each rank: a slow link on which the gradients of the preset's model take `share` of the
    seconds of a step of one rank, `alone`, which rank 0 runs; None on GPUs.

    By the clock on the wall, because other programs make computing slower, and not the link.
    """
    if devices.device().type != "cpu":
        return None  # a GPU's link is its own
    found = torch.zeros(1)
    if dist.get_rank() == 0:
        found += throughput.Timing.of([timed(alone) for _ in range(5)]).median
    dist.all_reduce(found)
    with torch.device("meta"):
        nbytes = 4 * models.count_trainable(comparison.model_of(preset))
    seconds = found.item()
    return Link(link_bytes("all_reduce", nbytes, 2) / (share * seconds), LATENCY * seconds)


def timed(step: Callable) -> float:
    """Returns the seconds of step() by the clock on the wall."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def efficiencies(throughputs: Mapping[int, float]) -> dict[int, float]:
    """Returns ranks -> throughput_N / (N · throughput_1)."""
    return {n: found / (n * throughputs[1]) for n, found in throughputs.items()}
