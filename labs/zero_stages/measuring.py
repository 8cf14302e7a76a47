"""Measures the student's three stages beside the real libraries: memory and traffic of a step."""

import re
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from labs.exercises.verdicts import shows
from labs.meters import memory
from labs.meters.traffic import Traffic
from labs.predictions.memory import predict
from labs.predictions.memory_recipes import model_states
from labs.predictions.traffic import passes, stage_passes
from labs.training import data, models, strategies
from labs.training.memory_categories import Memory
from labs.training.presets import Preset
from labs.training.presets import preset as preset_named
from labs.workers.channel import report
from labs.workers.launcher import launch

SETTINGS = {"lr": 1e-3}


@dataclass(frozen=True)
class Kind:
    """What a strategy is expected to do. stage: of ZeRO; its memory after backward is that stage's.
    passes: collective -> how often all Ψ elements go through it in a step. gathered: bytes of a
    parameter's element as it travels. tape: options of labs.predictions.memory.predict, which plays
    a whole step, where it knows this very library."""

    strategy: object
    stage: int
    passes: dict
    gathered: int = 4
    tape: dict = None

    def travels(self) -> float:
        """How many Ψ travel in a step, an all-reduce counted twice."""
        return sum(passes(kind) * often for kind, often in self.passes.items())

    def bytes(self, parameters: int) -> float:
        """The same in bytes."""
        each = {"all_gather": self.gathered}
        return parameters * sum(passes(kind) * often * each.get(kind, 4)
                                for kind, often in self.passes.items())


@dataclass(frozen=True)
class Result:
    """One strategy, measured. report: memory of one rank (of the one that keeps most states).
    calls: one rank's collectives in one step. losses: of every step, mean over the ranks.
    predicted: phase -> Memory, "peak" among them, or {}."""

    kind: Kind
    report: memory.Report
    calls: list
    losses: list
    predicted: dict

    def elements(self) -> dict:
        """Collective -> elements that went through it."""
        return self._sums(lambda call: call.elements)

    def bytes(self) -> dict:
        """Collective -> logical bytes that went through it."""
        return self._sums(lambda call: call.bytes)

    def _sums(self, size) -> dict:
        found = {}
        for call in self.calls:
            found[call.kind] = found.get(call.kind, 0) + size(call)
        return {kind: total for kind, total in found.items() if total}

    def travels(self, parameters: int) -> float:
        """How many Ψ travel in a step, an all-reduce counted twice; each rank sends (N-1)/N."""
        return sum(passes(kind) * n for kind, n in self.elements().items()) / parameters


@dataclass(frozen=True)
class Compared:
    """What `compare` found. parameters: Ψ. results: name -> Result."""

    preset: Preset
    parameters: int
    results: dict

    def __repr__(self):
        lines = [f"{name:26s} {result.travels(self.parameters):.1f}Ψ per step, "
                 f"{result.report.phases['backward'].total / 1e6:.1f} MB after backward"
                 for name, result in self.results.items()]
        return "\n".join([f"{self.preset.ranks} ranks, {self.parameters:,} parameters (Ψ), fp32, "
                          "AdamW", *lines])

    def states(self, name: str) -> Memory:
        """Parameters, gradients and optimizer state of one rank by formula, in bytes."""
        return model_states(self.parameters, ranks=self.preset.ranks,
                            stage=self.results[name].kind.stage)


@shows("3.8")
def compare(mine: dict, preset: Preset) -> Compared:
    """Trains every strategy of `mine` (name -> strategy; the digit in the name is its stage) and
    those of the libraries that are installed, one after the other, and records what it holds and
    sends. It runs on the CPU, where every allocation can be seen; a preset for GPUs is cut down."""
    size = _on_cpu(preset)
    kinds = {**_baseline(), **{name: _mine(name, strategy) for name, strategy in mine.items()},
             **_libraries()}
    by_rank = launch(_record_all, {name: kind.strategy for name, kind in kinds.items()}, size,
                     ranks=size.ranks, verify=False, device="cpu", hang_after=60)
    results = {name: _result(kind, size, [found[name] for found in by_rank])
               for name, kind in kinds.items()}
    return Compared(size, models.count_trainable(_model(size)), results)


def _record_all(chosen, size) -> dict:
    """On a rank: strategy name -> what `record` returns, one after the other."""
    torch.set_num_threads(1)
    found = {}
    for number, (name, strategy) in enumerate(chosen.items()):
        found[name] = record(strategy, size)
        report(step=number, total=len(chosen))
    return found


