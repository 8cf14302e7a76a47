"""What dropout drops on each rank: a picture of masks."""

from collections.abc import Callable

import numpy

from labs.exercises.verdicts import shows
from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.tensor_parallel.checks.dropout_streams import STEPS, Masks, P, masks_of_rank
from labs.words import counted
from labs.workers.launcher import launch

RANKS, SHAPE, SEED = 4, (8, 16), 0
_KINDS = {False: "a tensor that all ranks have", True: "this rank's shard"}


@shows("7.8")
def show_masks(streams_class: Callable) -> Picture:
    """Draws the masks of the student's two streams over several steps on 4 ranks: a row for each
    rank, dropped numbers dark."""
    by_rank = launch(masks_of_rank, streams_class, SEED, SHAPE, ranks=RANKS, quiet=True)
    figure, axes = canvas(WIDTH, 3.3, nrows=RANKS, ncols=2 * STEPS + 1, squeeze=False,
                          width_ratios=[1] * STEPS + [0.12] + [1] * STEPS)
    figure.get_layout_engine().set(wspace=0.03, hspace=0.04)
    for rank, masks in enumerate(by_rank):
        axes[rank][STEPS].set_axis_off()
        for is_shard, of_steps in masks.items():
            for step, mask in enumerate(of_steps):
                ax = axes[rank][step + is_shard * (STEPS + 1)]
                _draw_mask(ax, mask, palette.rank(rank) if is_shard else palette.PLAIN)
                if not rank:
                    ax.set_title(f"step {step}", fontsize=9.5, color=palette.MUTED)
        axes[rank][0].set_ylabel(f"rank {rank}", rotation=0, ha="right", va="center")
    for is_shard, kind in _KINDS.items():
        middle = axes[-1][STEPS // 2 + is_shard * (STEPS + 1)]
        middle.set_xlabel(f"dropout of {kind}", fontsize=10)
    return Picture(figure, _in_words(by_rank), data=by_rank)


def _draw_mask(ax, mask, colour):
    """A mask with the dropped numbers in the colour."""
    pixels = numpy.array([[palette.SURFACE, colour][int(dropped)] for dropped in ~mask.flatten()])
    rgb = numpy.array([[int(pixel[at:at + 2], 16) for at in (1, 3, 5)] for pixel in pixels])
    ax.imshow(rgb.reshape(*mask.shape, 3), aspect="auto", interpolation="nearest")
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set(visible=True, color=palette.BORDER)


def _in_words(by_rank: list[Masks]) -> str:
    lines = [f"masks of dropout with p = {P:g}, a row for each rank, a column for each step"]
    for is_shard, kind in _KINDS.items():
        different = [len({mask.numpy().tobytes() for mask in masks}) for masks in
                     zip(*(of_rank[is_shard] for of_rank in by_rank), strict=True)]
        lines.append(f"dropout of {kind}: " + ", ".join(
            f"step {step}: {counted(number, 'different mask')} on {len(by_rank)} ranks"
            for step, number in enumerate(different)))
    return "\n".join(lines)
