"""The student's modules and torch's DDP, compared. A variant is a function that wraps a model; the
comparison that all notebooks share trains it as a strategy. Below that, what ranks record of one
module, and the pictures of exercise 2.10."""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labs.checks import comparison
from labs.checks.comparison import Comparison
from labs.checks.gpu_notes import below, speeds, spreads
from labs.checks.guesses import guessed
from labs.checks.on_ranks import BATCH, gradients
from labs.checks.reference import Step
from labs.checks.verdicts import shows
from labs.manual_ddp.edge_cases import ONLY_RANK_0
from labs.manual_ddp.make_buckets import judged_buckets
from labs.meters.trace import Trace
from labs.meters.traffic import Traffic
from labs.meters.typical_step import TypicalStep, record_in_turns, require_typical
from labs.pictures import palette, phases, timelines
from labs.pictures.bars import Bar, bars
from labs.pictures.marks import answered, format_number
from labs.pictures.picture import Picture
from labs.predictions.communication import traffic as predicted
from labs.training import data, models
from labs.training.loop import labelled_step, mark_gradients, train
from labs.training.presets import Preset
from labs.words import counted
from labs.workers import devices
from labs.workers.channel import report
from labs.workers.launcher import launch
from labs.workers.progress import status
from labs.workers.slow_link import proportional_link, slow_link

Wrap = Callable[[nn.Module], nn.Module]
ROUNDS = 4  # of the comparison, and recorded steps of each variant; one of these is drawn
# Of the first variant's step, on a CPU: its bytes on the link, and one collective's latency. So
# sending takes half as long as computing, and a call for each tensor takes longer than its bytes:
# what the variants differ in is larger than what a busy machine adds.
LINK = (0.5, 0.01)


@shows("2.10")
def compare(variants: Mapping[str, Wrap], preset: Preset, rounds: int = ROUNDS) -> Comparison:
    """Trains each variant (name -> function that wraps a model) on `preset.ranks` ranks. The
    variants take turns, also in being recorded, so that a machine that slows down slows down all of
    them. On CPUs their collectives pass a slow link."""
    with status(f"{counted(len(variants), 'module')} take {rounds} turns"):
        return comparison.compare({name: as_strategy(wrap) for name, wrap in variants.items()},
                                  preset, measure_memory=False, rounds=rounds,
                                  record=True, observe=bucket_names, link=LINK, quiet=True)


def as_strategy(wrap: Wrap) -> Callable:
    """The strategy that wraps the model and gives an optimizer its parameters."""
    def strategy(model, optimizer_class, **settings):
        module = judged_buckets(wrap)(model)
        return module, optimizer_class(module.parameters(), **settings)

    return strategy


def bucket_names(module, optimizer, batch) -> list[list[str]] | None:
    """On a rank: the names of the parameters in each bucket; None for a module that has none of its
    own."""
    names = {id(parameter): name.removeprefix("module.").removeprefix("transformer.")
             for name, parameter in module.named_parameters()}
    return [[names[id(p)] for p in bucket] for bucket in getattr(module, "buckets", [])] or None


def shown_ranks(traces: list[Trace], most: int = 3) -> list[Trace]:
    """The traces of all ranks; where there are more than `most`, those of the first rank, of the
    one that computes longest, and of the last."""
    if len(traces) <= most:
        return traces
    # Computing, not the step: every rank's step lasts as long as the slowest one's.
    slowest = max(traces, key=lambda trace: sum(trace.seconds_by_phase.values())
                  - trace.exposed_seconds)
    return [trace for trace in traces if trace in (traces[0], slowest, traces[-1])]


def losses(wrap: Wrap, preset: Preset, steps: int, ranks: int) -> list[float]:
    """The full batch's loss at each step on `ranks` ranks. The batches are the same for any number
    of ranks: each rank trains on its share of `preset.ranks * preset.batch` sequences."""
    threads = devices.plan(preset.ranks).threads  # one rank gets no more of the cores than several

    def work():
        torch.set_num_threads(threads)
        pair = comparison.build(as_strategy(wrap), preset)
        for step, batch in enumerate(data.lm_batches(steps, preset.ranks * preset.batch,
                                                     preset.context)):
            # Each tensor: (preset.ranks · preset.batch / ranks, context).
            share = {name: value.to(devices.device()) for name, value in
                     data.shard(batch, dist.get_rank(), ranks).items()}
            loss = torch.tensor(train(*pair, [share]), device=devices.device())
            # Shares are equally large, so the mean of the ranks' losses is that of the whole batch.
            dist.all_reduce(loss)
            report(step=step, total=steps, loss=loss / ranks)

    return launch(work, ranks=ranks, verify=False, hang_after=60).series["loss"]


def record_averaging(average_gradients) -> list:
    """On a rank: [(name, gradient before, gradient after)] of the model with edge cases, on the
    CPU, where they are drawn."""
    model = models.EdgeCaseModel(seed=0)
    [batch] = data.xy_batches(1, BATCH)
    model(**Step(batch, ONLY_RANK_0).inputs()).loss.backward()
    before = gradients(model)
    average_gradients(model)
    return [(name, before[name].cpu(), after.cpu()) for name, after in gradients(model).items()]


