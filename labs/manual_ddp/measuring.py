"""Measures variants of data parallelism side by side: traffic, timeline and throughput."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from labs.exercises.verdicts import shows
from labs.manual_ddp import twin as twins
from labs.manual_ddp.buckets import complete_buckets
from labs.meters import throughput, trace_file
from labs.meters.traffic import Traffic
from labs.training import data, loop, models
from labs.training.presets import Preset
from labs.workers import devices
from labs.workers.channel import report
from labs.workers.launcher import launch

RECORDED = 3  # steps of each variant that are recorded; the typical one is shown


@dataclass(frozen=True)
class Measured:
    """What `measure` found, by variant. traffic: one rank's calls of one step. timelines: one per
    rank. tokens_per_s: all ranks together. seconds: per step, by rank and round. parameters,
    tensors: how many numbers, and how many tensors of them, the model trains."""

    preset: Preset
    parameters: int
    tensors: int
    traffic: dict
    timelines: dict
    tokens_per_s: dict
    seconds: list
    buckets: dict

    def __repr__(self):
        return (f"measured {len(self.traffic)} variants on {self.preset.ranks} ranks: "
                f"{self.parameters:,} parameters in {self.tensors} tensors")


def torch_ddp(model, cap_bytes: int = None):
    """torch's own DistributedDataParallel, with buckets of the same size."""
    cap = {} if cap_bytes is None else {"bucket_cap_mb": cap_bytes / 2**20}
    return DistributedDataParallel(model, **cap)


def build(wrap, preset):
    """On a rank: (module, optimizer) of one variant, on the rank's device."""
    model = models.gpt2(preset.layers, preset.hidden, preset.heads, preset.context)
    module = complete_buckets(wrap)(model.to(devices.device()))
    return module, torch.optim.AdamW(module.parameters(), lr=1e-3)


def batches(preset, steps: int) -> list:
    """On a rank: its own batches, on its device."""
    rank = dist.get_rank()
    return [{name: value.to(devices.device()) for name, value in batch.items()}
            for batch in data.lm_batches(steps, preset.batch, preset.context, seed=1000 * rank)]


@shows("2.10")
def measure(variants: dict, preset: Preset, rounds: int = 7) -> Measured:
    """Trains each variant (name -> function that wraps a model) on `preset.ranks` ranks."""
    results = launch(_measure, variants, preset, rounds, ranks=preset.ranks, quiet=True,
                     verify=False, hang_after=60)
    first = results[0]
    return Measured(
        preset, first["parameters"], first["tensors"], first["traffic"],
        {name: _typical([result["timelines"][name] for result in results]) for name in variants},
        throughput.tokens_per_second([result["seconds"] for result in results], preset.tokens),
        [result["seconds"] for result in results], first["buckets"])


def _typical(by_rank) -> list:
    """One recorded step for each rank: the one with the median exposed communication, so that a
    hiccup of the machine is not what is looked at."""
    steps = sorted(zip(*by_rank, strict=True), key=lambda step: sum(
        line.exposed_seconds for line in step))
    return list(steps[len(steps) // 2])


def race_variants(variants: dict, preset: Preset, rounds: int) -> list:
    """By rank: variant -> seconds per step of each round, the variants taking turns."""
    def work():
        built = {name: build(wrap, preset) for name, wrap in variants.items()}
        batch = batches(preset, 1)[0]
        steps = {name: _step(*parts, batch) for name, parts in built.items()}
        return throughput.seconds_per_step(steps, rounds, repeat=2)

    return launch(work, ranks=preset.ranks, quiet=True, verify=False, hang_after=60)


def _measure(variants, preset, rounds) -> dict:
    built = {name: build(wrap, preset) for name, wrap in variants.items()}
    batch = batches(preset, 1)[0]
    steps = {name: _step(*parts, batch) for name, parts in built.items()}
    seconds = throughput.seconds_per_step(steps, rounds, repeat=2)
    traffic = {name: _traffic(step) for name, step in steps.items()}
    timelines = {name: [record(*parts, batch) for _ in range(RECORDED)]
                 for name, parts in built.items()}
    model = next(iter(built.values()))[0]
    return {"parameters": models.count_trainable(model), "tensors": len(models.trainable(model)),
            "traffic": traffic, "timelines": timelines,
            "seconds": seconds, "buckets": {name: bucket_names(module)
                                            for name, (module, _) in built.items()}}


def _step(module, optimizer, batch):
    def step():
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def record(module, optimizer, batch):
    """On a rank: the trace of one step."""
    return trace_file.record_trace(lambda: loop.labelled_step(module, optimizer, batch))


def _traffic(step):
    with Traffic() as traffic:
        step()
    return traffic.calls


def bucket_names(module):
    """Names of the parameters in each bucket, or None for a module that does not tell."""
    names = {id(parameter): name.removeprefix("module.").removeprefix("transformer.")
             for name, parameter in module.named_parameters()}
    return [[names[id(p)] for p in bucket] for bucket in getattr(module, "buckets", [])] or None


def train(wrap, preset, steps: int, ranks: int) -> list:
    """The full batch's loss at each step of a training on `ranks` ranks. The batches do not depend
    on `ranks`: each rank gets its share of the same `preset.ranks * preset.batch` sequences."""
    threads = devices.plan(preset.ranks).threads  # one rank gets no more of the cores than several

    def work():
        torch.set_num_threads(threads)
        module, optimizer = build(wrap, preset)
        share = [data.shard(batch, dist.get_rank(), ranks) for batch in
                 data.lm_batches(steps, preset.ranks * preset.batch, preset.context)]
        for step, batch in enumerate(share):
            batch = {name: value.to(devices.device()) for name, value in batch.items()}
            loss = module(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            report(step=step, total=steps, loss=mean / ranks)

    return launch(work, ranks=ranks, verify=False, hang_after=60).series["loss"]


def gradients_before_and_after(average_gradients) -> list:
    """On a rank: [(name, gradient before, gradient after)] of the small model with traps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = models.EdgeCaseModel(seed=0)
    [batch] = data.xy_batches(1, twins.BATCH)
    model(**data.shard(batch, rank, ranks), use_all=rank == 0).loss.backward()
    before = twins.gradients(model)
    average_gradients(model)
    return [(name, before[name], after) for name, after in twins.gradients(model).items()]