def _on_cpu(preset) -> Preset:
    """With one sequence per rank, so that activations, which no stage changes, do not hide the
    rest."""
    laptop = preset_named("laptop")
    small = preset.hidden * preset.layers <= 4 * laptop.hidden * laptop.layers
    chosen = preset if small else replace(laptop, ranks=min(preset.ranks, 4))
    return replace(chosen, batch=1)


def _baseline() -> dict:
    return {"DDP": Kind(strategies.ddp, 0, stage_passes(0), tape={"strategy": "ddp"})}


def _mine(name, strategy) -> Kind:
    digit = re.search(r"[123]", name)
    if not digit:
        raise ValueError(f"{name!r} does not say which stage it is: name it, say, 'ZeRO-2'")
    return Kind(strategy, int(digit[0]), stage_passes(int(digit[0])))


def _libraries() -> dict:
    """What torch and, if it is installed, DeepSpeed have; DeepSpeed's first two stages all-reduce
    gradients, whatever the paper says (`use_multi_rank_bucket_allreduce`, on by default)."""
    half = partial(strategies.fsdp2, mp_policy=_half())
    found = {
        "ZeroRedundancyOptimizer": Kind(
            strategies.zero_redundancy, 1, {"all_reduce": 1, "broadcast": 1},
            tape={"strategy": "zero1"}),
        "FSDP2, no reshard": Kind(
            strategies.fsdp2_no_reshard, 3, stage_passes(3, reshard=False),
            tape={"strategy": "fsdp2", "reshard": False}),
        "FSDP2": Kind(strategies.fsdp2, 3, stage_passes(3), tape={"strategy": "fsdp2"}),
        "FSDP2, bf16 gathers": Kind(
            half, 3, stage_passes(3), gathered=2,
            tape={"strategy": "fsdp2", "recipe": "bf16 policy"}),
    }
    if strategies.has_deepspeed():
        found |= {f"DeepSpeed {stage}": Kind(strategy, stage, {"all_reduce": 1, "all_gather": 1})
                  for stage, strategy in ((1, strategies.deepspeed1), (2, strategies.deepspeed2))}
        found["DeepSpeed 3"] = Kind(strategies.deepspeed3, 3, stage_passes(3))
    return found


def _half():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _result(kind, size, by_rank) -> Result:
    losses = [sum(step) / size.ranks for step in zip(*(one[2] for one in by_rank), strict=True)]
    return Result(kind, _fullest([one[0] for one in by_rank]), by_rank[0][1], losses,
                  _predicted(kind, size))


def _fullest(reports) -> memory.Report:
    """Of the ranks that keep most states the leanest, phase by phase: a thread of gloo may free a
    tensor unseen, and nothing makes a rank seem to hold less than it does."""
    most = max(map(_states, reports))
    return memory.leanest([one for one in reports if _states(one) > 0.99 * most])


def _predicted(kind, size) -> dict:
    if kind.tape is None:
        return {}
    return predict(_model(size).config, batch=size.batch, sequence=size.context, ranks=size.ranks,
                   **kind.tape)


def _states(report) -> float:
    held = report.phases["backward"]
    return held.parameters + held.gradients + held.optimizer_state


def record(strategy, size) -> tuple:
    """On a rank: (memory Report of two steps, Calls of one more step, its loss in a list)."""
    made, losses = {}, []
    found = memory.record(partial(_build, strategy, size, made), batches(size, 2),
                          held=strategies.resident_tensors)
    with Traffic() as traffic:
        _step(made["module"], made["optimizer"], batches(size, 1)[0], losses)
    return found, traffic.calls, losses


def _build(strategy, size, made):
    made["module"], made["optimizer"] = build(strategy, size)
    return made["module"], made["optimizer"]


def build(strategy, size) -> tuple:
    """On a rank: (module, optimizer) of a strategy around the preset's model."""
    return strategy(_model(size), torch.optim.AdamW, **SETTINGS)


def _model(size):
    return models.gpt2(size.layers, size.hidden, size.heads, size.context)


def batches(size, steps: int) -> list:
    """On a rank: its own batches."""
    return data.lm_batches(steps, size.batch, size.context, seed=1000 * dist.get_rank())


def _step(module, optimizer, batch, losses):
    loss = module(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
