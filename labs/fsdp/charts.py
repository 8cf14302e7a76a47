"""What notebook 04 draws: ZeRO-3 against fully_shard, wrappings, training under a memory limit,
checkpointing, offload, the largest models, mixed precision and state dicts."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from labs.exercises.comparison import Comparison, compare, model_of
from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.fsdp import memory_limits, scaffold
from labs.fsdp.memory_limits import LargestModel
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions.memory_recipes import model_states
from labs.predictions.traffic import passes, stage_passes
from labs.training import strategies
from labs.training.presets import Preset
from labs.workers import devices
from labs.workers.launcher import launch

LAYERS = 8  # of the model that DDP and every form of FSDP train
ROOT_FREED = "fully_shard,\nroot freed too"
FEW = 2  # sequences per rank, at most, where parameters are looked at: activations would hide them
COMMUNICATION = palette.PHASES["communication"]


def few_tokens(preset: Preset) -> Preset:
    """Returns the preset with at most FEW sequences per rank."""
    return replace(preset, batch=min(preset.batch, FEW))


def _peaks(found, predicted=()) -> Panel:
    return Panel("peak of a step", "MB", [r.report.step_peak for r in found], 1e6, predicted)


def _times(found) -> Panel:
    return Panel("time", "ms per step", [r.seconds for r in found], 1e-3)


# ZeRO-3 by hand against fully_shard


@shows("4.1")
def compare_with_zero3(zero3: Callable, strategy: Callable, preset: Preset) -> Picture:
    """Draws what one rank holds and sends under DDP, ZeRO-3 by hand, the student's fully_shard, and
    the same with its root resharded after forward too; with ZeRO's formulas as ticks."""
    return draw_zero3(measure_zero3(zero3, strategy, preset))


def measure_zero3(zero3: Callable, strategy: Callable, preset: Preset) -> Comparison:
    """Returns the comparison of the four strategies of `compare_with_zero3`."""
    chosen = {"DDP": strategies.ddp, "ZeRO-3 by hand": zero3, "fully_shard": strategy,
              ROOT_FREED: partial(scaffold.with_root_resharded, strategy)}
    return compare(chosen, few_tokens(preset), tries=2, losses=3, quiet=True)


def draw_zero3(found: Comparison) -> Picture:
    """Draws what `measure_zero3` found."""
    results, stages = found.results.values(), (0, 3, 3, 3)
    guess = guessed("4.1")
    states = Panel(
        "held after backward", "MB", [r.report.phases["backward"] for r in results], 1e6,
        [model_states(found.parameters, ranks=found.preset.ranks, stage=s).total for s in stages],
        [None, None, guess and guess * 1e6, None])
    sent = Panel("sent in a step", "Ψ", list(map(found.communication_volume, found.results)), 1,
                 [sum(passes(kind) * n for kind, n in stage_passes(s).items()) for s in stages],
                 colour=COMMUNICATION)
    calls = Panel("collectives", "per step", [len(r.calls) for r in results], colour=COMMUNICATION)
    return side_by_side(list(found.results), [states, sent, calls], _losses(found))


def _losses(found) -> str:
    losses = [result.losses for result in found.results.values()]
    apart = max(max(step) - min(step) for step in zip(*losses, strict=True))
    words = f"are {apart:.0e} apart at most" if apart else "are equal to the last digit"
    return (f"{found.preset.ranks} ranks, Ψ = {found.parameters:,}; the four losses of each of "
            f"{len(losses[0])} steps {words}")


# which modules are units


@shows("Wrappings")
def compare_wrappings(wrappings: dict[str, Callable], preset: Preset) -> Comparison:
    """Trains the model under every wrapping: name -> function that selects its units."""
    return compare({name: partial(scaffold.shard_units, select)
                    for name, select in wrappings.items()}, few_tokens(preset), tries=2, rounds=4,
                   quiet=True)


@shows("4.2")
def show_wrappings(compared: Comparison, wrappings: dict[str, Callable],
                   cost: Callable) -> Picture:
    """Draws peak, collectives and time of each wrapping, with what the student's `cost` predicts
    and the guess for the wrapping "each linear"."""
    model = model_of(compared.preset)
    predicted = [cost(scaffold.unit_sizes(select, model))[0] for select in wrappings.values()]
    guesses = [guessed("4.2") if name == "each linear" else None for name in wrappings]
    return draw_wrappings(compared, predicted, guesses)


