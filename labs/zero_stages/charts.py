"""The pictures and tables of notebook 03. Those of shards and layers run the student's own code."""

import contextlib
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from labs.exercises.comparison import Comparison, batches, build, model_of
from labs.exercises.guesses import guessed
from labs.exercises.verdicts import Wrong, shows
from labs.meters import throughput
from labs.pictures import palette, shards, timelines
from labs.pictures.bars import Bar, Panel, bars, side_by_side
from labs.pictures.memory import MemoryRow, memory_bars
from labs.pictures.picture import Picture
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.memory_recipes import model_states, recipe_of
from labs.predictions.traffic import passes
from labs.training import models
from labs.training.loop import train
from labs.training.memory_categories import GB
from labs.training.presets import Preset
from labs.words import counted
from labs.workers import devices
from labs.workers.collectives import reduce_scatter_single
from labs.workers.launcher import launch
from labs.zero_stages.checks.choose import MODELS
from labs.zero_stages.checks.cut import reject_wrong_pieces
from labs.zero_stages.collectives import reduce_scatter
from labs.zero_stages.flat_parameter import layer_groups
from labs.zero_stages.stage_comparison import expected

MOMENTS = {"build": "after building", "forward": "after forward", "backward": "after backward",
           "step": "after the step", "peak": "at the peak of a step"}
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
TABLE_RECIPE = "bf16, fp32 moments"  # 12 bytes per parameter
TABLE_RANKS = (1, 4, 8, 16, 64, 512)
REDUCED_ELEMENTS = 1 << 21  # 8 MiB in fp32
ROUNDS, WARMUP = 15, 2
_TRAFFIC_GUESSES = {"ZeRO-1": "3.2", "ZeRO-3": "3.4"}  # strategy -> exercise


@shows("3.1")
def show_owners(cut: Callable, preset: Preset, ranks: int | None = None) -> Picture:
    """The preset's GPT-2 cut by the student's `cut`: as one flat tensor, and layer by layer."""
    ranks = ranks or max(preset.ranks, 3)
    model = model_of(preset)
    layers = [(name, sum(p.numel() for p in parameters))
              for name, _, parameters in layer_groups(model)]
    rows = {"one flat tensor for all": [models.count_trainable(model)],
            "a flat tensor for each layer": [n for _, n in layers]}
    return shards.shard_owners(layers, {title: [_cut(cut, size, ranks) for size in sizes]
                                        for title, sizes in rows.items()}, ranks)


def _cut(cut, size, ranks) -> list[tuple[int, int]]:
    """(elements that are parameters, elements of padding) of each rank's piece."""
    flat = torch.ones(size)
    pieces = cut(flat, ranks)
    reject_wrong_pieces(pieces, flat, ranks)
    return [(int(piece.sum()), int((piece == 0).sum())) for piece in pieces]


@shows("3.2")
def show_reduce_scatter(preset: Preset) -> Picture:
    """Milliseconds of a reduce-scatter of 8 MiB: torch's own, the lab's, and the all-reduce of
    which it is half. Of several rounds the fastest, because other load only adds time."""
    results = launch(_time_reduce_scatter, ranks=preset.ranks, quiet=True, verify=False,
                     hang_after=60)
    backend, names = results[0]
    rounds = {name: map(max, zip(*(times[name] for _, times in results), strict=True))
              for name in names}  # of the slowest rank
    rows = [Bar(name, 1e3 * min(rounds[name]), colour=palette.PHASES["communication"])
            for name in names]
    return bars(rows, "ms", f"for 8 MiB on {preset.ranks} ranks, {backend}")


def _time_reduce_scatter() -> tuple[str, dict[str, list[float]]]:
    """On a rank: the backend's name, and the seconds of each way by round."""
    torch.set_num_threads(1)
    size = REDUCED_ELEMENTS // dist.get_world_size() * dist.get_world_size()
    flat = torch.zeros(size, device=devices.device())
    shard = flat.new_empty(size // dist.get_world_size())
    flats = [flat.clone() for _ in range(ROUNDS + WARMUP)]  # lab.reduce_scatter frees what it takes
    return dist.get_backend(), throughput.seconds_per_step({
        "all_reduce, keep a piece": lambda: dist.all_reduce(flat),
        "torch's reduce_scatter": lambda: reduce_scatter_single(shard, flat),
        "lab.reduce_scatter": lambda: reduce_scatter(flats.pop()).wait()}, ROUNDS, WARMUP)


@shows("3.4")
def show_gathered_layers(strategy: Callable, preset: Preset) -> Picture:
    """When each layer of the preset's GPT-2 is gathered in a step of ZeRO-3, on rank 0."""
    return timelines.gathered_layers(launch(_record_lifecycle, strategy, preset,
                                            ranks=preset.ranks, quiet=True, verify=False)[0])


def _record_lifecycle(strategy, preset) -> timelines.Lifecycle:
    module, optimizer = build(strategy, preset)
    units = getattr(module, "units", None)
    if not units:
        raise Wrong("the strategy's module has no units", "Wrap the model in a lab.ShardedModule.")
    *warmup, batch = batches(preset, 3)
    train(module, optimizer, warmup)
    events, times = {unit.name: [] for unit in units}, []
    dist.barrier()
    with _log_events(module, events):
        _timed_step(module, optimizer, batch, times)
    phases = {name: (times[n] - times[0], times[n + 1] - times[0])
              for n, name in enumerate(("forward", "backward", "optimizer"))}
    gathered, gathering = ({name: _intervals(of_unit, times[0], last)
                            for name, of_unit in events.items()} for last in ("free", "ready"))
    return timelines.Lifecycle(phases, gathered, gathering, {
        unit.name: unit.full.numel() * unit.full.element_size() for unit in units})


def _timed_step(module, optimizer, batch, times):
    times.append(time.perf_counter())
    loss = module(**batch).loss
    times.append(time.perf_counter())
    loss.backward()
    times.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter())


