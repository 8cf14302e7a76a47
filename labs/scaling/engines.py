"""The same fine-tuning under Accelerate and DeepSpeed, and on one device: what each rank holds and
sends in a step, how fast it is, and the table of that."""

import gc
import json
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from labs.checks.numbers import require_number
from labs.checks.scripts.files import raise_if_waiting
from labs.checks.verdicts import shows
from labs.meters import memory, throughput
from labs.meters.evidence import RankStepRecord, StepEvidence
from labs.meters.metrics import Metric
from labs.pictures.tables import Table
from labs.predictions.communication.traffic import passes
from labs.scaling.what_ran import named_by_student
from labs.training import data, fine_tuning, models, strategies
from labs.training.loop import train
from labs.workers import devices
from labs.workers.channel import report
from labs.workers.launcher import launch

BATCH = 2  # sequences of a rank in a step
ROUNDS = 5
_STEPS = 3  # before a step is counted: libraries set up in the first ones
# name -> (strategy, what has to be changed in a script of one device)
_ENGINES = {
    "DDP, by Accelerate": ("accelerate_ddp", "Accelerator(), prepare"),
    "FSDP2, by Accelerate": ("accelerate_fsdp2", "the same, and YAML"),
    "ZeRO-1, by DeepSpeed": ("deepspeed1", "initialize, engine.step, JSON"),
    "ZeRO-2, by DeepSpeed": ("deepspeed2", 'the same, "stage": 2'),
    "ZeRO-3, by DeepSpeed": ("deepspeed3", 'the same, "stage": 3')}


