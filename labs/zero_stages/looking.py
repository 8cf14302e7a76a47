"""The pictures of notebook 03 that show shards and layers, made from the student's own code."""

import functools
import time

import torch
import torch.distributed as dist

from labs.exercises.verdicts import Wrong, shows
from labs.pictures import lifecycle, shards
from labs.training import data, models
from labs.training.presets import Preset
from labs.workers import devices
from labs.workers.launcher import launch
from labs.zero_stages.cutting import judge_pieces
from labs.zero_stages.sharded import grouped


@shows("3.1")
def show_owners(cut, preset: Preset, ranks: int = None):
    """The preset's GPT-2 cut by the student's `cut`: as one flat tensor, and layer by layer."""
    ranks = ranks or max(preset.ranks, 3)
    model = models.gpt2(preset.layers, preset.hidden, preset.heads, preset.context)
    layers = [(name, sum(p.numel() for p in parameters))
              for name, _, parameters in grouped(model)]
    rows = {"one flat tensor for all": [models.count_trainable(model)],
            "a flat tensor for each layer": [n for _, n in layers]}
    return shards.owners(layers, {title: [_cut(cut, size, ranks) for size in sizes]
                                  for title, sizes in rows.items()}, ranks)


def _cut(cut, size, ranks) -> list:
    """(elements that are parameters, zeros) of each rank's piece."""
    flat = torch.ones(size)
    pieces = cut(flat, ranks)
    judge_pieces(pieces, flat, ranks)
    return [(int(piece.sum()), int((piece == 0).sum())) for piece in pieces]


@shows("3.4")
def show_layers(strategy, preset: Preset):
    """When each layer of the preset's GPT-2 is whole in a step of a ZeRO-3 strategy, on rank 0."""
    return lifecycle.layers(launch(_life, strategy, preset, ranks=preset.ranks, quiet=True,
                                   verify=False)[0])


def _life(strategy, preset) -> lifecycle.Life:
    model = models.gpt2(preset.layers, preset.hidden, preset.heads, preset.context)
    module, optimizer = strategy(model.to(devices.device()), torch.optim.AdamW, lr=1e-3)
    units = getattr(module, "units", None)
    if not units:
        raise Wrong("the strategy's module has no units", "Wrap the model in a lab.Sharded.")
    batches = [{name: value.to(devices.device()) for name, value in batch.items()} for batch in
               data.lm_batches(3, preset.batch, preset.context, seed=1000 * dist.get_rank())]
    for batch in batches[:2]:
        _step(module, optimizer, batch, [])
    logs, marks = _logged(module), []
    dist.barrier()
    _step(module, optimizer, batches[2], marks)
    return _told(units, logs, marks)


def _step(module, optimizer, batch, marks):
    marks.append(time.perf_counter())
    loss = module(**batch).loss
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    marks.append(time.perf_counter())


def _logged(module) -> dict:
    """unit name -> what happens to the unit from now on, as (what, time): its memory is allocated,
    is ready for use, is freed."""
    logs = {unit.name: [] for unit in module.units}

    def noted(method, what, name=None):
        @functools.wraps(method)
        def called(*args):
            result = method(*args)
            logs[name or args[0].name].append((what, time.perf_counter()))
            return result

        return called

    for unit in module.units:
        for what in ("allocate", "free"):
            setattr(unit, what, noted(getattr(unit, what), what, unit.name))
    for method in ("before_forward", "before_backward"):
        setattr(module, method, noted(getattr(module, method), "ready"))
    return logs


def _told(units, logs, marks) -> lifecycle.Life:
    begin = marks[0]
    phases = {name: (marks[n] - begin, marks[n + 1] - begin)
              for n, name in enumerate(("forward", "backward", "optimizer"))}
    whole, arriving = ({name: _stretches(events, begin, last) for name, events in logs.items()}
                       for last in ("free", "ready"))
    return lifecycle.Life(phases, whole, arriving, {
        unit.name: unit.whole.numel() * unit.whole.element_size() for unit in units})


def _stretches(events, begin, last) -> list:
    """(begin, end) from each allocation to what comes `last`."""
    found, since = [], None
    for what, moment in events:
        if what == "allocate":
            since = moment
        elif what == last and since is not None:
            found.append((since - begin, moment - begin))
            since = None
    return found
