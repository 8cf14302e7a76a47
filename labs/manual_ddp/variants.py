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
from labs.words import counted
from labs.workers import devices
from labs.workers.channel import report
from labs.workers.launcher import launch
from labs.workers.progress import status

Wrap = Callable[[nn.Module], nn.Module]
RECORDED = 7  # traces of each variant
# Of the first variant's step, on a CPU: its bytes on the link, and one collective's latency. So
# sending takes half as long as computing, and a call for each tensor takes longer than its bytes:
# what the variants differ in is larger than what a busy machine adds.
LINK = (0.5, 0.01)


@dataclass(frozen=True)
class Observed:
    """One variant on one rank. buckets: the names of the parameters in each, None for a module
    without buckets of its own. traces: of RECORDED steps."""

    buckets: list[list[str]] | None
    traces: list[Trace]


@shows("2.10")
def compare(variants: Mapping[str, Wrap], preset: Preset, rounds: int = 5) -> Comparison:
    """Trains each variant (name -> function that wraps a model) on `preset.ranks` ranks. The
    variants take turns, so that a machine that slows down slows down all of them. On CPUs their
    collectives pass a slow link."""
    with status(f"{counted(len(variants), 'module')} take {rounds} turns"):
        return comparison.compare({name: as_strategy(wrap) for name, wrap in variants.items()},
                                  preset, measure_memory=False, rounds=rounds,
                                  observe=observe, link=LINK, quiet=True)


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


def shown_ranks(traces: list[Trace], most: int = 3) -> list[Trace]:
    """The traces of all ranks; where there are more than `most`, those of the first rank, of the
    one that computes longest, and of the last."""
    if len(traces) <= most:
        return traces
    slowest = max(traces, key=lambda trace: sum(trace.seconds_by_phase.values())
                  - trace.exposed_seconds)
    return [trace for trace in traces if trace in (traces[0], slowest, traces[-1])]


def recorded_steps(by_rank: list[Observed]) -> list[tuple[Trace, ...]]:
    """The recorded steps, each with a trace for each rank."""
    return list(zip(*(observed.traces for observed in by_rank), strict=True))


def fastest_step(by_rank: list[Observed]) -> list[Trace]:
    """One recorded step, a trace for each rank: the shortest, because a delay of the machine only
    makes a step longer."""
    return list(min(recorded_steps(by_rank),
                    key=lambda step: max(trace.seconds for trace in step)))


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
