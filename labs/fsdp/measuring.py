"""Measures strategies side by side on real ranks: memory, collectives, losses and time of a step.

On CPU ranks, where every allocation can be seen; a preset for GPUs is cut down to what they can do.
"""

import statistics
from collections import Counter
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from labs.meters import memory, throughput
from labs.meters.traffic import Traffic
from labs.training import data, models, presets, strategies
from labs.training.loop import train
from labs.training.presets import Preset
from labs.workers.channel import report
from labs.workers.launcher import launch

SETTINGS = {"lr": 1e-3}
TRIES = 2  # a thread of gloo may free a tensor unseen: then a rank seems to hold it
BATCH = 2  # sequences per rank, at most
LOSSES = 3  # steps whose losses are compared


@dataclass(frozen=True)
class Result:
    """One strategy. report: memory of rank 0. calls: one rank's collectives of
    one step. losses: mean over the ranks, step by step. rounds: seconds of a step, the slowest
    rank's, by round; none where it was not timed."""

    report: memory.Report
    calls: list
    losses: list
    rounds: list = ()

    @property
    def seconds(self) -> float:
        """The median round; None where it was not timed."""
        return statistics.median(self.rounds) if self.rounds else None

    def slower(self, other) -> str:
        """How much longer a step takes than the other's, and between what bounds that was round by
        round: "+10% (-9 to +32% by round)"."""
        ratios = [mine / its - 1 for mine, its in zip(self.rounds, other.rounds, strict=True)]
        return (f"{self.seconds / other.seconds - 1:+.0%} ({100 * min(ratios):+.0f} to "
                f"{max(ratios):+.0%} by round)")

    @property
    def kinds(self) -> Counter:
        """Kind of collective -> calls in a step."""
        return Counter(call.kind for call in self.calls)


@dataclass(frozen=True)
class Measured:
    """size: the preset that was trained. parameters: Ψ. results: name -> Result."""

    size: Preset
    parameters: int
    results: dict

    def __repr__(self):
        lines = [f"{name}: {found.report.step_peak.total / 1e6:.1f} MB at the peak of a step, "
                 + ", ".join(f"{n} {kind}" for kind, n in found.kinds.items())
                 for name, found in self.results.items()]
        return "\n".join([f"{self.size.ranks} ranks, {self.parameters:,} parameters", *lines])


def on_cpu(preset: Preset) -> Preset:
    """The preset, or a laptop's where it is made for GPUs, with few tokens: what is looked at here
    is parameters, and activations would cover them."""
    laptop = presets.preset("laptop")
    small = preset.hidden * preset.layers <= 4 * laptop.hidden * laptop.layers
    chosen = preset if small else replace(laptop, ranks=min(preset.ranks, 4))
    return replace(chosen, batch=min(chosen.batch, BATCH))


def model(size):
    return models.gpt2(size.layers, size.hidden, size.heads, size.context)


def batches(size, steps: int) -> list:
    """On a rank: its own batches."""
    return data.lm_batches(steps, size.batch, size.context, seed=1000 * dist.get_rank())


def measure(variants: dict, preset: Preset, rounds: int = 4, tries: int = TRIES) -> Measured:
    """variants: name -> strategy. Each trains the same GPT-2 on the same batches; then they take
    turns, and each round gives one time (rounds=0: nothing is timed). tries: how often memory is
    measured, on rank 0, which never holds less than another."""
    size = on_cpu(preset)
    ranks = launch(_measure, variants, size, rounds, tries, ranks=size.ranks, quiet=True,
                   verify=False, device="cpu", hang_after=60)
    results = {name: _together([r["found"][name] for r in ranks],
                               [r["seconds"].get(name, ()) for r in ranks]) for name in variants}
    return Measured(size, models.count_trainable(model(size)), results)


def _together(by_rank, seconds) -> Result:
    losses = [sum(step) / len(by_rank) for step in zip(*(f.losses for f in by_rank), strict=True)]
    return Result(by_rank[0].report, by_rank[0].calls, losses,
                  [max(round_) for round_ in zip(*seconds, strict=True)])


def _measure(variants, size, rounds, tries) -> dict:
    torch.set_num_threads(1)
    found, steps = {}, {}
    for number, (name, strategy) in enumerate(variants.items(), 1):
        report(step=number, total=len(variants))
        found[name], steps[name] = _one(strategy, size, tries)
    seconds = throughput.seconds_per_step(steps, rounds, warmup=1) if rounds else {}
    return {"found": found, "seconds": seconds}


def _one(strategy, size, tries) -> tuple:
    reports, made = [], {}

    def build():
        made["pair"] = strategy(model(size), torch.optim.AdamW, **SETTINGS)
        return made["pair"]

    for _ in range(tries):
        made.clear()
        if dist.get_rank() == 0:
            reports.append(memory.record(build, batches(size, 2), held=strategies.resident_tensors))
        else:  # a profiler on every rank would only slow this one down
            train(*build(), batches(size, 2))
    made.clear()
    module, optimizer = build()
    with Traffic() as traffic:
        losses = [_step(module, optimizer, batches(size, 1)[0])]
    losses += [_step(module, optimizer, batch) for batch in batches(size, LOSSES)[1:]]
    again = batches(size, 1)[0]
    report_ = memory.leanest(reports) if reports else None
    result = Result(report_, [c for c in traffic.calls if c.elements], losses)
    return result, lambda: _step(module, optimizer, again)


def _step(module, optimizer, batch) -> float:
    loss = module(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
