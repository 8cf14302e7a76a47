"""The life of a ZeRO-3 layer over a step: when its parameters are whole, and what that costs."""

from dataclasses import dataclass

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.pictures import palette
from labs.pictures.marks import legend_above
from labs.pictures.picture import WIDTH, Picture, canvas

MS = 1e3


@dataclass(frozen=True)
class Life:
    """One step of one rank. phases: name -> (begin, end). whole: unit name -> stretches in which
    its parameters are there. arriving: unit name -> stretches in which they are on their way; all
    in seconds from the start of the step. sizes: unit name -> bytes of its whole parameters."""

    phases: dict
    whole: dict
    arriving: dict
    sizes: dict

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return max(end for _, end in self.phases.values())

    def most(self) -> int:
        """How many units are there at once, at most."""
        changes = sorted((time, step) for stretches in self.whole.values()
                         for begin, end in stretches for time, step in ((begin, 1), (end, -1)))
        most = now = 0
        for _, step in changes:
            now += step
            most = max(most, now)
        return most


def layers(life: Life) -> Picture:
    """A row for each unit, the bytes of all whole parameters below."""
    names = list(life.whole)
    figure, (ax, below) = canvas(WIDTH, 1.9 + 0.27 * len(names), nrows=2, sharex=True,
                                 gridspec_kw={"height_ratios": [0.27 * len(names), 0.75]})
    for name, (begin, end) in life.phases.items():
        for part in (ax, below):
            part.axvspan(begin * MS, end * MS, color=palette.PHASES[name], alpha=0.13, linewidth=0)
        if end - begin > 0.1 * life.seconds:
            ax.text(begin * MS, -0.75, f" {name}", color=palette.PHASES[name], fontsize=10)
    for row, name in enumerate(names):
        for begin, end in life.whole[name]:
            ax.barh(row, (end - begin) * MS, left=begin * MS, height=0.66,
                    color=palette.MEMORY["parameters"])
        for begin, end in life.arriving[name]:
            ax.barh(row, (end - begin) * MS, left=begin * MS, height=0.66,
                    color=palette.PHASES["communication"])
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", labelcolor=palette.INK, labelsize=9)
    ax.set_ylim(len(names) - 0.4, -1.1)
    ax.set_xlim(0, life.seconds * MS)
    _total(below, life)
    legend_above(figure, [Patch(color=palette.PHASES["communication"], label="being gathered"),
                          Patch(color=palette.MEMORY["parameters"], label="whole"),
                          Line2D([], [], color=palette.PREDICTED, linestyle=(0, (3, 2)),
                                 label="all parameters")])
    words = (f"at most {life.most()} of {len(names)} units are whole at a time: "
             f"{_peak(life) / 1e6:.2f} of {sum(life.sizes.values()) / 1e6:.2f} MB")
    return Picture(figure, words, data=life)


def _total(ax, life):
    times, totals = _curve(life)
    ax.fill_between([time * MS for time in times], [total / 1e6 for total in totals], step="post",
                    color=palette.MEMORY["parameters"], alpha=0.75, linewidth=0)
    everything = sum(life.sizes.values()) / 1e6
    ax.axhline(everything, color=palette.PREDICTED, linestyle=(0, (3, 2)), linewidth=1)
    ax.set_ylim(0, everything * 1.12)
    ax.set_ylabel("MB whole")
    ax.set_xlabel("milliseconds since the step began")


def _curve(life) -> tuple:
    changes = sorted((time, sign * life.sizes[name]) for name, stretches in life.whole.items()
                     for begin, end in stretches for time, sign in ((begin, 1), (end, -1)))
    times, totals = [0.0], [0]
    for time, change in changes:
        times.append(time)
        totals.append(totals[-1] + change)
    return times, totals


def _peak(life) -> int:
    return max(_curve(life)[1])
