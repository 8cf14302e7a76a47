"""Exercise 3.3: ZeRO-2, gradients are reduced and freed during backward; and what happens inside a
flat parameter's storage meanwhile."""

from collections.abc import Callable

from labs.checks.verdicts import check, shows
from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import box, sheet, write
from labs.workers.launcher import launch
from labs.zero_stages import lifecycle_recording
from labs.zero_stages.stages import equal, moves, verify_stage

_NOT_REDUCED = (
    "Nothing of it was updated here. Does every shard get its gradient before inner.step() "
    "(unit.add_gradient), also that of the unit reduced last (backward_done)?")


@check("3.3")
def check_zero2(strategy: Callable):
    """strategy(model, optimizer_class, **settings) -> (module, optimizer): ZeRO-2."""
    difference, volume = verify_stage(strategy, 2, overlap=True,
                                      nothing_updated=_NOT_REDUCED)
    return (f"{equal(difference)}, keeps 4Ψ/N bytes of gradients, reduces those of one layer "
            f"while the next one computes, and {moves(volume)}")


_RANKS = 2
_LEFT, _CELL, _HIGH, _ROW = 0.15, 0.4, 0.36, 1.42  # inches


@shows("3.4")
def show_storage() -> Picture:
    """A layer of 9 parameters as a FlatParameter on 2 ranks, seen from rank 0: when it is built,
    after `free`, after `allocate` and the all-gather; what has memory, and whether the parameters
    and what autograd saved in forward can be read."""
    # By moment: built, freed, gathered again.
    moments = launch(lifecycle_recording.record_storage, ranks=_RANKS, quiet=True)[0]
    figure, ax = sheet(WIDTH, 0.62 + _ROW * len(moments))
    write(ax, _LEFT, 0.2, "nn.Linear(2, 3) on 2 ranks, seen from rank 0: 6 + 3 parameters, 1 zero",
          size=10)
    for number, moment in enumerate(moments):
        _draw_moment(ax, 0.62 + _ROW * number, moment)
    return Picture(figure, "\n".join(map(_in_words, moments)), data=moments)


def _in_words(moment) -> str:
    shard = "a tensor of its own" if moment["own"] else "a view of full"
    readable = "can be read" if moment["parameters"] and moment["saved"] else "cannot be read"
    return (f"{moment['title']}: full has {moment['full']} bytes, shard is {shard}; the parameters "
            f"and autograd's saved weight {readable}")


def _draw_moment(ax, y, moment):
    write(ax, _LEFT, y, moment["title"], size=10, weight="bold")
    x, top = _LEFT + 0.75, y + 0.22
    write(ax, _LEFT, top + _HIGH / 2, "full", size=9.5, weight="bold")
    for cell in range(10):
        filled = [palette.rank(cell // 5)] if moment["full"] else []
        box(ax, x + cell * _CELL, top, _CELL - 0.03, _HIGH, filled, edge=palette.MUTED,
            dashed=not filled)
    state = f"{moment['full']} bytes" if moment["full"] else "0 bytes: the storage is empty"
    write(ax, x + 10 * _CELL + 0.12, top + _HIGH / 2, state, size=9.5)
    good = moment["parameters"] and moment["saved"]
    colour = palette.INK if good else palette.MUTED
    for begin, count, words in ((0, 6, "weight, saved by autograd, too"), (6, 3, "bias"),
                                (9, 1, "0")):
        left, right = x + begin * _CELL, x + (begin + count) * _CELL - 0.03
        ax.plot([left, left, right, right], [top + 0.42, top + 0.48, top + 0.48, top + 0.42],
                color=colour, linewidth=1)
        write(ax, (left + right) / 2, top + 0.6, words, size=9, ha="center", colour=colour)
    write(ax, x + 10 * _CELL + 0.12, top + 0.6, "the views are valid" if good else
          "the views point to the storage, and must not be read", size=9, colour=colour)
    _draw_shard(ax, x, top + 0.76, moment)


def _draw_shard(ax, x, y, moment):
    write(ax, _LEFT, y + 0.1, "shard", size=9.5, weight="bold")
    if not moment["own"]:
        ax.plot([x, x + 5 * _CELL - 0.03], [y + 0.1] * 2, color=palette.rank(0), linewidth=4)
        write(ax, x + 5 * _CELL + 0.1, y + 0.1, "a view of full: no memory of its own", size=9)
        return
    for cell in range(5):
        box(ax, x + cell * _CELL, y, _CELL - 0.03, 0.2, [palette.rank(0)])
    write(ax, x + 5 * _CELL + 0.1, y + 0.1, f"{moment['shard']} bytes of its own", size=9)
