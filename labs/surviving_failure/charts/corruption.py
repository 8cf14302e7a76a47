"""The pictures of silent corruption: what the loss says of each bit, and who finds which flip."""

import math
from collections.abc import Callable

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.surviving_failure.crashes import flips
from labs.workers.progress import status

_LEAST, _MOST = 1e-9, 1e3  # of the axis; equal losses stand at the bottom, NaN at the top
_FOUND, _MISSED = palette.RUNS[1], palette.RANK_FAILED


@shows("8.10")
def show_flips(find_corrupt: Callable) -> Picture:
    """Draws by how much each bit of one weight of one replica, flipped, changes the mean loss of
    the next steps, beside its change from one batch to the next, and whether find_corrupt
    names the replica after these steps."""
    with status(f"flipping {len(flips.BITS)} bits on {flips.RANKS} ranks"):
        flipped = flips.flip_every_bit(find_corrupt)
    plain = flipped.losses[None]
    usual = max(abs(after / before - 1)
                for before, after in zip(plain, plain[1:], strict=False))
    changes = {bit: max(_change(loss, before) for loss, before in
                        zip(flipped.losses[bit], plain, strict=True)) for bit in flips.BITS}
    named = [bit for bit in flips.BITS if [flips.CORRUPT] in flipped.found[bit].values()]
    shown = [bit for bit, change in changes.items() if not change <= usual]
    figure, ax = canvas(WIDTH, 3.5)
    ax.axhspan(_LEAST, usual, color=palette.GRID, zorder=0)
    for bit, change in changes.items():
        height = _MOST if math.isnan(change) else min(max(change, _LEAST), _MOST)
        colour = _FOUND if bit in named else _MISSED
        ax.plot([bit, bit], [_LEAST, height], color=colour, linewidth=1.4)
        ax.plot(bit, height, "o" if bit in named else "X", color=colour, markersize=7,
                clip_on=False, zorder=3)
        if math.isnan(change):
            ax.annotate("NaN", (bit, height), xytext=(-9, 0), textcoords="offset points",
                        ha="right", va="center", fontsize=9.5)
    _set_axes(ax)
    marks.legend_above(figure, [
        Line2D([], [], linestyle="", marker="o", color=_FOUND, label="digests name the rank"),
        Line2D([], [], linestyle="", marker="X", color=_MISSED, label="all replicas are equal"),
        Patch(color=palette.GRID, label="changes from one batch to the next")])
    return Picture(figure, "\n".join(_words(flipped, usual, shown, named)),
                   data=(flipped, guessed("8.10")))


def _change(loss, before) -> float:
    return abs(loss / before - 1) if math.isfinite(loss) else math.nan


def _set_axes(ax):
    ax.set_yscale("log")
    ax.set_ylim(_LEAST, _MOST)
    ax.set_yticks([1e-7, 1e-4, 1e-1], ["1e-7", "1e-4", "0.1"])
    ax.set_xticks([0, 10, 22, 30, 31], ["0", "10", "22", "30", "31\nsign"])
    ax.set_xlabel("bit of a float32 weight: 0 to 22 mantissa, 23 to 30 exponent")
    ax.set_ylabel(f"largest relative change\nof the loss in {flips.AFTER} steps")


def _words(flipped, usual, shown, named) -> list[str]:
    guess = guessed("8.10")
    yours = f" (your guess: {guess:g})" if guess is not None else ""
    return [
        f"{flips.RANKS} replicas, one bit of one weight flips on rank {flips.CORRUPT}; the weight "
        f"was {flipped.weights[None]:.4g}",
        f"bits that change the loss by more than the next batch does, {usual:.0%}: "
        f"{len(shown)} of {len(flipped.weights) - 1}{yours}: {_list(shown)}",
        f"bits after which find_corrupt names the rank, {flips.AFTER} steps later: {len(named)}; "
        f"all replicas are equal after bits {_list(set(flips.BITS) - set(named))}",
        f"one call: {1e3 * flipped.seconds:.0f} ms, a step {1e3 * flipped.step_seconds:.0f} ms; a "
        f"rank gives {flipped.sent:,} bytes, its replica has {flipped.model:,}"]


def _list(bits) -> str:
    return ", ".join(map(str, sorted(bits))) or "none"


@shows("8.10")
def show_gradient_flips(find_corrupt: Callable) -> Table:
    """Who notices a flip in a parameter, in the averaged gradient, and in a rank's own."""
    with status(f"flipping bits of gradients on {flips.RANKS} ranks"):
        found = flips.flip_gradients(find_corrupt)
    rows = [(place, "differ" if differ else "equal", _said(said),
             "ten times" if is_odd else "as others", "differ" if second else "equal")
            for place, (differ, said, is_odd, second) in found.items()]
    return Table(f"A bit flips on rank {flips.CORRUPT} of {flips.RANKS}, in its", (
        "", "replicas", "find_corrupt", "norm of its own gradient", "gradient computed twice"),
        rows, left=1)


@shows("8.10")
def show_layouts(find_corrupt: Callable) -> Table:
    """Who notices a flip of a parameter, by layout and by the moment at which it happens."""
    with status(f"three layouts on {flips.RANKS} ranks"):
        found = flips.flip_in_layouts(find_corrupt)
    rows = [(layout, when, "no replica" if said is None else _said(said),
             f"rank {changed[0]}" if changed else "nothing")
            for (layout, when), (said, changed) in found.items()]
    return Table(f"A parameter of rank {flips.CORRUPT} is corrupt", (
        "layout", "since when", "find_corrupt", "own digest, after a step and before the next"),
        rows, left=2)


def _said(found) -> str:
    if not found:
        return "nothing"
    [ranks, *_] = found.values()
    return f"rank {', '.join(map(str, ranks))}" if ranks else "they differ"