def draw_wrappings(compared: Comparison, predicted=(), guesses=()) -> Picture:
    """Draws peak, collectives and time; predicted, guesses: collectives, by wrapping."""
    found = list(compared.results.values())
    calls = Panel("collectives", "per step", [len(r.calls) for r in found], predicted=predicted,
                  guessed=guesses, colour=COMMUNICATION)
    return side_by_side(list(compared.results), [_peaks(found), calls, _times(found)])


# under a memory limit


@shows("4.1")
def train_under_limit(chosen: dict[str, Callable], limit: float, layers: int = LAYERS) -> Picture:
    """Trains each strategy (by name) on ranks that get no more than `limit` bytes, and draws what
    it held; one that ran out of memory, with what it would have needed."""
    rows = [_row(name, strategy, limit, layers) for name, strategy in chosen.items()]
    size = f"{memory_limits.parameters(layers) / 1e6:.1f} M parameters"
    model = f"{memory_limits.RANKS} ranks, {layers} layers, {size}"
    note = next((note for _, note in rows if note), "")
    return memory_bars([row for row, _ in rows], f"of one rank at the peak; {model}",
                       [(limit, f"limit, {limit / 1e6:g} MB")], "MB", note)


def _row(name, strategy, limit, layers) -> tuple[MemoryRow, str]:
    """Returns a strategy's row, and why it ran out of memory, if it did."""
    predicted, why = memory_limits.predicted_peak(name, layers), ""
    if memory_limits.can_limit():
        short = memory_limits.shortage(strategy, layers, limit)
        why = f"{name}: OutOfMemory: a rank {short}" if short else ""
    elif predicted.total > limit:
        why = f"{name}: no limit can be set here, so this is predicted"
    if why:
        return MemoryRow(name, predicted=predicted, out_of_memory=True, limit=limit), why
    # On the CPU like the training that was limited, because its bar is held against that limit.
    [found] = compare({name: strategy}, memory_limits.preset(layers), device="cpu",
                      quiet=True).results.values()
    return MemoryRow(name, found.report.step_peak, predicted), ""


@shows("4.4")
def compare_strategies(chosen: dict[str, Callable], layers: int = LAYERS) -> Comparison:
    """Trains the same model under each strategy (by name), without a limit, and times it."""
    return compare(chosen, memory_limits.preset(layers), rounds=5, quiet=True)


@shows("4.4")
def show_memory_and_time(compared: Comparison) -> Picture:
    """Draws peak by category and time of a step, with what checkpointing saved and cost."""
    found = list(compared.results.values())
    return side_by_side(list(compared.results), [_peaks(found, _predicted(compared)),
                                                 _times(found)], _bargain(compared.results))


def _bargain(found) -> str:
    """Memory at the peak and seconds, with checkpointing against without."""
    without, with_ = found.get("FSDP"), found.get("FSDP + checkpointing")
    if without is None or with_ is None:
        return ""
    usual, least = without.report.step_peak, with_.report.step_peak
    return (f"Checkpointing, at the peak: {usual.activations / least.activations:.1f}× less for "
            f"activations, {usual.total / least.total:.1f}× less in all. "
            f"Time of a step: {with_.slower_than(without)}")


def _predicted(compared) -> list[float | None]:
    size = compared.preset
    return [memory_limits.predicted_peak(name, size.layers, size.ranks,
                                         devices.plan(size.ranks)).total
            if name in memory_limits.FORMULAS else None for name in compared.results]


@shows("4.4")
def show_offload(compared: Comparison) -> Table:
    """Returns a table of what CPU offload leaves on the device and moves to the host: parameters,
    gradients and optimizer state live there, and travel for each gather and reduction."""
    offloaded, without = (compared.results[name] for name in ("FSDP + CPU offload", "FSDP"))
    peak = offloaded.report.step_peak
    host = _states(without.report.phases["backward"])  # on a GPU offload's own report lacks them
    travels = sum(offloaded.bytes.values()) / compared.preset.ranks
    rows = [("on the host", f"{host / 1e6:.1f} MB", "parameters, gradients, optimizer state"),
            ("on a GPU", f"{(peak.total - _states(peak)) / 1e6:.1f} MB",
             "activations, gathered parameters"),
            ("over PCIe in a step", f"{travels / 1e6:.1f} MB",
             "a shard for each gather, and its gradient back"),
            ("time of a step, here", *offloaded.slower_than(without).split(" ", 1))]
    note = ("Here both are the same memory, and nothing travels: this shows what would be where, "
            "not a smaller peak, nor the price in time.")
    return Table("One rank with CPU offload, sorted from what was measured here", ("", "", ""),
                 rows, left=0, note="" if devices.gpus() else note)


