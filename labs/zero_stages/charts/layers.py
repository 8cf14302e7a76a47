"""How layers are cut, gathered and freed: pictures that run the student's own code."""

from collections.abc import Callable

import torch

from labs.exercises.comparison import model_of
from labs.exercises.gpu_notes import spreads_of_recorded
from labs.exercises.verdicts import shows
from labs.pictures import shards, timelines
from labs.pictures.picture import Picture
from labs.training import models
from labs.training.presets import Preset
from labs.workers.launcher import launch
from labs.workers.progress import status
from labs.workers.slow_link import Link
from labs.zero_stages.charts import recording
from labs.zero_stages.checks.cut import reject_wrong_pieces
from labs.zero_stages.flat_parameter import layer_groups

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
    found = timelines.Lifecycle(**launch(recording.record_lifecycle, strategy, preset, link=LINK,
                                         ranks=preset.ranks, quiet=True, verify=False)[0])
    return timelines.gathered_layers(found, spreads_of_recorded(
        {f"{recording.STEPS} recorded steps": found.recorded}, preset))
