"""What happens inside a flat parameter, and what a reduce-scatter really sends."""

from collections.abc import Callable

import torch

from labs.exercises.guesses import guessed
from labs.exercises.verdicts import shows
from labs.pictures import palette
from labs.pictures.bars import Bar, bars
from labs.pictures.picture import WIDTH, Picture
from labs.pictures.sheet import box, sheet, write
from labs.predictions import traffic
from labs.training.presets import Preset
from labs.workers.launcher import launch
from labs.zero_stages.charts import recording
from labs.zero_stages.checks.reshard import CountingReader, shards_of

_RANKS = 2
_LEFT, _CELL, _HIGH, _ROW = 0.15, 0.4, 0.36, 1.42  # inches


@shows("3.2")
def show_reduce_scatter(preset: Preset) -> Picture:
    """MB that leave a rank in a reduce-scatter of 8 MiB on gloo: torch's own, the lab's, and the
    all-reduce of which it is half. Counted in the rank's TCP connections, with the formula's tick;
    where the system does not count, the formula alone."""
    # On the CPU on every machine: it shows what gloo does, and NCCL's bytes pass no connection that
    # the system counts.
    sent = launch(recording.sent_by_each, ranks=preset.ranks, quiet=True, verify=False,
                  device="cpu")[0]
    size = 4 * recording.elements(preset.ranks)
    formulas = {"all_reduce, keep a piece": traffic.all_reduce,
                "torch's reduce_scatter": traffic.all_reduce,
                "lab.reduce_scatter": traffic.reduce_scatter}
    rows = []
    for (name, formula), counted in zip(formulas.items(), sent, strict=True):
        want = formula(size, preset.ranks) / 1e6
        rows.append(Bar(name, want if counted is None else counted / 1e6, want,
                        colour=palette.PHASES["communication"]))
    return bars(rows, "MB", f"that leave each of {preset.ranks} ranks for {size / 1e6:.1f} MB, gloo"
                + ", by formula" * (None in sent))


@shows("3.4")
def show_storage() -> Picture:
    """A layer of 9 parameters as a FlatParameter on 2 ranks, seen from rank 0: when it is built,
    after `free`, after `allocate` and the all-gather; what has memory, and whether the parameters
    and what autograd saved in forward can be read."""
    moments = launch(recording.record_storage, ranks=_RANKS, quiet=True)[0]
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


@shows("3.7")
def show_reads(reshard: Callable, before: int = 512, after: int = 8, total: int = 840) -> Picture:
    """Draws the GB that a new rank reads: all shards, as who joins them would, and what `reshard`
    reads of them, counted on a model in which an element stands for 10 MB. total: GB."""
    elements = 100 * total
    read = CountingReader(shards_of(torch.ones(elements), before))
    reshard(read, elements, before, after, 0)
    rows = [Bar("all shards, joined and cut again", total, colour=palette.PLAIN),
            Bar("your reshard", read.elements / 100, total / after, guessed("3.7"), palette.PLAIN)]
    return bars(rows, "GB", f"read by one of {after} ranks, saved by {before}",
                note="Counted with tensors in which one element stands for 10 MB.",
                source="counted")