def _states(held) -> float:
    return held.parameters + held.gradients + held.optimizer_state


@shows("4.4")
def show_largest_models(compared: Comparison, *found: LargestModel) -> Picture:
    """Draws memory of the same model, tokens per second, and the largest model that fits."""
    names = list(compared.results)
    by_name = {one.name: one for one in found}
    base, guess = by_name.get("DDP", found[0]), guessed("4.4")
    guesses = [guess and guess * _size(base, "predicted") if "checkpointing" in name else None
               for name in names]
    largest = Panel("largest that fits", "M parameters",
                    [_size(by_name.get(name), "found") for name in names], 1e6,
                    [_size(by_name.get(name), "predicted") for name in names], guesses,
                    missing="not tried")
    speed = Panel("throughput", "tokens/s", [compared.tokens_per_second(name) for name in names])
    peaks = _peaks(list(compared.results.values()), _predicted(compared))
    return side_by_side(names, [_with_limit(peaks, base.limit), speed, largest])


def _with_limit(panel, limit) -> Panel:
    """The panel with the limit of CPU ranks, unless its memory is a GPU's."""
    over = tuple(place for place, held in enumerate(panel.values) if held.total > limit)
    return panel if devices.gpus() else replace(panel, limit=limit, out_of_memory=over)


def _size(one, which) -> int | None:
    layers = one and getattr(one, which)
    return memory_limits.parameters(layers) if layers else None


@shows("4.4")
def summary_table(compared: Comparison, *found: LargestModel) -> Table:
    """Returns the numbers of `show_largest_models` as a table."""
    by_name = {one.name: one for one in found}
    rows = []
    for name, result in compared.results.items():
        one = by_name.get(name)
        rows.append((name, f"{result.report.step_peak.total / 1e6:.1f}",
                     f"{compared.tokens_per_second(name):,.0f}",
                     *(f"{_size(one, which) / 1e6:.2f}" if _size(one, which) else "–"
                       for which in ("predicted", "found")),
                     f"{abs(one.off):.0%}" if one and one.found else "–"))
    head = ("", "MB at the peak", "tokens/s", "predicted, M", "found, M", "apart")
    return Table(f"{compared.parameters / 1e6:.1f} M parameters on {compared.preset.ranks} ranks, "
                 f"and the largest model under {found[0].limit / 1e6:g} MB a rank", head, rows)


# mixed precision, state dicts


@shows("4.5")
def show_precision(shard: Callable, mixed: Callable) -> Picture:
    """Draws the peak of forward by category (in backward, blocks are freed while others compute),
    and the bytes gathered and reduced in a step, of one rank."""
    both = partial(scaffold.shard_mixed, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    found = compare({"fp32": shard, "bf16, reduced in fp32": mixed, "bf16, reduced in bf16": both},
                    replace(memory_limits.preset(4, ranks=2), batch=2), quiet=True).results
    panels = [Panel("peak of forward", "MB",
                    [r.report.peaks["forward"] for r in found.values()], 1e6)]
    panels += [Panel(title, "MB per step", [r.bytes[kind] for r in found.values()], 1e6,
                     colour=palette.COLLECTIVES[kind])
               for title, kind in (("gathered", "all_gather"), ("reduced", "reduce_scatter"))]
    return side_by_side(list(found), panels)


@shows("State dicts")
def compare_state_dicts(strategy: Callable, ranks: int = 4) -> Table:
    """Returns a table of what each rank holds of a sharded and of a full state dict."""
    by_rank = launch(scaffold.state_dict_bytes, strategy, ranks=ranks, quiet=True)
    rows = [(f"rank {rank}", *(f"{nbytes / 1e3:,.0f}" for nbytes in found.values()))
            for rank, found in enumerate(by_rank)]
    return Table("kB of parameters in a state dict", ("", *by_rank[0]), rows,
                 note="A full one is gathered tensor by tensor, and kept on rank 0's host; any "
                      "program can read it. A sharded one is never gathered.")
