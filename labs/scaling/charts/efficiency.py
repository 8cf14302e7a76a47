"""What the part on efficiency draws: speed-up by number of ranks, and waterfalls of lost time."""

from collections.abc import Callable, Mapping

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_number
from labs.exercises.verdicts import shows
from labs.meters.lost_time import PARTS, parts_of_step
from labs.meters.metrics import Metric
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.scaling.runs.lost_time_runs import RunsOnRanks
from labs.scaling.runs.scaling_runs import Scaling
from labs.words import counted
from labs.workers import devices

_COLOURS = {"communication": palette.PHASES["exposed"], "waiting": palette.RANK_WAITS,
            "data loading": palette.RUNS[1], "computing": palette.RUNS[2]}
_NAMES = {"communication": "exposed communication", "waiting": "waiting for the slowest",
          "data loading": "data loading", "computing": "slower computing"}
_KINDS = {"weak": ("weak: the batch of a rank stays", palette.RUNS[1], "o"),
          "strong": ("strong: the batch of all stays", palette.RUNS[2], "s")}


@shows("6.3")
def show_scaling(measured: Scaling, efficiency: Callable[[int, float, float], float]) -> Picture:
    """Draws the speed-up by number of ranks, with the ideal line and the guess; the labels are the
    student's efficiencies."""
    figure, ax = canvas(WIDTH, 3.9)
    ranks, words, metrics, handles = list(measured.weak), [], [], []
    style = {"color": palette.MUTED, "linestyle": (0, (4, 3)), "linewidth": 1.2}
    handles.append(*ax.plot([1, ranks[-1]], [1, ranks[-1]], label="ideal: N times", **style))
    for kind, (name, colour, marker) in _KINDS.items():
        found = getattr(measured, kind)
        handles.append(*ax.plot(ranks, [found[n] / found[1] for n in ranks], color=colour,
                                marker=marker, linewidth=2, label=name))
        shares = {n: require_number(efficiency(n, found[n], found[1]), f"the efficiency of {n}")
                  for n in ranks[1:]}
        for n, share in shares.items():
            above = (kind == "weak") == (measured.weak[n] >= measured.strong[n])
            ax.annotate(f"{share:.0%}", (n, found[n] / found[1]), va="center",
                        xytext=(7, 8 if above else -8), textcoords="offset points",
                        color=palette.readable(colour))
            metrics.append(Metric(f"{kind} scaling on {counted(n, 'rank')}: efficiency", share, ""))
        words.append(f"{name}: " + ", ".join(
            f"{n} ranks {found[n] / found[1]:.2f} times, efficiency {share:.0%}"
            for n, share in shares.items()))
    handles += _draw_guess(ax, measured.own, words)
    _mark_shared(ax, ranks, measured.own)
    ax.set_xticks(ranks)
    ax.set_xlim(0.8, ranks[-1] + 0.35)
    ax.set_ylim(-0.04 * ranks[-1], 1.06 * ranks[-1])
    ax.set_xlabel("ranks")
    ax.set_ylabel("throughput, in times that of 1 rank")
    marks.legend_above(figure, handles)
    return Picture(figure, "\n".join(words), data=measured, metrics=metrics)


def _draw_guess(ax, ranks, words) -> list[Line2D]:
    """The guess is about weak scaling on as many ranks as have a core of their own, in percent."""
    guess = guessed("6.3")
    if guess is None or ranks < 2:
        return []
    words.append(f"your guess: {guess:g} % on {ranks} ranks")
    return ax.plot([ranks], [guess / 100 * ranks], linestyle="", label="your guess, weak",
                   **marks.GUESS_MARKER)


def _mark_shared(ax, ranks, own) -> None:
    if ranks[-1] <= own:
        return
    ax.axvspan(own + 0.12, ranks[-1] + 0.35, color=palette.SURFACE, zorder=0)
    what = "GPUs" if devices.gpus() else "cores"
    ax.text(own + 0.2, 0.98 * ranks[-1], f"more ranks than {what}", color=palette.MUTED, va="top")


