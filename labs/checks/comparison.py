"""The comparison: strategies that train the same model on the same batches, on the device of the
launch: what each holds and sends, its losses, and its speed."""

import contextlib
import gc
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labs.meters import memory, throughput
from labs.meters.metrics import Metric, name_of
from labs.meters.traffic import CollectiveCall, Traffic
from labs.meters.typical_step import TypicalStep, record_in_turns
from labs.predictions.communication.traffic import passes
from labs.training import data, models, strategies
from labs.training.loop import ModuleAndOptimizer, labelled_step, train
from labs.training.presets import Preset
from labs.workers import devices
from labs.workers.channel import report
from labs.workers.launcher import launch
from labs.workers.other_load import name_load
from labs.workers.slow_link import proportional_link, slow_link

SETTINGS = {"lr": 1e-3}  # of AdamW
RECORDED = 2  # steps under the memory meter: the first makes what lasts from step to step


@dataclass(frozen=True)
class Measured:
    """One strategy of a comparison.

    report: memory of the rank that keeps most, None where memory was not asked for. calls: one
    rank's collectives of one step. losses: the mean over the ranks, step by step. seconds_by_rank:
    of a step, by rank and round; empty where nothing was timed. observed: what `observe` returned,
    by rank. recorded: one step of each rank under the profiler, if it was asked for.
    """

    report: memory.Report | None
    calls: list[CollectiveCall]
    losses: list[float]
    seconds_by_rank: list[list[float]] = field(default_factory=list)
    observed: list[Any] = field(default_factory=list)
    recorded: list[TypicalStep] = field(default_factory=list)

    @property
    def rounds(self) -> list[float]:
        """Seconds of a step by round: those of the slowest rank, which the others wait for."""
        return [max(ranks) for ranks in zip(*self.seconds_by_rank, strict=True)]

    @property
    def seconds(self) -> float | None:
        """The median round, None where nothing was timed."""
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def kinds(self) -> Counter[str]:
        """Kind of collective -> calls in a step."""
        return Counter(call.kind for call in self.calls)

    @property
    def elements(self) -> Counter[str]:
        """Kind of collective -> elements that pass through it in a step."""
        return self._sums("elements")

    @property
    def bytes(self) -> Counter[str]:
        """Kind of collective -> logical bytes that pass through it in a step."""
        return self._sums("bytes")

    def _sums(self, size) -> Counter[str]:
        found = Counter()
        for call in self.calls:
            found[call.kind] += getattr(call, size)
        return found

    def clearly_slower_than(self, other: "Measured", factor: float = 1.0) -> bool:
        """Whether a step takes at least `factor` times as long as the other's in the median, and
        longer than the other's in three quarters of the rounds, which took turns: then the effect
        is larger than the noise."""
        # Both strategies ran in each round, so what slowed the machine in one round slowed both.
        # The lower quartile must be above 1, because a median alone may be above 1 by chance.
        ratios = sorted(mine / its for mine, its in zip(self.rounds, other.rounds, strict=True))
        return self.seconds >= factor * other.seconds and ratios[len(ratios) // 4] > 1

    def slower_than(self, other: "Measured") -> str:
        """How much longer a step takes than the other's, and the bounds of that over the rounds:
        "+10% (-9 to +32% by round)"."""
        ratios = [mine / its - 1 for mine, its in zip(self.rounds, other.rounds, strict=True)]
        return (f"{self.seconds / other.seconds - 1:+z.0%} ({100 * min(ratios):+z.0f} to "
                f"{max(ratios):+z.0%} by round)")


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. parameters: Ψ, of the model that every strategy trains, in `tensors`
    tensors. results: by strategy, in the order in which they were given."""

    preset: Preset
    parameters: int
    tensors: int
    results: dict[str, Measured]

    def __repr__(self):
        return "\n".join([f"{self.preset.ranks} ranks, {self.parameters:,} parameters in "
                          f"{self.tensors} tensors, fp32, AdamW",
                          *(f"{name}: {self._words(name)}{self._allocator(name)}"
                            for name in self.results)])

    def metrics(self) -> list[Metric]:
        """Of each strategy what a rank holds and sends, and the seconds of a step."""
        return [metric for name in self.results for metric in self._metrics_of(name)]

    def _metrics_of(self, name) -> list[Metric]:
        found, metrics = self.results[name], []
        if found.report is not None:
            held = {"after backward": found.report.phases["backward"],
                    "peak of a step": found.report.step_peak}
            metrics += [Metric(name_of(name, moment), kept.total, "bytes")
                        for moment, kept in held.items()]
        if found.calls:
            metrics.append(Metric(name_of(name, "sent"), self.communication_volume(name), "Ψ"))
        if found.rounds:
            metrics.append(Metric.of_rounds(name_of(name, "step"), found.rounds))
        return metrics

    def _words(self, name) -> str:
        found = self.results[name]
        words = [] if found.report is None else [
            f"{found.report.phases['backward'].total / 1e6:.1f} MB after backward",
            f"{found.report.step_peak.total / 1e6:.1f} MB at the peak of a step"]
        if found.calls:
            calls = ", ".join(f"{number} {kind}" for kind, number in found.kinds.items())
            words.append(f"sends {self.communication_volume(name):.3g}Ψ in {calls}")
        words += [f"{self.tokens_per_second(name):,.0f} tokens/s"] if found.rounds else []
        return ", ".join(words) or "no collective"

    def _allocator(self, name) -> str:
        """On a GPU, in a line of its own: what its allocator and driver say of the whole run."""
        report = self.results[name].report
        return f"\n    {report.allocator}" if report and report.allocator else ""

    def tokens_per_second(self, name: str) -> float | None:
        """Of all ranks together; None where nothing was timed."""
        seconds = self.results[name].seconds
        return self.preset.tokens / seconds if seconds else None

    def communication_volume(self, name: str) -> float:
        """The communication volume of a step of this strategy, in Ψ, with an all-reduce counted
        twice; each rank sends (N-1)/N of that."""
        return sum(passes(kind) * n for kind, n in
                   self.results[name].elements.items()) / self.parameters


def compare(chosen: Mapping[str, Callable], preset: Preset, *, measure_memory: bool = True,
            tries: int = 1, losses: int = 1, rounds: int = 0, repeat: int = 1,
            record: bool = False, observe: Callable | None = None,
            link: tuple[float, float] | None = None, device: str | None = None,
            quiet: bool = False) -> Comparison:
    """Trains the preset's GPT-2 under every strategy (name -> strategy) on `preset.ranks` ranks.

    Each strategy by itself: two steps under the memory meter, `tries` times, then `losses` steps
    (without memory at least 3), the collectives of the last of which are counted. Then all take
    turns: `rounds` turns of `repeat` timed steps. record: a turn is one timed step and one under
    the profiler; of these the one nearest to the median of those timed is kept. At last
    observe(module, optimizer, batch), if given, is called on each rank with what each strategy
    returned and one batch.

    link: on CPUs, what is timed and observed passes a slow link: the shares of the first strategy's
    step that all its bytes, and the latency of one collective, take (`proportional_link`). device,
    quiet: as for `launch`.
    """
    if rounds:
        name_load()
    # verify=False: to compare the ranks' collectives takes time that would be measured; on NCCL it
    # is up to 30 % of a small collective (labs/workers/nccl.py).
    # no time limit, also inside a check: a slow machine may take minutes for honest work
    by_rank = launch(_compare, dict(chosen), preset, _Plan(measure_memory, tries, losses, rounds,
                                                           repeat, record, observe, link),
                     ranks=preset.ranks, verify=False, device=device, quiet=quiet, hang_after=60,
                     timeout=None)
    sizes = by_rank[0]["sizes"]
    return Comparison(preset, *sizes, {name: _merged([found[name] for found in by_rank])
                                       for name in chosen})


class NotShown(RuntimeError):
    """A recording does not show what the notebook says about it."""

    def _render_traceback_(self):  # IPython's hook
        return [str(self)]


def recorded_until(record: Callable[[], Any], shows: Callable[[Any], bool], lesson: str,
                   tries: int = 3) -> Any:
    """Returns the first recording that shows the lesson; raises NotShown after `tries`, so that no
    notebook is built with a picture that says the opposite of its text.

    record: makes one, for example `lambda: compare(..., rounds=7)`. shows: whether it shows the
    lesson, for example `lambda found: found.results["DDP"].clearly_slower_than(...)`. lesson: what
    should be seen, as a clause: "prefetch is faster".
    """
    for _ in range(tries):
        recording = record()
        if shows(recording):
            return recording
    raise NotShown(f"{lesson} in none of {tries} recordings: this machine is too busy for times, "
                   "run the cell again when it is quiet")


@dataclass(frozen=True)
class _Plan:
    """What is measured, as in `compare`."""

    measure_memory: bool
    tries: int
    losses: int
    rounds: int
    repeat: int
    record: bool
    observe: Callable | None
    link: tuple[float, float] | None


def model_of(preset: Preset) -> nn.Module:
    """The preset's GPT-2, on the CPU."""
    return models.gpt2(preset.layers, preset.hidden, preset.heads, preset.context)


def config_of(preset: Preset) -> Any:
    """The configuration of `model_of`, without its tensors: to make these takes a hundred times as
    long, on the meta device too."""
    return models.gpt2_config(preset.layers, preset.hidden, preset.heads, preset.context)


def batches(preset: Preset, steps: int) -> list[dict[str, torch.Tensor]]:
    """On a rank: its own batches, on its device."""
    return [{name: value.to(devices.device()) for name, value in batch.items()} for batch in
            data.lm_batches(steps, preset.batch, preset.context, seed=1000 * dist.get_rank())]


def build(strategy: Callable, preset: Preset, optimizer_class: Callable = torch.optim.AdamW
          ) -> ModuleAndOptimizer:
    """On a rank: (module, optimizer) of a strategy around the preset's model on its device, where
    its numbers are drawn too: a billion of them take a GPU milliseconds, and a CPU 10 seconds."""
    with devices.device():
        model = model_of(preset)
    return strategy(model, optimizer_class, **SETTINGS)


def _compare(chosen, preset, plan) -> dict:
    """On a rank: name -> what was found, and "sizes", (parameters, tensors) of the model."""
    if plan.measure_memory and devices.device().type == "cpu":
        torch.set_num_threads(1)  # CPU kernels hold a buffer per thread, predictions count one
    found, built, takes_turns = {}, {}, plan.rounds or plan.link
    for number, (name, strategy) in enumerate(chosen.items(), 1):
        report(step=number, total=len(chosen))
        found[name], pair = _measure(strategy, preset, plan)
        if takes_turns:
            built[name] = pair
        elif plan.observe:
            found[name]["observed"] = plan.observe(*pair, batches(preset, 1)[0])
        # What takes no turns is not needed any more: all together would not fit on a small GPU.
        # They refer to themselves, so only the garbage collector frees them.
        del pair
        gc.collect()
    steps = {name: partial(train, *pair, batches(preset, 1)) for name, pair in built.items()}
    with _on_link(plan.link, steps):
        if plan.rounds and plan.record:
            labelled = {name: partial(labelled_step, *pair, batches(preset, 1)[0])
                        for name, pair in built.items()}
            for name, one in record_in_turns(steps, labelled, plan.rounds).items():
                found[name] |= {"seconds": one.measured, "recorded": one}
        elif plan.rounds:
            seconds = throughput.seconds_per_step(steps, plan.rounds, repeat=plan.repeat)
            for name in chosen:
                found[name]["seconds"] = seconds[name]
        if plan.observe:
            for name, pair in built.items():
                found[name]["observed"] = plan.observe(*pair, batches(preset, 1)[0])
    with torch.device("meta"):
        model = model_of(preset)
    sizes = models.count_trainable(model), len(models.trainable(model))
    return {**found, "sizes": sizes}


def _on_link(shares, steps) -> AbstractContextManager:
    """On a rank: while open, collectives pass a link on which the first step takes these shares."""
    if shares is None:
        return contextlib.nullcontext()
    first, *_ = steps.values()
    return slow_link(proportional_link(first, *shares))


def _measure(strategy, preset, plan) -> tuple:
    """(what was found, (module, optimizer)) of one strategy."""
    built, reports = {}, []

    def rebuild():
        built["pair"] = build(strategy, preset)
        return built["pair"]

    for _ in range(plan.tries if plan.measure_memory else 0):
        # Each try builds the model again: the recording starts before the parameters are allocated.
        built.clear()  # an old module would be freed while the new one is recorded
        reports.append(memory.record(rebuild, batches(preset, RECORDED),
                                     held=strategies.resident_tensors))
    pair = built.get("pair") or rebuild()
    # counted in a third step or later: torch's DDP sends a single bucket in its first step, and
    # broadcasts how it reshards them in its second
    *first, last = batches(preset, max(plan.losses, 1 if plan.measure_memory else 3))
    losses = train(*pair, first)
    with Traffic() as traffic:
        losses += train(*pair, [last])
    # Barriers have no elements: they carry no data.
    return {"reports": reports, "calls": [c for c in traffic.calls if c.elements],
            "losses": losses}, pair


def _merged(by_rank) -> Measured:
    """One strategy's findings on all ranks as one."""
    # One rank's collectives stand for all: every rank calls the same ones, of the same sizes.
    reports = [memory.leanest(found["reports"]) for found in by_rank if found["reports"]]
    losses = [sum(step) / len(by_rank) for step in
              zip(*(found["losses"] for found in by_rank), strict=True)]
    return Measured(fullest(reports) if reports else None, by_rank[0]["calls"], losses,
                    [found["seconds"] for found in by_rank if "seconds" in found],
                    [found["observed"] for found in by_rank if "observed" in found],
                    [found["recorded"] for found in by_rank if "recorded" in found])


def fullest(reports) -> memory.Report:
    """Of the ranks that keep most the leanest report, phase by phase: gloo's threads may free a
    tensor out of the profiler's sight, which then seems to be held; nothing makes it seem less."""
    # 1 %: ranks whose shards differ by a few elements count as equal, so that several reports
    # remain, and a report in which a free was missed is not the only one.
    most = max(map(_states, reports))
    return memory.leanest([one for one in reports if _states(one) > 0.99 * most])


def _states(report) -> float:
    held = report.phases["backward"]
    return held.parameters + held.gradients + held.optimizer_state
