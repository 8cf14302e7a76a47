"""How layers are cut, gathered and freed: pictures that run the student's own code."""

import contextlib
import time
from collections.abc import Callable
from unittest import mock

import torch
import torch.distributed as dist

from labs.exercises.comparison import batches, build, model_of
from labs.exercises.gpu_notes import spreads_of_recorded
from labs.exercises.verdicts import Wrong, shows
from labs.meters.throughput import WARMUP_ON_GPU
from labs.pictures import shards, timelines
from labs.pictures.picture import Picture
from labs.training import models
from labs.training.loop import train
from labs.training.presets import Preset
from labs.workers import devices
from labs.workers.launcher import launch
from labs.workers.progress import status
from labs.workers.slow_link import Link
from labs.zero_stages.checks.cut import reject_wrong_pieces
from labs.zero_stages.flat_parameter import layer_groups

WARMUP = 2  # steps before those that are recorded
STEPS = 9  # the fastest of them is drawn, because other load only adds time
# Each rank's own link, on a CPU: a layer's gather takes less time than a layer computes, and the
# cores are free meanwhile, as on a GPU.
LINK = Link(bytes_per_second=150e6, latency=2e-4)


@shows("3.1")
def show_owners(cut: Callable, preset: Preset, ranks: int | None = None) -> Picture:
    """The preset's GPT-2 cut by the student's `cut`: as one flat tensor, and layer by layer."""
    ranks = ranks or max(preset.ranks, 3)
    with status("loading transformers for GPT-2"):  # once, and it takes seconds
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


@shows("3.4")
def show_gathered_layers(strategy: Callable, preset: Preset) -> Picture:
    """When each layer of the preset's GPT-2 is gathered in a step of ZeRO-3, on rank 0, and when
    the rank only waits for a gather. On a CPU, the ranks' collectives pass a slow link. On GPUs a
    note says how long the recorded steps took, of which the fastest is drawn."""
    found = launch(_record_lifecycle, strategy, preset, link=LINK, ranks=preset.ranks, quiet=True,
                   verify=False)[0]
    return timelines.gathered_layers(
        found, spreads_of_recorded({f"{STEPS} recorded steps": found.recorded}, preset))


def _record_lifecycle(strategy, preset) -> timelines.Lifecycle:
    module, optimizer = build(strategy, preset)
    units = getattr(module, "units", None)
    if not units:
        raise Wrong("the strategy's module has no units", "Wrap the model in a lab.ShardedModule.")
    *warmup, batch = batches(
        preset, 1 + (WARMUP_ON_GPU if devices.device().type == "cuda" else WARMUP))
    train(module, optimizer, warmup)
    recorded = []
    for _ in range(STEPS):
        events, times = {unit.name: [] for unit in units}, []
        dist.barrier()
        with _log_events(module, events):
            _timed_step(module, optimizer, batch, times)
        recorded.append((times[-1] - times[0], len(recorded), events, times))
    _, _, events, times = min(recorded)
    phases = {name: (times[n] - times[0], times[n + 1] - times[0])
              for n, name in enumerate(("forward", "backward", "optimizer"))}
    waiting = sorted(span for of_unit in events.values() for span in _waits(of_unit, times[0]))
    gathered, gathering = ({name: _intervals(of_unit, times[0], last)
                            for name, of_unit in events.items()} for last in ("free", "ready"))
    return timelines.Lifecycle(phases, gathered, gathering, {
        unit.name: unit.full.numel() * unit.full.element_size() for unit in units}, waiting,
        [seconds for seconds, *_ in recorded])


def _timed_step(module, optimizer, batch, times):
    times.append(_now())
    loss = module(**batch).loss
    times.append(_now())
    loss.backward()
    times.append(_now())
    optimizer.step()
    optimizer.zero_grad()
    times.append(_now())


def _now() -> float:
    """Seconds, when the device has computed what it was given: a GPU would be behind otherwise, and
    a wait for a gather would cost the CPU no time. Gathers go on meanwhile."""
    devices.finish_computing()
    return time.perf_counter()


def _log_events(module, events) -> contextlib.ExitStack:
    """While it is open, (event, time) is appended for each unit that is allocated, ready for use,
    or freed."""
    def logged(owner, method, event, unit=None):
        original = getattr(owner, method)

        def call(*args):
            if event == "ready":
                events[args[0].name].append(("wanted", _now()))
            result = original(*args)
            events[(unit or args[0]).name].append((event, _now()))
            return result

        return mock.patch.object(owner, method, call)

    stack = contextlib.ExitStack()
    for unit in module.units:
        for method in ("allocate", "free"):
            stack.enter_context(logged(unit, method, method, unit))
    for hook in ("before_forward", "before_backward"):
        stack.enter_context(logged(module, hook, "ready"))
    return stack


def _waits(events, begin) -> list[tuple[float, float]]:
    """(begin, end) of each call in which a unit is made ready: nothing computes meanwhile. A hook
    that calls the other one is one wait."""
    found, depth, since = [], 0, 0.0
    for event, moment in events:
        if event == "wanted":
            since = since if depth else moment - begin
            depth += 1
        elif event == "ready":
            depth -= 1
            if not depth:
                found.append((since, moment - begin))
    return found


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