@shows("6.4")
def show_lost_time(runs: RunsOnRanks, divide_lost_time: Callable) -> Picture:
    """Draws a waterfall for each run: from N times the throughput of one rank, down by what each
    part loses, to the throughput of the run. In percent of N times: a step of T seconds of which a
    part loses t has lost t/T of what N ranks could do."""
    note = runs.note()
    figure, axes = canvas(WIDTH, 3.5 + marks.NOTE_LINE * bool(note), ncols=len(runs), sharey=True,
                          squeeze=False)
    words, metrics = [], []
    [alone] = [sum(parts_of_step(runs.alone, 0).values())]
    for ax, (name, run) in zip(axes[0], runs.items(), strict=True):
        lost = divide_lost_time(list(run), list(runs.alone))
        step = alone + sum(lost[part] for part in PARTS)
        _draw_waterfall(ax, {part: 100 * lost[part] / step for part in PARTS}, 100 * alone / step)
        ax.set_title(f"{name}\n{1e3 * step:,.0f} ms a step", fontsize=9.5, loc="left")
        metrics += [Metric(f"{name}: {_NAMES[part]}", lost[part], "s") for part in PARTS]
        metrics.append(Metric(f"{name}: efficiency", alone / step, ""))
        words.append(f"{name}: a step of {1e3 * step:.1f} ms, efficiency {alone / step:.0%}; " +
                     ", ".join(f"{_NAMES[part]} {1e3 * lost[part]:+.1f} ms" for part in PARTS))
    ranks = len(next(iter(runs.values())))
    marks.name_rows(axes[0][0], [f"{ranks} × one rank alone", *(_NAMES[part] for part in PARTS),
                                 "efficiency of the run"], size=9.5)
    marks.note_below(figure, f"percent of {ranks} times the throughput of one rank, which takes "
                     f"{1e3 * alone:,.0f} ms for a step" + f"\n{note}" * bool(note))
    return Picture(figure, "\n".join([f"one rank alone: a step of {1e3 * alone:.1f} ms", *words,
                                      *filter(None, [note])]), data=runs, metrics=metrics)


def _draw_waterfall(ax: Axes, lost: Mapping[str, float], efficiency: float) -> None:
    """lost: part -> percent, together 100 less the efficiency; below 0 it is gained."""
    left, right = 100.0, 100.0
    ax.barh(0, 100, height=marks.BAR, color=palette.BORDER)
    for row, (part, percent) in enumerate(lost.items(), 1):
        ax.vlines(left, row - 1, row, color=palette.MUTED, linewidth=0.8)
        ax.barh(row, -percent, left=left, height=marks.BAR, color=_COLOURS[part])
        left -= percent
        right = max(right, left)
        text = f"{-percent:+.0f} %".replace("-", "−")
        ends = sorted((left, left + percent))
        _write(ax, row, *ends, "0 %" if text[1:] == "0 %" else text, _COLOURS[part])
    ax.vlines(left, len(lost), len(lost) + 1, color=palette.MUTED, linewidth=0.8)
    ax.barh(len(lost) + 1, efficiency, height=marks.BAR, color=palette.PLAIN)
    _write(ax, len(lost) + 1, 0, efficiency, f"{efficiency:.0f} %", palette.PLAIN)
    ax.set_xlim(0, right)
    ax.set_xticks([0, 50, 100])


def _write(ax, row, begin, end, text, colour) -> None:
    """In a bar that is long enough, else right of it, or left of it where there is no room."""
    if end - begin > 42:
        ax.text((begin + end) / 2, row, text, ha="center", va="center", fontsize=9,
                color=palette.text_on(colour))
        return
    right = end < 60
    ax.annotate(text, (end if right else begin, row), ha="left" if right else "right",
                va="center", xytext=(4 if right else -4, 0), textcoords="offset points",
                fontsize=9, color=palette.INK, **marks.ON_PAPER)