def _log_events(module, events) -> contextlib.ExitStack:
    """While it is open, (event, time) is appended for each unit that is allocated, ready for use,
    or freed."""
    def logged(owner, method, event, unit=None):
        original = getattr(owner, method)

        def call(*args):
            result = original(*args)
            events[(unit or args[0]).name].append((event, time.perf_counter()))
            return result

        return mock.patch.object(owner, method, call)

    stack = contextlib.ExitStack()
    for unit in module.units:
        for method in ("allocate", "free"):
            stack.enter_context(logged(unit, method, method, unit))
    for hook in ("before_forward", "before_backward"):
        stack.enter_context(logged(module, hook, "ready"))
    return stack


def _intervals(events, begin, last) -> list[tuple[float, float]]:
    """(begin, end) from each allocation to the next event that is called `last`."""
    found, since = [], None
    for event, moment in events:
        if event == "allocate":
            since = moment
        elif event == last and since is not None:
            found.append((since - begin, moment - begin))
            since = None
    return found


@shows("3.8")
def show_memory(comparison: Comparison, moment: str = "backward") -> Picture:
    """What a rank holds under each strategy, by category. moment: one of MOMENTS.

    The formula's tick after backward counts parameters, gradients and optimizer state: no other
    tensor is needed then. At other moments it is the predicted step of torch's strategies.
    """
    if moment not in MOMENTS:
        raise ValueError(f"no moment {moment!r}: choose {', '.join(MOMENTS)}")
    guess = guessed("3.8") if moment == "backward" else None
    rows = []
    for name, result in comparison.results.items():
        held = result.report.step_peak if moment == "peak" else result.report.phases[moment]
        known = expected(name)
        formula = (known.states(comparison) if moment == "backward"
                   else known.memory(comparison, moment))
        rows.append(MemoryRow(name, held, formula and formula.total,
                              guess and guess * 1e6 if name == "ZeRO-2" else None))
    return memory_bars(rows, f"of one rank {MOMENTS[moment]}", unit="MB")


@shows("3.8")
def show_traffic(comparison: Comparison) -> Picture:
    """What each strategy sends in one step, by collective: in Ψ and in bytes, where an all-reduce
    counts twice, and in how many calls."""
    names, results = list(comparison.results), list(comparison.results.values())
    known, ranks = [expected(name) for name in names], comparison.preset.ranks
    guesses = [guessed(_TRAFFIC_GUESSES[name]) if name in _TRAFFIC_GUESSES else None
               for name in names]
    elements = [{kind: passes(kind) * n / comparison.parameters
                 for kind, n in result.elements.items()} for result in results]
    nbytes = [{kind: passes(kind) * n for kind, n in result.bytes.items()} for result in results]
    return side_by_side(names, [
        Panel("elements that travel", "Ψ per step", elements, 1,
              [one.communication_volume() for one in known], guesses),
        Panel("bytes that travel", "MB per step", nbytes, 1e6,
              [one.bytes(comparison.parameters) for one in known]),
        Panel("collectives", "calls per step", [len(result.calls) for result in results],
              colour=palette.MUTED)],  # of all kinds, so none of their colours
        f"An all-reduce counts twice; each rank sends {ranks - 1}/{ranks} of what travels.")


def show_state_bytes(parameters: float, ranks: int = 8) -> Table:
    """What each stage leaves on a rank at 12 bytes per parameter, by formula, and the guess."""
    recipe = recipe_of(TABLE_RECIPE)
    divided = (0, recipe.optimizer_state, recipe.optimizer_state + recipe.gradients, recipe.total)
    rows = [(name, _psi(recipe.total - part), f"{_psi(part)}/{ranks}" if part else "",
             f"{model_states(parameters, recipe, ranks=ranks, stage=stage).total / GB:g}")
            for stage, (name, part) in enumerate(zip(STAGES, divided, strict=True))]
    guess = guessed("3.8b")
    return Table(f"{parameters / 1e9:g}B parameters on {ranks} ranks, {recipe.name}: GB per rank",
                 ("", "on every rank", "divided", "GB"), rows,
                 note="" if guess is None else f"your guess for ZeRO-2: {guess:g}")


def _psi(each) -> str:
    return f"{each:g}Ψ" if each else "0"


@shows("3.9")
def show_choices(choose: Callable, gpu: str = "A100-80", activations: float = 10 * GB) -> Table:
    """What the student's function chooses on a GPU of `hardware`, for some models and ranks."""
    capacity = hardware.gpu(gpu).usable
    rows = [(model, *("-" if stage is None else STAGES[stage] for stage in (
        choose(parameters, ranks, capacity, activations) for ranks in TABLE_RANKS)))
            for model, parameters in MODELS.items()]
    return Table(f"on {gpu}s ({capacity / GB:.1f} GB each), with {activations / GB:g} GB of "
                 "activations", ("model", *(counted(ranks, "rank") for ranks in TABLE_RANKS)),
                 rows, note="-: no stage fits")
