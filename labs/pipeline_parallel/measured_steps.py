"""What notebook 07b launches: a measured step of a schedule, the costs of a model's parts, and the
same training by several runtimes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from labs.checks.verdicts import shows
from labs.meters.traffic import Traffic
from labs.pictures.tables import Table
from labs.pipeline_parallel import torch_pipelining
from labs.pipeline_parallel.runner import PipelineRunner, RankRecord, run_step
from labs.pipeline_parallel.stages import (
    MicroBatch,
    even_layers,
    make_stages,
    sum_of_losses,
    whole_step,
)
from labs.predictions.pipelines import Schedule, require_legal
from labs.predictions.pipelines.simulate import Timeline, Times
from labs.training import data, models
from labs.training.presets import preset
from labs.workers import devices
from labs.workers.launcher import launch
from labs.workers.other_load import name_load

PACE = 0.06  # seconds that F, B and W take at least on a CPU, where ranks share its cores
STEPS = 3  # that are measured; the shortest is shown, which other programs disturbed least
_LLAMA_3_VOCABULARY = 31  # times as wide as the hidden states: 128,256 / 4,096


@dataclass(frozen=True)
class MeasuredStep:
    """A step of a schedule on ranks. times: medians by stage, in seconds, from which the simulation
    is made. activation_bytes: by stage, what one forward keeps. peaks: bytes, by rank. kept: of the
    bytes that a forward keeps, the share that is still there after a B that has a W. lengths: the
    seconds of all steps of which this is the shortest."""

    schedule: Schedule
    timeline: Timeline
    times: Times
    activation_bytes: list[int]
    peaks: list[int]
    kept: float
    loss: float
    lengths: Sequence[float] = ()


def measured_step(schedule: Schedule, paced: bool | None = None) -> MeasuredStep:
    """Runs STEPS steps of a small Llama by this schedule on real ranks and returns the shortest.
    paced: every action takes at least PACE (a whole backward twice that), because it
    sleeps for the rest; None: on a CPU. Raises IllegalSchedule before any rank is started."""
    require_legal(schedule)
    paced = not devices.gpus() if paced is None else paced
    name_load()
    by_rank = launch(_measured_steps, schedule, paced, ranks=len(schedule.ranks), quiet=True)
    steps = list(zip(*by_rank, strict=True))
    records = min(steps, key=_length)
    spans = [span for record in records for span in record.spans]
    return MeasuredStep(schedule, Timeline.from_measured(spans), _times(schedule, spans),
                        _activation_bytes(schedule, records), [record.peak for record in records],
                        _kept(schedule, records), sum(record.loss for record in records),
                        list(map(_length, steps)))


def small_llama(layers: int) -> nn.Module:
    """A Llama of this machine's preset, with this number of layers."""
    sizes = preset()
    return models.llama(layers=layers, hidden=sizes.hidden, heads=sizes.heads,
                        kv_heads=sizes.heads // 2, context=sizes.context)


def lm_micro_batches(number: int, sequences: int, context: int, seed: int = 0) -> list[MicroBatch]:
    """Micro-batches of real text on this rank's device: the targets are the tokens that follow."""
    windows = data.windows(number * sequences, context, seed).to(devices.device())
    return [{"input_ids": window[:, :-1], "targets": window[:, 1:]}
            for window in windows.chunk(number)]


def _length(records) -> float:
    spans = [span for record in records for span in record.spans]
    return max(span.end for span in spans) - min(span.begin for span in spans)


def _measured_steps(schedule, paced) -> list[RankRecord]:
    pace = {"F": PACE, "B": PACE, "W": PACE} if paced else {}
    if paced and not any(action.kind == "W" for action in schedule.everything):
        pace["B"] = 2 * PACE
    model, rank = small_llama(2 * schedule.stages), torch.distributed.get_rank()
    stages = make_stages(model, even_layers(2 * schedule.stages, schedule.stages),
                         range(rank, schedule.stages, len(schedule.ranks)))
    del model
    runner = PipelineRunner(schedule, stages, at_least=pace)
    batches = lm_micro_batches(schedule.micro_batches, 2, preset().context)
    runner.step(batches)  # the first one makes what later ones find: buffers, threads
    records = []
    for _ in range(STEPS):
        torch.distributed.barrier()
        records.append(runner.step(batches))
    return records


def _times(schedule, spans) -> Times:
    """Medians of the durations of each kind and stage; the shortest time from the end of an action
    to the begin of the one that receives its result."""
    ends = {span.action: span.end for span in spans}
    by_kind = {kind: [0.0] * schedule.stages for kind in "FBW"}
    for kind, found in by_kind.items():
        for stage in range(schedule.stages):
            durations = [span.end - span.begin for span in spans
                         if (span.action.kind, span.action.stage) == (kind, stage)]
            found[stage] = median(durations) if durations else 0.0
    # The shortest gap is a message alone: in a longer one the receiver computed something else
    # first.
    gaps = [span.begin - ends[source] for span in spans
            if (source := schedule.source(span.action))]
    return Times(by_kind["F"], by_kind["B"], by_kind["W"], max(0.0, min(gaps, default=0.0)))


def _activation_bytes(schedule, records) -> list[int]:
    found = [0] * schedule.stages
    for record in records:
        for span, before, after in _changes(record):
            if span.action.kind == "F":
                found[span.action.stage] = max(found[span.action.stage], after - before)
    return found


def _kept(schedule, records) -> float:
    """Of the bytes that forwards keep, those that backwards leave to W."""
    # A split B frees a part of what its forward kept (after < before); 1 means it frees nothing.
    shares = [1 + (after - before) / size for record in records
              for size in [max(1, *(after - before for _, before, after in _changes(record)))]
              for span, before, after in _changes(record) if span.action.kind == "B"
              and schedule.is_split(span.action.stage, span.action.micro_batch)]
    return median(shares) if shares else 1.0


def _changes(record):
    return zip(record.spans, [0, *record.in_flight], record.in_flight, strict=False)


def show_stage(layers: Sequence[int], number: int) -> nn.Module:
    """Stage `number` of a small Llama, whose display lists its modules. layers: how many layers
    each stage has."""
    return make_stages(small_llama(sum(layers)), layers, [number])[number]


@shows("Seconds of the parts")
def show_part_seconds(layers: int = 4, repeats: int = 5) -> Table:
    """Measures forward and backward of the parts of a small Llama with Llama-3-8B's proportions
    (vocabulary 31 times the hidden size, MLP 3.5 times). Medians, on one rank."""
    name_load()
    seconds = launch(_part_seconds, layers, repeats, ranks=1, quiet=True)[0]
    rows = [(part, f"{1e3 * found:.2f}", f"{found / seconds['layer']:.2f}")
            for part, found in seconds.items()]
    return Table("Forward and backward of a small Llama with Llama-3-8B's proportions",
                 ("part", "ms", "in layers"), rows)


def _part_seconds(layers, repeats) -> dict[str, float]:
    """On a rank: "embedding", "layer" and "head" (with the loss) -> seconds."""
    torch.set_num_threads(1)
    sizes = preset()
    model = models.move_to_rank(models.llama(
        layers=layers, hidden=sizes.hidden, heads=sizes.heads, kv_heads=sizes.heads // 4,
        context=sizes.context, vocabulary=_LLAMA_3_VOCABULARY * sizes.hidden))
    batch, = lm_micro_batches(1, sizes.batch, sizes.context)
    # The embedding alone, the layers alone, the last norm and the head alone.
    stages = make_stages(model, [0, layers, 0], range(3))
    hidden = stages[0](batch["input_ids"]).detach().requires_grad_()  # (batch, sequence, hidden)
    runs = {"embedding": lambda: stages[0](batch["input_ids"]).sum(),
            "layer": lambda: stages[1](hidden).sum(),
            "head": lambda: sum_of_losses(stages[2](hidden), batch["targets"])}
    # One more than asked for: the first is slower, and a median does not see it.
    found = {name: median(_seconds(run) for _ in range(repeats + 1)) for name, run in runs.items()}
    return found | {"layer": found["layer"] / layers}


def _seconds(run) -> float:
    devices.synchronize()
    began = time.perf_counter()
    run().backward()
    devices.synchronize()
    return time.perf_counter() - began


def losses_by_runtime(schedules: Mapping[str, Schedule], ranks: int = 2, micro_batches: int = 4,
                      steps: int = 2) -> dict[str, Sequence[float]]:
    """Trains the same small Llama with torch's schedules, with each of these in torch's runtime
    (or in ours, where torch's cannot be had: the name says so), and with our runner. name -> the
    losses of the steps."""
    results = launch(_losses_by_runtime, dict(schedules), micro_batches, steps, ranks=ranks,
                     quiet=True)
    return {name: next(by_name[name] for by_name in results if by_name[name])
            for name in results[0]}


@dataclass(frozen=True)
class TrainedRank:
    """What a rank had and sent while it trained. layers: of its stages. messages, bytes: that it
    sent in one step. losses: of the last stage; empty elsewhere."""

    layers: int
    parameters: int
    messages: int
    bytes: int
    losses: list[float]


def train_on_ranks(run_actions: Callable, schedule: Schedule,
                   steps: int = 5) -> tuple[list[TrainedRank], list[float]]:
    """Trains this machine's small Llama by a student's run_actions: what each rank did, and the
    losses of one process that trains the same."""
    ranks = launch(_train_rank, run_actions, schedule, steps, ranks=len(schedule.ranks), quiet=True)
    alone = launch(_train_alone, schedule.micro_batches, steps, ranks=1, quiet=True)[0]
    return list(ranks), alone


def _train_rank(run_actions, schedule, steps) -> TrainedRank:
    layers = even_layers(preset().layers, schedule.stages)
    numbers = range(torch.distributed.get_rank(), schedule.stages, len(schedule.ranks))
    stages = make_stages(small_llama(preset().layers), layers, numbers)
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer, losses = torch.optim.SGD(parameters, **torch_pipelining.SGD), []
    for batches in _batches(schedule.micro_batches, steps):
        with Traffic() as traffic:
            losses.append(float(run_step(run_actions, schedule, stages, batches) or 0))
        optimizer.step()
        optimizer.zero_grad()
    sent = traffic.of("send")
    return TrainedRank(sum(layers[number] for number in numbers),
                       sum(p.numel() for p in parameters),
                       len(sent), sum(call.bytes for call in sent),
                       losses if schedule.stages - 1 in stages else [])


def _train_alone(micro_batches, steps) -> list[float]:
    torch.set_num_threads(1)  # as a rank: two threads wait for each other where cores are busy
    model = models.move_to_rank(small_llama(preset().layers))
    optimizer, losses = torch.optim.SGD(model.parameters(), **torch_pipelining.SGD), []
    for batches in _batches(micro_batches, steps):
        losses.append(whole_step(lambda tokens: model(input_ids=tokens).logits, batches))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _batches(micro_batches, steps) -> list[list[MicroBatch]]:
    return [lm_micro_batches(micro_batches, 2, preset().context, seed=step)
            for step in range(steps)]


def _losses_by_runtime(schedules, micro_batches, steps) -> dict[str, Sequence[float]]:
    model = models.llama(layers=8, hidden=32, context=16)
    batches = [lm_micro_batches(micro_batches, 2, 16, seed=step) for step in range(steps)]
    found = {}
    for name, schedule in schedules.items():
        found[f"{name}, our runner"] = torch_pipelining.losses_with_our_runner(
            schedule, model, batches)
        whose, losses = torch_pipelining.losses_of_schedule(schedule, model, batches)
        found[f"{name}, {whose}"] = losses
    for name in torch_pipelining.CLASSES:
        found[f"torch's {name}"] = torch_pipelining.losses_of_torchs_class(name, model, batches)
    return found
