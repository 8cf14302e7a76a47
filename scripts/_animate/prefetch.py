"""When ZeRO-3 gathers its layers, without and with prefetch: notebook 03's answers on real ranks, a
step of each over the same clock."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import product

from _bench.progress import say
from _build.definitions import definitions

from _animate import NotShown
from labs.pictures import palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.timelines import MS, Lifecycle, draw_units, units_legend
from labs.workers.launcher import launch
from labs.zero_stages import lifecycle_recording, zero3

TITLE = "Prefetch: gather the next layer while this one computes, and the rank hardly waits"
NAMES = {"zero3": "without prefetch: a layer is gathered when it is needed",
         "zero3_prefetch": "with prefetch: the next layer is gathered meanwhile"}
ROUNDS = 5  # launches of each variant, each of which gives its fastest step
TICKS, SECONDS, END = 66, 6.6, 3.0  # frames, and for how long they are shown; the last frame
HEAD = 0.7  # inches above the timelines: the lesson, and what the bars mean
GAIN, ALIKE = 0.5, 0.15  # of the waiting must be gone; how far computing may be apart


def record(ranks: int) -> dict:
    """The fields of a Lifecycle for each variant. Raises NotShown where the machine was too busy to
    compare them. ranks: not used, the preset knows how many."""
    solution = definitions("03_zero_stages")
    found: dict[str, list[Lifecycle]] = {name: [] for name in NAMES}
    for turn in range(ROUNDS):
        for name, steps in found.items():
            say(f"prefetch: {name}, launch {turn + 1} of {ROUNDS}")
            steps.append(Lifecycle(**launch(
                lifecycle_recording.record_lifecycle, getattr(solution, name), solution.PRESET,
                link=zero3.LINK, ranks=solution.PRESET.ranks, quiet=True, verify=False)[0]))
    # Both compute the same. Of all pairs the one whose computing took the same time, too, is free
    # of what else the machine did: what differs is what prefetch changes.
    pair = min(product(*found.values()), key=_apart)
    without, with_it = pair
    if _apart(pair) > ALIKE or with_it.waited > GAIN * without.waited:
        raise NotShown(f"prefetch: computing took {_computing(without) * MS:.0f} ms without it and "
                       f"{_computing(with_it) * MS:.0f} ms with it, waiting "
                       f"{without.waited * MS:.0f} ms and {with_it.waited * MS:.0f} ms: the "
                       "machine is busy. Run scripts/animate again when it is quieter.")
    return dict(zip(NAMES, map(asdict, pair), strict=True))


def _computing(step: Lifecycle) -> float:
    return step.seconds - step.waited


def _apart(pair) -> float:
    """How far the seconds of computing of two steps are apart, as a part of the longer ones."""
    low, high = sorted(map(_computing, pair))
    return (high - low) / high


def frames(recorded: dict) -> Iterator[tuple[Picture, float]]:
    """(picture, seconds) of each frame."""
    film = _Film(recorded)
    for tick in range(TICKS):
        yield film.at(film.longest * tick / TICKS), SECONDS / TICKS
    yield still(recorded), END


def still(recorded: dict) -> Picture:
    """The last frame: both steps to their ends, and what they took."""
    film = _Film(recorded)
    return film.at(film.longest, _outcome(film.steps))


def alt(recorded: dict) -> str:
    """What the moving picture shows, for who does not see it."""
    steps = [Lifecycle(**recorded[name]) for name in NAMES]
    return ("Two timelines of a training step of ZeRO-3, forward and backward, with a row for each "
            "layer: when it is being gathered, and when it is gathered. Without prefetch the rank "
            "waits for each layer's all-gather. With prefetch each all-gather runs while the layer "
            f"before it computes. {_outcome(steps)}")


def _outcome(steps) -> str:
    before, after = steps
    return (f"The rank waits {after.waited * MS:.0f} ms instead of {before.waited * MS:.0f} ms, "
            f"and at most {after.most_gathered()} units are in its memory instead of "
            f"{before.most_gathered()}.")


class _Film:
    """Both timelines, drawn once. A frame covers what has not happened yet: so nothing moves but
    the time."""

    def __init__(self, recorded):
        self.steps = [Lifecycle(**recorded[name]) for name in NAMES]
        self.longest = max(step.seconds for step in self.steps)
        rows = 1 + len(self.steps[0].gathered)
        self.figure, axes = canvas(WIDTH, 2.5 + 2 * 0.225 * (rows + 1), nrows=2, sharex=True)
        high = self.figure.get_size_inches()[1]
        self.figure.text(0.012, 1 - 0.2 / high, TITLE, fontsize=12, weight="bold", va="center",
                         color=palette.INK)
        self.figure.legend(handles=units_legend(), ncols=3, loc="upper left", frameon=False,
                           bbox_to_anchor=(0.0, 1 - 0.36 / high), fontsize=9.5, handlelength=1.4,
                           columnspacing=1.2)
        self.figure.get_layout_engine().set(rect=(0.006, 0.012, 0.988, 0.98 - HEAD / high))
        self.moving = []
        for ax, step, name in zip(axes, self.steps, NAMES.values(), strict=True):
            draw_units(ax, step)
            ax.set_title(name, loc="left", fontsize=10.5, weight="bold")
            waited = ax.set_title("the rank has waited 000 ms", loc="right", fontsize=10,
                                  color=palette.readable(palette.PHASES["exposed"]))
            self.moving.append((ax, step, waited))
        axes[0].set_xlim(0, self.longest * MS)
        axes[1].set_xlabel("milliseconds since the step began")
        self.told = self.figure.supxlabel(_outcome(self.steps), fontsize=10.5, x=0.012,
                                          ha="left", weight="bold")
        # Placed once, with all texts at their widest; a layout for each frame would make it shake.
        self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")
        self.covers = []

    def at(self, moment: float, told: str = "") -> Picture:
        """The picture at a moment, in seconds since the step began. told: below the timelines."""
        for artist in self.covers:
            artist.remove()
        self.covers = []
        for ax, step, waited in self.moving:
            until = min(moment, step.seconds)
            gone = sum(min(end, until) - begin for begin, end in step.waiting if begin < until)
            waited.set_text(f"the rank has waited {gone * MS:.0f} ms")
            self.covers.append(ax.axvspan(until * MS, self.longest * MS * 1.01, zorder=8,
                                          color=palette.PAPER))
            self.covers.append(ax.axvline(until * MS, color=palette.INK, linewidth=1.6, zorder=9))
        self.told.set_text(told)
        return Picture(self.figure, told or TITLE, data=self.steps)
