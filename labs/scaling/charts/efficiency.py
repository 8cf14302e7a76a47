"""What the part on efficiency draws: speed-up by number of ranks, and waterfalls of lost time."""

from collections.abc import Callable, Mapping

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_named, require_number, require_positive
from labs.exercises.verdicts import shows
from labs.meters.lost_time import PARTS, parts_of_step
from labs.meters.metrics import Metric
from labs.meters.typical_step import require_typical
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.scaling.runs.lost_time_runs import RunsOnRanks
from labs.scaling.runs.scaling_runs import BYTES, Scaling
from labs.words import counted
from labs.workers import devices

_COLOURS = {"communication": palette.PHASES["exposed"], "waiting": palette.RANK_WAITS,
            "data loading": palette.RUNS[1], "computing": palette.RUNS[2]}
_NAMES = {"communication": "exposed communication", "waiting": "waiting for the slowest",
          "data loading": "data loading", "computing": "computing"}
_BYTES = {0.5: "half"}.get(BYTES, f"{BYTES:.0%}")
_KINDS = {"weak": ("weak: the batch of a rank stays", palette.RUNS[1], "o"),
          "strong": ("strong: the batch of all stays", palette.RUNS[2], "s")}


@shows("6.3")
def show_scaling(measured: Scaling, efficiency: Callable[[int, float, float], float]) -> Picture:
    """Draws two panels by number of ranks: the student's efficiencies, with the guess, and the
    throughput, with the ideal line."""
    note = _why(measured)
    figure, [left, right] = canvas(WIDTH, 3.7 + marks.NOTE_LINE * len(note), ncols=2)
    ranks, words, metrics, handles = list(measured.weak), [], [], []
    for kind, (name, colour, marker) in _KINDS.items():
        found = getattr(measured, kind)
        times = {n: found[n] / found[1] for n in ranks}
        shares = {n: require_number(efficiency(n, found[n], found[1]), f"the efficiency of {n}")
                  for n in ranks}
        above = all(measured.weak[n] >= measured.strong[n] for n in ranks) == (kind == "weak")
        handles.append(_draw_by_ranks(left, {n: 100 * share for n, share in shares.items()},
                                      "{:.0f} %", above, colour, marker))
        _draw_by_ranks(right, times, "{:.2f}", above, colour, marker)
        handles[-1].set_label(name)
        metrics += [Metric(f"{kind} scaling on {counted(n, 'rank')}: efficiency", shares[n], "")
                    for n in ranks[1:]]
        words.append(f"{name}: " + ", ".join(
            f"{n} ranks {times[n]:.2f} times, efficiency {shares[n]:.0%}" for n in ranks[1:]))
    _draw_ideal(left, right, ranks, handles)
    handles += _draw_guess(left, measured.own, words)
    for ax in (left, right):
        _mark_shared(ax, ranks, measured.own)
    left.set_title("efficiency, %", fontsize=10, loc="left", color=palette.INK)
    right.set_title("throughput, in times that of 1 rank", fontsize=10, loc="left",
                    color=palette.INK)
    marks.legend_above(figure, handles)
    marks.note_below(figure, "\n".join(note))
    return Picture(figure, "\n".join([*words, *note]), data=measured, metrics=metrics)


def _draw_by_ranks(ax, by_ranks, text, above, colour, marker) -> Line2D:
    """A line over the numbers of ranks, which are evenly spaced, with the values of several."""
    [line] = ax.plot(range(len(by_ranks)), by_ranks.values(), color=colour, marker=marker,
                     linewidth=2)
    for place, value in list(enumerate(by_ranks.values()))[1:]:
        ax.annotate(text.format(value), (place, value), ha="center",
                    va="bottom" if above else "top", xytext=(0, 7 if above else -8),
                    textcoords="offset points", color=palette.readable(colour), **marks.ON_PAPER)
    ax.set_xticks(range(len(by_ranks)), by_ranks)
    ax.set_xlim(-0.25, len(by_ranks) - 0.6)
    ax.set_xlabel("ranks")
    return line


def _draw_ideal(left, right, ranks, handles):
    """100 % and N times; the throughput's axis ends above what was measured, not above N."""
    style = {"color": palette.MUTED, "linestyle": (0, (4, 3)), "linewidth": 1.2, "zorder": 1}
    shown = right.get_ylim()[1]
    handles.insert(0, left.axhline(100, label="ideal", **style))
    right.plot(range(len(ranks)), ranks, **style)
    right.set_ylim(0, min(1.5 * shown, 1.15 * ranks[-1]))
    left.set_ylim(min(0, left.get_ylim()[0]), max(112, 1.08 * left.get_ylim()[1]))


def _why(measured) -> list[str]:
    """What the ranks lose it to, in lines below the picture. On a CPU they have a link of the lab's
    own, on GPUs the machine's."""
    lines = []
    if not devices.gpus():
        lines.append("Why below 100 %: on a CPU the ranks send over notebook 05's slow link. All "
                     f"gradients take {_BYTES} of a step of\none rank there, and DDP does not hide "
                     "all of that.")
    if list(measured.weak)[-1] > measured.own:
        lines.append(f"Grey: ranks share a {'GPU' if devices.gpus() else 'core'}, so each of them "
                     "computes more slowly.")
    return [line for text in lines for line in text.splitlines()]