def record_marked(wrap, preset) -> tuple[TypicalStep, list[list[str]] | None]:
    """On a rank: (a recorded step with a label for each gradient, the buckets' parameters). On a
    CPU the step passes a slow link."""
    def marked(model):
        mark_gradients(model)
        return wrap(model)

    pair, [batch] = (comparison.build(as_strategy(marked), preset),
                     comparison.batches(preset, 1))
    step = partial(train, *pair, [batch])
    with slow_link(proportional_link(step, *LINK)):
        found = record_in_turns({"marked": step}, {"marked": partial(labelled_step, *pair, batch)},
                                ROUNDS)
    return found["marked"], bucket_names(*pair, batch)


def count_all_reduces(wrap, preset, parts) -> tuple[list[int], int]:
    """On a rank: (the all-reduces of a step without and with no_sync, the number of buckets)."""
    module, _ = comparison.build(as_strategy(wrap), preset)
    calls = []
    # First all micro-batches are synchronized, then only the last.
    for block in (contextlib.nullcontext, module.no_sync):
        with Traffic() as traffic:
            for number, part in enumerate(comparison.batches(preset, parts), 1):
                with block() if number < parts else contextlib.nullcontext():
                    # Each micro-batch counts 1/parts: the sum of their gradients is the mean's.
                    (module(**part).loss / parts).backward()
        calls.append(len(traffic.of("all_reduce")))
        module.zero_grad()
    return calls, len(module.buckets)


@shows("2.10")
def show_calls(compared: Comparison) -> Picture:
    """Draws the collectives per step of each variant, and the count that its buckets predict."""
    return bars([Bar(name, len(found.calls), _predicted_calls(compared, name),
                                       guessed("2.5") if "bucketed" in name else None)
                          for name, found in compared.results.items()],
                         "calls", "of all_reduce per step and rank", lesson=_fewer_calls(compared))


def _fewer_calls(compared) -> str:
    """How many times as many calls the variant with the most has as that with the least."""
    calls = {name: len(found.calls) for name, found in compared.results.items()}
    most, least = max(calls, key=calls.get), min(calls, key=calls.get)
    if calls[most] == calls[least] or not calls[least]:
        return "Calls of all_reduce, by variant"
    return f"{most}: {format_number(calls[most] / calls[least])} times the calls of {least}"


def _predicted_calls(compared, name) -> int | None:
    [cut, *_] = compared.results[name].observed
    return len(cut) if cut else compared.tensors if "per parameter" in name else None


@shows("2.10")
def show_bytes(compared: Comparison) -> Picture:
    """Draws the bytes per step of each variant, and the predicted 4 bytes per parameter."""
    want = predicted.gradient_bytes(compared.parameters) / 1e6
    return bars([Bar(name, found.bytes.total() / 1e6, want)
                          for name, found in compared.results.items()],
                         "MB", "all-reduced per step and rank (logical bytes)",
                lesson="The number of calls changes, the bytes do not" if len(
                    {found.bytes.total() for found in compared.results.values()}) == 1
                else "The variants differ in their bytes")


@shows("2.10")
def show_timelines(compared: Comparison, *names: str) -> Picture:
    """Draws one recorded step of the named variants (all, if none is named), on at most three
    ranks: the first, the slowest and the last. It is the step of `show_phases`."""
    return timelines.by_rank({name: shown_ranks(traces)
                              for name, traces in _typical_steps(compared, names).items()})


@shows("2.10")
def show_phases(compared: Comparison,
                shares: Callable = phases.communication_shares) -> Picture:
    """Draws where a recorded step went, mean over ranks: phases and exposed communication, and the
    student's two shares. It is the step nearest to the median that `show_throughput` draws; on GPUs
    a note has the seconds of all that were recorded."""
    recorded = {name: one.recorded[0].recorded for name, one in compared.results.items()}
    note = spreads(recorded, compared.preset)
    return phases.step_phases(_typical_steps(compared), below(
        note, "The recorded step nearest to the median is drawn." if note else ""),
        shares)


def _typical_steps(compared, names=()) -> dict[str, list[Trace]]:
    """Variant -> one trace of each rank. Raises NotTypical where one is far from the throughput."""
    recorded = {name: compared.results[name].recorded for name in names or compared.results}
    require_typical({name: (first.seconds, first.usual) for name, [first, *_] in recorded.items()},
                    "the cell with lab.compare")
    return {name: [one.trace for one in by_rank] for name, by_rank in recorded.items()}


@shows("2.10")
def show_throughput(compared: Comparison) -> Picture:
    """Draws the tokens per second of all ranks together, by variant, and the student's guess; on
    GPUs a note has the seconds of a step and their spread."""
    ratio, torchs = guessed("2.10"), compared.tokens_per_second("torch DDP")
    rates = {name: compared.tokens_per_second(name) for name in compared.results}
    best, slowest = max(rates, key=rates.get), min(rates, key=rates.get)
    return bars([Bar(
        name, compared.tokens_per_second(name), colour=palette.PLAIN,
        guessed=ratio * torchs if ratio is not None and "overlapped" in name else None)
        for name in compared.results], "tokens/s", "of all ranks together (median of turns)",
        note=below(speeds(compared)), answer=_ratio_answered(ratio, rates),
        lesson=f"{best} has {rates[best] / rates[slowest]:.2g} times the throughput of {slowest}"
        if best != slowest else "")


def _ratio_answered(ratio, rates) -> str:
    """The guess, a share of torch DDP's throughput, answered."""
    name = next((name for name in rates if "overlapped" in name), "")
    return answered(ratio, rates[name] / rates["torch DDP"], "of torch DDP's") if name else ""
