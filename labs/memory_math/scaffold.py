"""What the notebook calls: the sizes of well-known models, and measurements on real ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from labs.checks.comparison import compare, config_of, model_of
from labs.checks.verdicts import shows
from labs.meters import memory, throughput
from labs.meters.metrics import Metric
from labs.predictions.memory.parameters import shape_of
from labs.predictions.memory.predict import predict
from labs.predictions.memory.shape import Shape
from labs.training import data, hf_configs, strategies
from labs.training.memory_categories import Memory
from labs.training.presets import Preset
from labs.words import counted
from labs.workers import devices
from labs.workers.launcher import launch
from labs.workers.other_load import name_load

MODELS = ("GPT-2", "Llama-2-7B", "Llama-2-13B", "Llama-3-8B", "Llama-3-70B", "Qwen2-0.5B",
          "Qwen2-7B")
STRATEGIES = {"plain": strategies.plain, "DDP": strategies.ddp, "FSDP2": strategies.fsdp2}


def model_sizes() -> dict[str, Shape]:
    """Name -> sizes of the models of this notebook."""
    return {name: shape_of(hf_configs.config(name)) for name in MODELS}


SHORT = 16  # tokens of a sequence where states are looked at


@dataclass(frozen=True)
class RankMemory:
    """What one rank had allocated: a model of `count` parameters in `tensors` tensors, bytes by
    category at the end of each phase and at the peak, and the same as predicted from the
    configuration. What only a GPU's allocator adds is in report.allocator, None on a CPU."""

    strategy: str
    ranks: int
    count: int
    tensors: int
    report: memory.Report
    predicted: dict[str, Memory]

    @property
    def after_backward(self) -> Memory:
        """Bytes at the moment when parameters, gradients and optimizer state are all there."""
        return self.report.phases["backward"]

    @property
    def name(self) -> str:
        """The strategy and its ranks, as charts show them."""
        return f"{self.strategy} on {counted(self.ranks, 'rank')}"

    def metrics(self) -> list[Metric]:
        """What was allocated after backward and at the peak."""
        measured = {"after backward": self.after_backward, "peak": self.report.step_peak}
        predicted = {"after backward": self.predicted["backward"], "peak": self.predicted["peak"]}
        return [Metric(f"{self.name}: {moment}", held.total, "bytes", predicted[moment].total)
                for moment, held in measured.items()]

    def __str__(self):
        allocator = f"; {self.report.allocator}" if self.report.allocator else ""
        return f"{self.name}: {self.report.step_peak.total / 1e6:.1f} MB at the peak{allocator}"


class RankMemories(list):
    """A RankMemory for each strategy; draws itself as a line for each."""

    def __repr__(self):
        return "\n".join([f"{self[0].count:,} parameters, fp32, AdamW", *map(str, self)])


@shows("1.7")
def measure_ranks(preset: Preset) -> RankMemories:
    """Trains the preset's GPT-2 on one rank, then under DDP and FSDP2 on several: two steps of the
    plain loop, every allocation recorded. Each rank has one short sequence: activations, which
    no strategy here divides, would hide what sharding saves."""
    preset = replace(preset, batch=1, context=min(preset.context, SHORT))
    return RankMemories([*measure_strategies(("plain",), preset, 1),
                         *measure_strategies(("DDP", "FSDP2"), preset, preset.ranks)])


def measure_strategies(names: Sequence[str], preset: Preset, ranks: int,
                       device: str | None = None) -> list[RankMemory]:
    """What a rank holds under each of STRATEGIES that is named. device: as for `launch`."""
    preset = replace(preset, ranks=ranks)
    plan = devices.plan(ranks, device)
    predicted = {name: predict(
        config_of(preset), batch=preset.batch, sequence=preset.context, ranks=ranks,
        strategy=name.lower(), device=plan.device, backend=plan.library) for name in names}
    found = compare({name: STRATEGIES[name] for name in names}, preset, device=device, quiet=True)
    return [RankMemory(name, ranks, found.parameters, found.tensors, found.results[name].report,
                       predicted[name]) for name in names]