def _draw_guess(ax, ranks, words) -> list[Line2D]:
    """The guess is about weak scaling on as many ranks as have a core of their own, in percent."""
    guess, places = guessed("6.3"), [label.get_text() for label in ax.get_xticklabels()]
    if guess is None or ranks < 2:
        return []
    words.append(f"your guess: {guess:g} % on {ranks} ranks")
    return ax.plot([places.index(str(ranks))], [guess], linestyle="", label="your guess, weak",
                   **marks.GUESS_MARKER)


def _mark_shared(ax, ranks, own) -> None:
    if ranks[-1] > own:
        ax.axvspan(len(ranks) - 1.5, len(ranks) - 0.6, color=palette.SURFACE, zorder=0)


@shows("6.4")
def show_lost_time(runs: RunsOnRanks, divide_lost_time: Callable) -> Picture:
    """Draws a waterfall for each run: from N times the throughput of one rank, down by what each
    part loses, to the throughput of the run. In percent of N times: a step of T seconds of which a
    part loses t has lost t/T of what N ranks could do."""
    require_typical({name: runs.step_and_usual(name) for name in runs.usual},
                    "the cell that recorded them")
    note = runs.note()
    figure, axes = canvas(WIDTH, 3.5 + marks.NOTE_LINE * bool(note), ncols=len(runs), sharey=True,
                          squeeze=False)
    figure.get_layout_engine().set(wspace=0.04)
    words, metrics = [], []
    [alone] = [sum(parts_of_step(runs.alone, 0).values())]
    gains = False
    for ax, (name, run) in zip(axes[0], runs.items(), strict=True):
        lost = require_named(divide_lost_time(list(run), list(runs.alone)), PARTS,
                             f"{name}: divide_lost_time")
        step = require_positive(alone + sum(lost.values()), f"{name}: a step")
        _draw_waterfall(ax, {part: 100 * lost[part] / step for part in PARTS}, 100 * alone / step)
        gains = gains or min(lost.values()) < -0.005 * step  # shown as more than 0 %
        ax.set_title(f"{name}\n{1e3 * step:,.0f} ms a step", fontsize=9.5, loc="left")
        metrics += [Metric(f"{name}: {_NAMES[part]}", lost[part], "s") for part in PARTS]
        metrics.append(Metric(f"{name}: efficiency", alone / step, ""))
        words.append(f"{name}: a step of {1e3 * step:.1f} ms, efficiency {alone / step:.0%}; " +
                     ", ".join(f"{_NAMES[part]} {1e3 * lost[part]:+.1f} ms" for part in PARTS))
    ranks = len(next(iter(runs.values())))
    marks.name_rows(axes[0][0], [f"{ranks} × one rank alone", *(_NAMES[part] for part in PARTS),
                                 "efficiency of the run"], size=9.5)
    marks.note_below(figure, f"percent of {ranks} times the throughput of one rank, which takes "
                     f"{1e3 * alone:,.0f} ms for a step" + "; outlined: a gain" * gains
                     + f"\n{note}" * bool(note))
    return Picture(figure, "\n".join([f"one rank alone: a step of {1e3 * alone:.1f} ms", *words,
                                      *filter(None, [note])]), data=runs, metrics=metrics)


def _draw_waterfall(ax: Axes, lost: Mapping[str, float], efficiency: float) -> None:
    """lost: part -> percent, together 100 less the efficiency; below 0 it is gained."""
    left, right = 100.0, 100.0
    ax.barh(0, 100, height=marks.BAR, color=palette.BORDER)
    for row, (part, percent) in enumerate(lost.items(), 1):
        ax.vlines(left, row - 1, row, color=palette.MUTED, linewidth=0.8)
        ax.barh(row, -percent, left=left, height=marks.BAR, edgecolor=_COLOURS[part],
                facecolor=palette.PAPER if percent < 0 else _COLOURS[part])
        left -= percent
        right = max(right, left)
        text = marks.with_minus(f"{-percent:+z.0f} %")
        ends = sorted((left, left + percent))
        _write(ax, row, *ends, "0 %" if text[1:] == "0 %" else text,
               palette.PAPER if percent < 0 else _COLOURS[part])
    ax.vlines(left, len(lost), len(lost) + 1, color=palette.MUTED, linewidth=0.8)
    ax.barh(len(lost) + 1, efficiency, height=marks.BAR, color=palette.PLAIN)
    _write(ax, len(lost) + 1, 0, efficiency, f"{efficiency:.0f} %", palette.PLAIN)
    ax.set_xlim(0, right)
    ax.set_xticks([0, 50, 100])
    for label, side in zip(ax.get_xticklabels(), ("left", "center", "right"), strict=True):
        label.set_horizontalalignment(side)  # or the ends of two panels would touch


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
