"""The norm of the gradients of a divided Llama, counted rightly and in the ways that go wrong."""

from collections.abc import Callable

import torch.distributed as dist

from labs.exercises.verdicts import LAUNCH_SECONDS, shows
from labs.pictures import palette
from labs.pictures.bars import Panel, side_by_side
from labs.pictures.picture import Picture
from labs.tensor_parallel.charts.recording import record_norms
from labs.workers.launcher import launch

LAYOUTS = ("only the vocabulary divided", "all matrices divided")


@shows("7.6")
def show_norms(clip_grad_norm: Callable, vocabulary_parallel: Callable, strategy: Callable,
               ranks: int = 4) -> Picture:
    """Draws the norm that clip_grad_norm returns for the gradients of a Llama on ranks of this
    machine, beside that of the whole model and those of four wrong counts; where only the
    vocabulary is divided by vocabulary_parallel(model, group), and divided as strategy says."""
    def vocabulary_alone(model, optimizer_class, **settings):
        vocabulary_parallel(model, dist.group.WORLD)
        return model, optimizer_class(model.parameters(), **settings)

    strategies = dict(zip(LAYOUTS, (vocabulary_alone, strategy), strict=True))
    found = launch(record_norms, clip_grad_norm, strategies, ranks=ranks, quiet=True,
                   timeout=LAUNCH_SECONDS)[0]
    rows = list(found[LAYOUTS[0]].by_name())
    panels = [Panel(layout, "norm", list(norms.by_name().values()),
                    predicted=[norms.whole] * len(rows), colour=palette.MEMORY["gradients"])
              for layout, norms in found.items()]
    return side_by_side(rows, panels, note="predicted: the norm of the whole model's gradients, in "
                        "one process")
