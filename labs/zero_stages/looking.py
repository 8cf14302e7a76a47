"""The pictures of notebook 03 that show shards and layers, made from the student's own code."""

import torch

from labs.exercises import shows
from labs.pictures import shards
from labs.training import models
from labs.training.presets import Preset
from labs.zero_stages.cutting import judge_pieces
from labs.zero_stages.sharded import grouped


@shows("3.1")
def show_owners(cut, preset: Preset, ranks: int = None):
    """The preset's GPT-2 cut by the student's `cut`: as one flat tensor, and layer by layer."""
    ranks = ranks or max(preset.ranks, 3)
    model = models.gpt2(preset.layers, preset.hidden, preset.heads, preset.context)
    layers = [(name, sum(p.numel() for p in parameters))
              for name, _, parameters in grouped(model)]
    rows = {"one flat tensor, as in ZeRO-1": [models.count(model)],
            "a flat tensor for each layer, as in ZeRO-2 and ZeRO-3": [n for _, n in layers]}
    return shards.owners(layers, {title: [_cut(cut, size, ranks) for size in sizes]
                                  for title, sizes in rows.items()}, ranks)


def _cut(cut, size, ranks) -> list:
    """(elements that are parameters, zeros) of each rank's piece."""
    flat = torch.ones(size)
    pieces = cut(flat, ranks)
    judge_pieces(pieces, flat, ranks)
    return [(int(piece.sum()), int((piece == 0).sum())) for piece in pieces]
