"""The same stages through torch.distributed.pipelining: its schedules, and one of ours in its
runtime."""

import inspect
import tempfile
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from labs.pipeline_parallel.runner import PipelineRunner
from labs.pipeline_parallel.stages import (
    MicroBatch,
    Stage,
    count_targets,
    even_layers,
    make_stages,
    sum_of_losses,
)
from labs.predictions.pipelines import Schedule, require_legal
from labs.workers import devices

# torch's class -> stages on each rank. ZBVZeroBubble's second one comes back along the ranks: with
# p ranks, stages r and 2p - 1 - r are on rank r.
CLASSES = {"ScheduleGPipe": 1, "Schedule1F1B": 1, "ScheduleInterleaved1F1B": 2,
           "ScheduleInterleavedZeroBubble": 2, "ScheduleZBVZeroBubble": 2}
SGD = {"lr": 0.1, "momentum": 0.9}


def losses_of_torchs_class(name: str, model: nn.Module,
                           steps: Sequence[Sequence[MicroBatch]]) -> list:
    """On a rank: trains with one of CLASSES; the loss of each step on the rank that has the last
    stage, else an empty list."""
    from torch.distributed import pipelining

    ranks, rank, chunks = dist.get_world_size(), dist.get_rank(), CLASSES[name]
    numbers = range(rank, ranks * chunks, ranks)
    if name == "ScheduleZBVZeroBubble":
        numbers = (rank, 2 * ranks - 1 - rank)
    return _train(model, steps, ranks * chunks, numbers, getattr(pipelining, name),
                  takes_list=chunks > 1)


def losses_of_schedule(schedule: Schedule, model: nn.Module,
                       steps: Sequence[Sequence[MicroBatch]]) -> tuple[str, list]:
    """On a rank: trains by this schedule in torch's runtime, or in ours where torch's private one
    has changed: (whose, the loss of each step on the rank of the last stage, else [])."""
    require_legal(schedule)  # torch's sentence names no rank for every mistake
    numbers = range(dist.get_rank(), schedule.stages, len(schedule.ranks))
    make = _torchs_runtime(schedule)
    if make is None:
        return "our runner", losses_with_our_runner(schedule, model, steps)
    return "torch's runtime", _train(model, steps, schedule.stages, numbers, make, takes_list=True)


def losses_with_our_runner(schedule: Schedule, model: nn.Module,
                           steps: Sequence[Sequence[MicroBatch]]) -> list:
    """On a rank: trains by this schedule with our runner."""
    layers = even_layers(model.config.num_hidden_layers, schedule.stages)
    numbers = range(dist.get_rank(), schedule.stages, len(schedule.ranks))
    stages = make_stages(model, layers, numbers)
    runner, optimizer = PipelineRunner(schedule, stages, recorded=False), _optimizer(stages)
    losses = []
    for batches in steps:
        losses.append(runner.step(batches).loss)
        _update(optimizer)
    return losses if schedule.stages - 1 in stages else []


def _train(model, steps, total, numbers, schedule_class: Callable, takes_list) -> list:
    """Trains with a schedule of torch's. It cuts a batch into micro-batches of equal size."""
    from torch.distributed.pipelining import PipelineStage

    micro_batches = len(steps[0])
    if micro_batches < dist.get_world_size():
        raise ValueError(f"torch's schedules need at least as many micro-batches as ranks; there "
                         f"are {micro_batches} for {dist.get_world_size()}")
    stages = make_stages(model, even_layers(model.config.num_hidden_layers, total), numbers)
    wrapped = [PipelineStage(stage, number, total, devices.device())
               for number, stage in stages.items()]
    # torch takes one loss_fn for all steps, so the number of targets is in a list that each step
    # changes.
    targets = [0]

    def loss_of(logits, wanted):
        return sum_of_losses(logits, wanted) / targets[0]

    # scale_grads divides by the number of micro-batches: our loss is scaled already.
    schedule = schedule_class(wrapped if takes_list else wrapped[0], micro_batches,
                              loss_fn=loss_of, scale_grads=False)
    optimizer, found = _optimizer(stages), []
    for batches in steps:
        targets[0] = count_targets(batches)
        losses: list[torch.Tensor] = []
        _step(schedule, stages, batches, losses)
        found.append(sum(loss.item() for loss in losses))
        _update(optimizer)
    return found if total - 1 in stages else []


def _step(schedule, stages: dict[int, Stage], batches, losses):
    # torch splits the batch itself, into equal micro-batches: (micro-batches · batch, sequence).
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    given = [whole["input_ids"]] if any(stage.is_first for stage in stages.values()) else []
    if any(stage.is_last for stage in stages.values()):
        schedule.step(*given, target=whole["targets"], losses=losses)
    else:
        schedule.step(*given)


def _torchs_runtime(schedule: Schedule) -> Callable | None:
    """What makes torch's runtime of this schedule, as its classes make theirs; None where this
    version of torch has no such private class."""
    try:
        from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as Runtime
    except ImportError:
        return None
    load = getattr(Runtime, "_load_csv", None)
    if load is None or "format" not in inspect.signature(load).parameters:
        return None

    def make(stages, micro_batches, **settings):
        runtime = Runtime(stages, micro_batches, **settings)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "schedule.csv"
            path.write_text(schedule.to_text() + "\n")
            runtime._load_csv(str(path), format="compute_only")
        return runtime

    return make


def _optimizer(stages) -> torch.optim.Optimizer:
    return torch.optim.SGD(chain(*(stage.parameters() for stage in stages.values())), **SGD)


def _update(optimizer):
    optimizer.step()
    optimizer.zero_grad()
