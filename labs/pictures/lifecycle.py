"""The lifecycle of ZeRO-3 layers over a step: when their parameters are gathered, and what memory
that takes."""

from dataclasses import dataclass
from itertools import accumulate

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from labs.pictures import palette
from labs.pictures.marks import legend_above, name_rows
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.timelines import MS, shade

GATHERED, GATHERING = palette.MEMORY["parameters"], palette.PHASES["communication"]
ALL_PARAMETERS = {"color": palette.PREDICTED, "linestyle": (0, (3, 2)), "linewidth": 1}

Intervals = dict[str, list[tuple[float, float]]]  # unit name -> (begin, end)


@dataclass(frozen=True)
class Lifecycle:
    """One step of one rank, in seconds from its start.

    phases: name -> (begin, end). gathered: when a unit's full parameters have memory. gathering:
    when their all-gather is in flight. sizes: unit name -> bytes of its full parameters.
    """

    phases: dict[str, tuple[float, float]]
    gathered: Intervals
    gathering: Intervals
    sizes: dict[str, int]

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return max(end for _, end in self.phases.values())

    def most_gathered(self) -> int:
        """The largest number of units that are gathered at the same time."""
        return max(total for _, total in self.totals(dict.fromkeys(self.sizes, 1)))

    def peak(self) -> int:
        """The most bytes of full parameters at any moment."""
        return max(total for _, total in self.totals(self.sizes))

    def totals(self, sizes: dict[str, int]) -> list[tuple[float, int]]:
        """(time, sum of the sizes of all units gathered from then on), in order, from time 0."""
        changes = sorted((time, sign * sizes[name]) for name, intervals in self.gathered.items()
                         for begin, end in intervals for time, sign in ((begin, 1), (end, -1)))
        times, steps = zip((0.0, 0), *changes, strict=True)
        return list(zip(times, accumulate(steps), strict=True))


def gathered_layers(lifecycle: Lifecycle) -> Picture:
    """A row for each unit, and the bytes of all gathered parameters below."""
    names = list(lifecycle.gathered)
    figure, (ax, below) = canvas(WIDTH, 1.9 + 0.27 * len(names), nrows=2, sharex=True,
                                 gridspec_kw={"height_ratios": [0.27 * len(names), 0.75]})
    for phase, (begin, end) in lifecycle.phases.items():
        wide = end - begin > 0.1 * lifecycle.seconds  # a shorter phase has no room for its name
        shade(ax, phase, begin, end, phase if wide else "")
        shade(below, phase, begin, end)
    for row, name in enumerate(names):
        for intervals, colour in ((lifecycle.gathered, GATHERED), (lifecycle.gathering, GATHERING)):
            for begin, end in intervals[name]:
                ax.barh(row, (end - begin) * MS, left=begin * MS, height=0.66, color=colour)
    name_rows(ax, names, above=1.1, size=9)
    ax.set_xlim(0, lifecycle.seconds * MS)
    _draw_total(below, lifecycle)
    legend_above(figure, [Patch(color=GATHERING, label="being gathered"),
                          Patch(color=GATHERED, label="gathered"),
                          Line2D([], [], **ALL_PARAMETERS, label="all parameters")])
    text = (f"at most {lifecycle.most_gathered()} of {len(names)} units are gathered at a time: "
            f"{lifecycle.peak() / 1e6:.2f} of {sum(lifecycle.sizes.values()) / 1e6:.2f} MB")
    return Picture(figure, text, data=lifecycle)


def _draw_total(ax, lifecycle):
    times, totals = zip(*lifecycle.totals(lifecycle.sizes), strict=True)
    ax.fill_between([time * MS for time in times], [total / 1e6 for total in totals], step="post",
                    color=GATHERED, alpha=0.75, linewidth=0)
    everything = sum(lifecycle.sizes.values()) / 1e6
    ax.axhline(everything, **ALL_PARAMETERS)
    ax.set_ylim(0, everything * 1.12)
    ax.set_ylabel("MB gathered", fontsize=9)
    ax.set_xlabel("milliseconds since the step began")