@dataclass(frozen=True)
class Engine:
    """One way to train. ranks: what each rank did in a step. peak: bytes of a step's highest moment
    on the rank that needs most. seconds: of a step by round, of the slowest rank. change: what has
    to be changed in the script of one device."""

    ranks: list[RankStepRecord]
    peak: float
    seconds: list[float]
    change: str

    @property
    def bytes_per_step(self) -> float:
        """Bytes of one rank's collectives in a step, an all-reduce counted twice: a rank sends
        (N-1)/N of them."""
        return sum(passes(call.kind) * call.bytes for call in self.ranks[0].calls)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together, in the median round."""
        step = statistics.median(self.seconds)
        return len(self.ranks) * BATCH * fine_tuning.CONTEXT / step


@dataclass(frozen=True)
class Engines:
    """engines: name -> Engine. alone: one device without any library. parameters: of the model."""

    engines: dict[str, Engine]
    alone: Engine
    parameters: int

    def __repr__(self):
        lines = [f"{name}: {engine.peak / 1e6:.1f} MB at the peak of a step, "
                 f"{engine.bytes_per_step / 1e6:.1f} MB in collectives, "
                 f"{engine.tokens_per_second:,.0f} tokens/s"
                 for name, engine in {"one device": self.alone, **self.engines}.items()]
        return "\n".join([f"a Qwen2 with {self.parameters:,} parameters, fp32, AdamW", *lines])

    def metrics(self) -> list[Metric]:
        """Of each engine the peak, the bytes of a step, and the seconds of a step."""
        return [metric for name, engine in self.engines.items() for metric in (
            Metric(f"{name}: peak of a step", engine.peak, "bytes"),
            Metric(f"{name}: collectives of a step", engine.bytes_per_step, "bytes"),
            Metric.of_rounds(f"{name}: step", engine.seconds))]


@shows("Engines")
def measure_engines(what_ran: Callable | None = None, efficiency: Callable | None = None,
                    ranks: int | None = None) -> Engines:
    """Trains the small Qwen2 under Accelerate's DDP and FSDP2, under DeepSpeed's three stages where
    DeepSpeed is installed, and on one device. what_ran, efficiency: the functions that
    `show_engines` needs; while one of them waits for its code, nothing is measured. ranks: None
    means what the machine offers."""
    if what_ran:
        raise_if_waiting(what_ran, 1)
    if efficiency:
        raise_if_waiting(efficiency, 3)
    chosen = {name: (getattr(strategies, strategy), change)
              for name, (strategy, change) in _ENGINES.items()
              if strategies.has_deepspeed() or not strategy.startswith("deepspeed")}
    work = {name: strategy for name, (strategy, _) in chosen.items()}
    ranks = ranks or devices.default_ranks()
    # verify=False: each collective would be announced to the launcher, and steps are timed here.
    by_rank = launch(_measure, work, ranks=ranks, verify=False, hang_after=60, timeout=None)
    [alone] = launch(_measure, {"": strategies.plain}, ranks=1, verify=False, timeout=None)
    engines = {name: _merged([found[name] for found in by_rank], chosen[name][1])
               for name in chosen}
    with torch.device("meta"):
        parameters = models.count_trainable(fine_tuning.qwen2())
    return Engines(engines, _merged([alone[""]], "nothing"), parameters)


def deepspeed_json(stage: int) -> str:
    """The configuration, as a JSON file has it, with which DeepSpeed trains the small Qwen2."""
    with torch.device("meta"):
        model = fine_tuning.qwen2()
    return json.dumps(strategies.deepspeed_config(model, stage), indent=2)


def _measure(chosen: Mapping[str, Callable]) -> dict[str, dict]:
    """On a rank: name -> what was measured."""
    os.environ.setdefault("DS_ACCELERATOR", devices.device().type)  # or DeepSpeed says it looks
    if devices.device().type == "cpu":
        torch.set_num_threads(1)  # a rank a core; kernels hold a buffer per thread
    found, steps = {}, {}
    for number, (name, strategy) in enumerate(chosen.items(), 1):
        report(step=number, total=len(chosen))
        built = {}
        # Two batches: the optimizer makes its state in the first step, so the second has the
        # typical peak.
        peak = memory.record(partial(_build, strategy, built), _batches(2),
                             held=strategies.resident_tensors).step_peak.total
        found[name] = {"peak": peak, "evidence": _evidence(*built["pair"])}
        steps[name] = partial(train, *built["pair"], _batches(1))
        gc.collect()  # what DeepSpeed leaves in cycles is none of the next strategy's memory
    seconds = throughput.seconds_per_step(steps, ROUNDS)
    return {name: {**found[name], "seconds": seconds[name]} for name in chosen}


def _build(strategy, built) -> tuple:
    built["pair"] = strategy(models.move_to_rank(fine_tuning.qwen2()), torch.optim.AdamW, lr=1e-3)
    return built["pair"]


def _batches(steps) -> list[dict[str, torch.Tensor]]:
    """On a rank: its own batches, on its device."""
    drawn = data.lm_batches(steps, BATCH, fine_tuning.CONTEXT, seed=1000 * dist.get_rank())
    return [{name: value.to(devices.device()) for name, value in batch.items()} for batch in drawn]


def _evidence(module, optimizer) -> RankStepRecord:
    """What a rank did in a step of the plain loop."""
    train(module, optimizer, _batches(_STEPS - 1))
    evidence = StepEvidence(fine_tuning.qwen2())
    with evidence:
        [batch] = _batches(1)
        module(**batch).loss.backward()
        evidence.note(module, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return evidence.of_this_rank()


def _merged(found, change) -> Engine:
    """What was measured on all ranks as one."""
    slowest = [max(times) for times in zip(*(one["seconds"] for one in found), strict=True)]
    return Engine([one["evidence"] for one in found], max(one["peak"] for one in found), slowest,
                  change)


@shows("6.11")
def show_engines(engines: Engines, what_ran: Callable, efficiency: Callable) -> Table:
    """A table of the engines: what the student's functions say of them, what they cost, and what
    has to be changed in a script of one device for each."""
    alone, rows = engines.alone.tokens_per_second, []
    for name, engine in {"one device": engines.alone, **engines.engines}.items():
        ran, _ = named_by_student(what_ran, engine.ranks, name)
        share = require_number(efficiency(len(engine.ranks), engine.tokens_per_second, alone),
                               f"the efficiency of {name}")
        rows.append((name, ran, engine.change, f"{engine.peak / 1e6:.1f}",
                     f"{engine.bytes_per_step / 1e6:.1f}", f"{engine.tokens_per_second:,.0f}",
                     f"{share:.0%}"))
    head = ("engine", "what ran", "change in the script", "MB at peak", "MB sent", "tokens/s",
            "efficiency")
    ranks = max(len(engine.ranks) for engine in engines.engines.values())
    return Table(f"A step of a Qwen2 with {engines.parameters:,} parameters, {ranks} ranks, fp32",
                 head, rows, left=2,
                 note="MB are of one rank; it sends (N-1)/N of those sent, in which an all-reduce "
                      "counts twice. Each rank's batch is as large as the one device's.")
