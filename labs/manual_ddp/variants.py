"""The student's modules and torch's DDP, compared. A variant is a function that wraps a model; the
comparison that all notebooks share trains it as a strategy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from labs.exercises import comparison
from labs.exercises.comparison import Comparison
from labs.exercises.verdicts import shows
from labs.manual_ddp.checks.overlap import judged_buckets
from labs.meters.trace import Trace
from labs.meters.trace_file import record_trace
from labs.training import data
from labs.training.loop import labelled_step, train
from labs.training.presets import Preset
from labs.workers import devices
from labs.workers.channel import report
from labs.workers.launcher import launch

Wrap = Callable[[nn.Module], nn.Module]
RECORDED = 3  # traces of each variant


@dataclass(frozen=True)
class Observed:
    """One variant on one rank. buckets: the names of the parameters in each, None for a module
    without buckets of its own. traces: of RECORDED steps."""

    buckets: list[list[str]] | None
    traces: list[Trace]


@shows("2.10")
def compare(variants: Mapping[str, Wrap], preset: Preset, rounds: int = 7) -> Comparison:
    """Trains each variant (name -> function that wraps a model) on `preset.ranks` ranks. The
    variants take turns, so that a machine that slows down slows down all of them."""
    return comparison.compare({name: as_strategy(wrap) for name, wrap in variants.items()}, preset,
                              measure_memory=False, rounds=rounds, repeat=2, observe=observe,
                              quiet=True)


def as_strategy(wrap: Wrap) -> Callable:
    """The strategy that wraps the model and gives an optimizer its parameters."""
    def strategy(model, optimizer_class, **settings):
        module = judged_buckets(wrap)(model)
        return module, optimizer_class(module.parameters(), **settings)

    return strategy


def observe(module, optimizer, batch) -> Observed:
    """On a rank: the module's buckets, and traces of a few steps."""
    names = {id(parameter): name.removeprefix("module.").removeprefix("transformer.")
             for name, parameter in module.named_parameters()}
    buckets = [[names[id(p)] for p in bucket] for bucket in getattr(module, "buckets", [])]
    return Observed(buckets or None, [record_trace(lambda: labelled_step(module, optimizer, batch))
                                      for _ in range(RECORDED)])


def typical_step(by_rank: list[Observed]) -> list[Trace]:
    """One recorded step, a trace for each rank: the step with the median exposed communication, so
    that a delay of the machine is not taken for the variant's."""
    steps = sorted(zip(*(observed.traces for observed in by_rank), strict=True),
                   key=lambda step: sum(trace.exposed_seconds for trace in step))
    return list(steps[len(steps) // 2])


def losses(wrap: Wrap, preset: Preset, steps: int, ranks: int) -> list[float]:
    """The full batch's loss at each step on `ranks` ranks. The batches are the same for any number
    of ranks: each rank trains on its share of `preset.ranks * preset.batch` sequences."""
    threads = devices.plan(preset.ranks).threads  # one rank gets no more of the cores than several

    def work():
        torch.set_num_threads(threads)
        pair = comparison.build(as_strategy(wrap), preset)
        for step, batch in enumerate(data.lm_batches(steps, preset.ranks * preset.batch,
                                                     preset.context)):
            share = {name: value.to(devices.device()) for name, value in
                     data.shard(batch, dist.get_rank(), ranks).items()}
            loss = torch.tensor(train(*pair, [share]), device=devices.device())
            dist.all_reduce(loss)
            report(step=step, total=steps, loss=loss / ranks)

    return launch(work, ranks=ranks, verify=False, hang_after=60).series["loss"]