@dataclass(frozen=True)
class CheckpointingCost:
    """One step without and with full checkpointing: seconds, FLOPs as torch counts them, bytes of
    activations at the end of forward, and these as predicted. flops has a third number:
    checkpointing that computes everything again, needed or not; on a GPU torch counts those of
    attention, too. matrices: parameters in the matrices of all blocks, in the last matrix of each
    block, and in the head. device: "cpu" or "cuda"."""

    timings: tuple[throughput.Timing, throughput.Timing]
    flops: tuple[int, int, int]
    matrices: tuple[int, int, int]
    kept: tuple[float, float]
    predicted: tuple[float, float]
    device: str

    @property
    def seconds(self) -> tuple[float, float]:
        """The medians."""
        return self.timings[0].median, self.timings[1].median

    def metrics(self) -> list[Metric]:
        """FLOPs, seconds and activations of both."""
        return [metric for place, name in enumerate(("without", "with checkpointing"))
                for metric in (
                    Metric(f"{name}: FLOPs", self.flops[place], "FLOP"),
                    Metric(f"{name}: step", self.timings[place].median, "s", None,
                           self.timings[place].least, self.timings[place].most),
                    Metric(f"{name}: activations", self.kept[place], "bytes",
                           self.predicted[place]))]

    def __repr__(self):
        flops, seconds, kept = (pair[1] / pair[0] for pair in
                                (self.flops, self.seconds, self.kept))
        return (f"checkpointing: {flops:.2f}x the FLOPs, {seconds:.2f}x the time, {kept:.2f}x the "
                "activations")


@shows("1.5")
def measure_checkpointing(preset: Preset, rounds: int = 5) -> CheckpointingCost:
    """Trains the preset's GPT-2 on one rank, with and without checkpointing, taking turns."""
    name_load()
    return launch(_checkpointing_cost, preset, rounds, ranks=1, quiet=True, verify=False,
                  hang_after=60)[0]


def _checkpointing_cost(preset, rounds) -> CheckpointingCost:
    torch.set_num_threads(1)  # CPU kernels hold a buffer per thread, predictions count one
    device = devices.device()
    [batch] = data.lm_batches(1, preset.batch, preset.context)
    batch = {name: values.to(device) for name, values in batch.items()}
    models = [_model(preset, checkpointed) for checkpointed in (False, True)]
    steps = [lambda model=model: _step(model, batch) for model in models]
    seconds = throughput.seconds_per_step(dict(enumerate(steps)), rounds, warmup=1)

    def build(checkpointed):
        model = _model(preset, checkpointed)
        return model, torch.optim.AdamW(model.parameters())

    reports = [memory.record(lambda c=c: build(c), [batch, batch]) for c in (False, True)]
    predicted = [predict(models[0].config, batch=preset.batch, sequence=preset.context,
                         checkpointing=kind, device=device.type) for kind in ("none", "full")]
    # torch stops recomputing a block once it has what backward needs; here it must not.
    with set_checkpoint_early_stop(False):
        everything = _flops(steps[1])
    return CheckpointingCost(tuple(map(throughput.Timing.of, seconds.values())),
                             (*map(_flops, steps), everything), _matrices(models[0]),
                             tuple(report.phases["forward"].activations for report in reports),
                             tuple(phases["forward"].activations for phases in predicted),
                             device.type)


def _matrices(model) -> tuple[int, int, int]:
    blocks = model.transformer.h
    # Biases and norms have one dimension, and no FLOPs in the formula.
    matrices = sum(p.numel() for p in blocks.parameters() if p.dim() == 2)
    return matrices, sum(block.mlp.c_proj.weight.numel() for block in blocks), \
        model.lm_head.weight.numel()


def _model(preset, checkpointed):
    model = model_of(preset).to(devices.device()).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _step(model, batch):
    loss = model(**batch).loss
    loss.backward()
    loss.item()  # a GPU works on in the background; reading a number waits for it


def _flops(step) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


STATES = ("parameters", "gradients", "optimizer state")
# For checks of formulas: an answer that looks its input up in a table raises KeyError.
TABLE_HINT = {"KeyError": "A table holds only the models it was made for: compute from the sizes."}
