"""What notebook 07a draws of Muon on shards: how far an update is off that was computed from a part
of a matrix."""

import torch

from labs.exercises.verdicts import shows
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.training import data, models
from labs.training.muon import newton_schulz, pieces_of, shard_length

_RANKS, _LAYERS, _CONTEXT, _BATCH = 4, 3, 64, 4


@shows("Muon on shards that are cut anywhere")
def show_sharded_muon() -> Picture:
    """Draws how far Muon's update of the matrices of a small Llama is off, if each of 4 ranks
    computes it from its own elements, and if it has the rest only from its own samples."""
    names, by_rank = _gradients()
    mean = {name: torch.stack([one[name] for one in by_rank]).mean(0) for name in names}
    shapes = [tuple(mean[name].shape) for name in names]
    layout = dict(zip(names, pieces_of(shapes, _RANKS), strict=True))
    alone = {name: _error(mean[name], layout[name], lambda _, m=mean[name]: torch.zeros_like(m))
             for name in names}
    partly = {name: _error(mean[name], layout[name], lambda rank, n=name: by_rank[rank][n])
              for name in names}
    cut = [name for name in names if len(layout[name]) > 1]
    others = [name for name in names if len(layout[name]) == 1]
    labels = [f"{len(others)} others, each on one rank"] + [
        f"{name}, on ranks {min(layout[name])} and {max(layout[name])}" for name in cut]
    share = sum(mean[name].numel() for name in cut) / sum(m.numel() for m in mean.values())
    note = (f"{len(names)} matrices, shards of {shard_length(shapes, _RANKS):,} elements.\nThe "
            f"{len(cut)} on a boundary have {share:.0%} of the elements: only these must travel.")
    colour = palette.MEMORY["optimizer state"]
    panels = [Panel(title, "% off, of the update's norm", [max(errors[name] for name in others),
                                                      *(errors[name] for name in cut)],
                    colour=colour)
              for title, errors in (("from the rank's own elements", alone),
                                    ("from a partly reduced matrix", partly))]
    return side_by_side(labels, panels, note)


def _gradients() -> tuple[list[str], list[dict[str, torch.Tensor]]]:
    """Names of the matrices of a small Llama's layers, and by rank their gradients on samples of
    its own."""
    model, found = models.llama(layers=_LAYERS, hidden=64, context=_CONTEXT), []
    for batch in data.lm_batches(_RANKS, _BATCH, _CONTEXT):
        model.zero_grad()
        model(**batch).loss.backward()
        found.append({_short(name): p.grad.clone()
                      for name, p in models.blocks(model).named_parameters() if p.dim() == 2})
    return list(found[0]), found


def _short(name) -> str:
    """"0.mlp.up_proj.weight" as "layer 0 up_proj"."""
    layer, *_, matrix, _ = name.split(".")
    return f"layer {layer} {matrix}"


def _error(reduced, pieces, rest) -> float:
    """Percent of the norm by which an update is off that each rank computes from its own piece of
    the reduced matrix and from rest(rank) elsewhere, and of which it keeps its own piece."""
    whole = newton_schulz(reduced)
    built = torch.empty_like(whole).flatten()
    for rank, piece in pieces.items():
        mixed = rest(rank).flatten().clone()
        mixed[piece.in_matrix] = reduced.flatten()[piece.in_matrix]
        built[piece.in_matrix] = newton_schulz(mixed.view_as(whole)).flatten()[piece.in_matrix]
    return 100 * ((built.view_as(whole) - whole).norm() / whole.norm()).item()

