"""What this notebook measures: ranks that train, recipes as real tensors, checkpointing's price."""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from labs.exercises.verdicts import shows
from labs.meters import memory
from labs.predictions.memory import predict
from labs.training import data, models, strategies
from labs.training.memory_categories import Memory
from labs.training.presets import Preset
from labs.workers.launcher import launch

JUDGED = (("plain", 1), ("DDP", 2), ("FSDP2", 2), ("FSDP2", 4))  # what exercise 1.7 is held to
RUNS = 4  # at most: gloo's threads may free a tensor unseen, which then seems to be held
UNSEEN = 1000  # bytes: less than any tensor that would matter
_SMALL = dict(layers=2, hidden=32, heads=4, context=16)  # all of it divides by 4


@dataclass(frozen=True)
class Held:
    """What one rank held: count parameters in tensors, bytes by category at the end of each phase
    and at the peak, and the same as closed forms predict it."""

    strategy: str
    ranks: int
    count: int
    tensors: int
    report: memory.Report
    predicted: dict

    @property
    def after_backward(self) -> Memory:
        """Parameters, gradients and optimizer state are all there at this moment."""
        return self.report.phases["backward"]

    def by_name_of(self, names) -> list:
        """Bytes after backward of the named categories."""
        held = self.after_backward.by_name()
        return [held[name] for name in names]


class Measured(list):
    """One Held for each strategy."""

    def __repr__(self):
        lines = [f"{held.strategy}, {held.ranks} rank{'s' * (held.ranks > 1)}: "
                 f"{held.report.step_peak.total / 1e6:.1f} MB at the peak" for held in self]
        return "\n".join([f"{self[0].count:,} parameters, fp32, AdamW", *lines])


@shows("1.7")
def measure_ranks(preset: Preset) -> Measured:
    """Trains the preset's GPT-2 on one rank, then under DDP and FSDP2 on several: two steps of the
    plain loop on the CPU, every allocation recorded."""
    sizes = dict(layers=preset.layers, hidden=preset.hidden, heads=preset.heads,
                 context=preset.context)
    jobs = (("plain", 1), ("DDP", preset.ranks), ("FSDP2", preset.ranks))
    return Measured(_held(*job, sizes, preset.batch, preset.context) for job in jobs)


def judged(strategy: str, ranks: int) -> tuple:
    """(parameters, their tensors, Held) of a small GPT-2 that trains under `strategy`."""
    held = _held(strategy, ranks, _SMALL, 2, 16)
    return held.count, held.tensors, held


def _held(strategy, ranks, sizes, batch, context) -> Held:
    reports = []
    for _ in range(RUNS):
        results = launch(_train, strategy, sizes, batch, context, ranks=ranks, quiet=True,
                         verify=False, device="cpu", hang_after=60)
        (config, count, tensors), _ = results[0]
        predicted = predict(config, batch=batch, sequence=context, ranks=ranks,
                            strategy=strategy.lower())
        reports += [report for _, report in results]
        found = memory.leanest(reports)
        if found.phases["backward"].total <= predicted["backward"].total + UNSEEN:
            break
    return Held(strategy, ranks, count, tensors, found, predicted)


def _train(strategy, sizes, batch, context) -> tuple:
    """On a rank: ((config, parameters, tensors), Report of two steps)."""
    model = models.gpt2(**sizes)
    counted = model.config, models.count_trainable(model), len(models.trainable(model))

    def build():
        return getattr(strategies, strategy.lower())(models.gpt2(**sizes), torch.optim.AdamW)

    batches = data.lm_batches(2, batch, context, seed=100 * dist.get_rank())
    return counted, memory.record(build, batches)


def recipes() -> dict:
    """Recipe -> Memory, bytes per parameter of real tensors after a step of torch's AdamW."""
    size = 256
    return {name: _per_parameter(make(torch.nn.Linear(size, size, bias=False)), size * size)
            for name, make in (("fp32", _step), ("bf16", lambda m: _step(m.bfloat16())),
                               ("bf16, fp32 master", _step_with_master))}


def _step(model) -> tuple:
    """(weights, gradients, what the optimizer keeps) after one step."""
    [weight] = model.parameters()
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    return [weight], [weight.grad], _moments(optimizer)


def _step_with_master(model) -> tuple:
    """bf16 weights, and an optimizer over an fp32 copy of them."""
    [weight] = model.bfloat16().parameters()
    master = torch.nn.Parameter(weight.detach().float())
    optimizer = torch.optim.AdamW([master])
    weight.sum().backward()
    master.grad = weight.grad.float()
    optimizer.step()
    master.grad = None
    weight.data.copy_(master)
    return [weight], [weight.grad], [master, *_moments(optimizer)]


def _moments(optimizer) -> list:
    return [value for state in optimizer.state.values() for value in state.values()
            if value.numel() > 1]  # without its counter of steps


def _per_parameter(held, count) -> Memory:
    return Memory(*(sum(tensor.nbytes for tensor in tensors) / count for tensors in held))


@dataclass(frozen=True)
class Price:
    """One step without and with full checkpointing: seconds (medians of turns), bytes of
    activations that are kept at the end of forward, and as predicted. flops, as torch counts them,
    has a third number: with checkpointing that computes everything again, needed or not."""

    seconds: tuple
    flops: tuple
    kept: tuple
    predicted: tuple

    def __repr__(self):
        more = [pair[1] / pair[0] for pair in (self.flops, self.seconds)]
        return (f"checkpointing: {more[0]:.2f}x the FLOPs, {more[1]:.2f}x the time, "
                f"{self.kept[1] / self.kept[0]:.2f}x the activations")


@shows("1.5")
def measure_checkpointing(preset: Preset, rounds: int = 5) -> Price:
    """Trains the preset's GPT-2 on one rank, with and without checkpointing, taking turns."""
    [(seconds, flops, kept, predicted)] = launch(
        _prices, preset, rounds, ranks=1, quiet=True, verify=False, device="cpu", hang_after=60)
    return Price(seconds, flops, kept, predicted)


def _prices(preset, rounds) -> tuple:
    torch.set_num_threads(1)
    [batch] = data.lm_batches(1, preset.batch, preset.context)
    built = [_model(preset, checkpointed) for checkpointed in (False, True)]
    steps = [lambda model=model: model(**batch).loss.backward() for model in built]
    turns = [[_seconds(step) for step in steps] for _ in range(rounds + 1)][1:]
    seconds = tuple(statistics.median(times) for times in zip(*turns, strict=True))
    reports = [memory.record(lambda c=c: _optimized(_model(preset, c)), [batch, batch])
               for c in (False, True)]
    predicted = tuple(predict(built[0].config, batch=preset.batch, sequence=preset.context,
                              checkpointing=kind)["forward"].activations
                      for kind in ("none", "full"))
    with set_checkpoint_early_stop(False):
        everything = _flops(steps[1])
    return (seconds, (*map(_flops, steps), everything),
            tuple(report.phases["forward"].activations for report in reports), predicted)


def _model(preset, checkpointed):
    model = models.gpt2(preset.layers, preset.hidden, preset.heads, preset.context).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _optimized(model):
    return model, torch.optim.AdamW(model.parameters())


def _seconds(step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def _flops(step) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()
