"""The pictures of exercise 8.7: what an interval between two saves costs, and where formulas are
too rough."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.lines import Line2D

from labs.checks.guesses import guessed
from labs.checks.numbers import require_number
from labs.checks.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.predictions.failures.intervals import (
    daly,
    expected_wall,
    young,
)
from labs.predictions.failures.simulation import best_interval, exponential_gaps, weibull_gaps

SAVE, RESTART = 5.0, 10.0  # minutes
MEANS = {"24 h": 1440.0, "6 h": 360.0, "15 minutes": 15.0}
GUESSED = "6 h"  # the mean time whose best interval is guessed
FAILURES = 5000  # in each simulated run, on average
PLACES = 9  # simulated intervals of a panel
SHAPES = {"independent": 1.0, "in clusters (shape 0.7)": 0.7, "in clusters (shape 0.5)": 0.5}
_FORMULAS = {"Young: √(2δM)": (young, "s"), "Daly": (daly, "D")}
RUN_COLOURS = palette.RUNS


@dataclass(frozen=True)
class Panel:
    """One mean time between failures: interval -> wall time over work, simulated; the intervals of
    the formulas, and the best one."""

    mean: float
    simulated: dict[float, float]
    formulas: dict[str, float]
    best: float


@shows("8.7")
def show_intervals(wall_time: Callable) -> Picture:
    """Draws the wall time of a job over the interval between its saves, by the student's simulation
    and by Daly's closed form, for three mean times between failures."""
    guess, panels = guessed("8.7"), []
    is_guessed = guess is not None and guess > 0
    figure, axes = canvas(WIDTH, 3.7 + marks.HEADLINE + marks.NOTE_LINE * is_guessed, ncols=3)
    for ax, (name, mean) in zip(axes, MEANS.items(), strict=True):
        panel = _panel(wall_time, mean)
        panels.append(panel)
        _draw_panel(ax, panel)
        if name == GUESSED and is_guessed:
            at = min(max(guess, min(panel.simulated)), max(panel.simulated))
            ax.plot(at, _closed(at, mean), zorder=5, **marks.GUESS_MARKER)
        ax.set_title(f"a failure every {name}", fontsize=10, loc="left")
    axes[0].set_ylabel("wall time, as a multiple of the work")
    axes[1].set_xlabel("minutes of computing between two saves")
    worst = max(_closed(factor * panel.best, panel.mean) / _closed(panel.best, panel.mean) - 1
                for panel in panels for factor in (0.5, 2))
    lesson = f"Half or twice the best interval costs at most {worst:.1%} more wall time"
    marks.headline(figure, lesson)
    marks.legend_above(figure, _legend(guess is not None))
    words = [f"a failure every {name}: best interval {panel.best:.1f} minutes; "
             + "; ".join(f"{formula} {at:.1f}, {_over(panel, at)} more wall time"
                         for formula, at in panel.formulas.items())
             for name, panel in zip(MEANS, panels, strict=True)]
    if is_guessed:
        panel = panels[list(MEANS).index(GUESSED)]
        words.append(f"You guessed {guess:g} minutes with a failure every {GUESSED}, and the best "
                     f"is {panel.best:.0f}: it costs {_over(panel, guess)} more than the best.")
        marks.note_below(figure, words[-1])
    return Picture(figure, "\n".join([lesson, f"saves of {SAVE:.0f} minutes, restarts of "
                                      f"{RESTART:.0f}", *words]), data=(panels, guess))


def _panel(wall_time, mean) -> Panel:
    formulas = {name: formula(mean, SAVE) for name, (formula, _) in _FORMULAS.items()}
    best = best_interval(lambda interval: _closed(interval, mean), 0.5, 3 * mean)
    low, high = best / 4, min(best * 4, 2.2 * mean)
    places = [low * (high / low) ** (at / (PLACES - 1)) for at in range(PLACES)]
    return Panel(mean, {at: _simulated(wall_time, at, mean) for at in places}, formulas, best)


def _closed(interval, mean, restart=RESTART) -> float:
    return expected_wall(1, interval, SAVE, restart, mean)


def _simulated(wall_time, interval, mean, shape=1.0, restart=RESTART) -> float:
    """Wall time over work of one run with FAILURES failures, by the student's function. All
    intervals meet the same failures, so that they differ by nothing else."""
    work = interval * max(1, round(FAILURES * mean / _closed(interval, mean, restart) / interval))
    gaps = (exponential_gaps(mean, seed=8) if shape == 1 else weibull_gaps(mean, shape, seed=8))
    what = f"wall_time with an interval of {interval:.3g} minutes"
    return require_number(wall_time(work, interval, SAVE, restart, gaps), what) / work


def _over(panel, interval) -> str:
    return f"{_closed(interval, panel.mean) / _closed(panel.best, panel.mean) - 1:.2%}"


def _draw_panel(ax, panel):
    low, high = min(panel.simulated), max(panel.simulated)
    line = [low * (high / low) ** (at / 60) for at in range(61)]
    ax.plot(line, [_closed(at, panel.mean) for at in line], color=palette.PREDICTED, linewidth=1.4)
    ax.plot(list(panel.simulated), list(panel.simulated.values()), "o", color=RUN_COLOURS[1],
            markersize=6)
    for (name, at), colour in zip(panel.formulas.items(), RUN_COLOURS[2:], strict=False):
        ax.plot(at, _closed(at, panel.mean), _FORMULAS[name][1], markeredgecolor=colour,
                markersize=9, markerfacecolor="none", markeredgewidth=2, zorder=4)
    ax.set_xscale("log")
    marks.plain_numbers(ax.xaxis)
    ax.xaxis.set_minor_formatter(lambda *_: "")
    ax.set_xticks([round(at, 0 if at >= 3 else 1) for at in (low, panel.best, high)])
    ax.grid(axis="y", color=palette.GRID)


def _legend(is_guessed) -> list[Line2D]:
    formulas = [Line2D([], [], linestyle="", marker=marker, markeredgecolor=colour, markersize=8,
                       markerfacecolor="none", markeredgewidth=2, label=name)
                for (name, (_, marker)), colour in zip(_FORMULAS.items(), RUN_COLOURS[2:],
                                                       strict=False)]
    return [Line2D([], [], linestyle="", marker="o", color=RUN_COLOURS[1], label="your wall_time"),
            Line2D([], [], color=palette.PREDICTED, label="closed form (Daly)"), *formulas,
            *[Line2D([], [], linestyle="", label="your guess", **marks.GUESS_MARKER)] * is_guessed]


@shows("8.7")
def show_formulas(wall_time: Callable) -> Table:
    """The wall time of jobs with the best interval, over their work: by the student's simulation,
    Daly's closed form, and to first order in the saves, restarts and lost work."""
    cases = [*((f"{name}", mean, RESTART, 1.0) for name, mean in MEANS.items()),
             ("60 minutes, restarts of 60", 60.0, 60.0, 1.0),
             ("60 minutes, in clusters (shape 0.5)", 60.0, RESTART, 0.5)]
    rows = []
    for name, mean, restart, shape in cases:
        best = best_interval(lambda interval, mean=mean: _closed(interval, mean), 0.5, 3 * mean)
        yours = _simulated(wall_time, best, mean, shape, restart)
        closed = _closed(best, mean, restart)
        first = 1 + SAVE / best + (best / 2 + restart) / mean
        formulas = [text for value in (closed, first)
                    for text in (f"{value:.3f}", f"{value / yours - 1:+.1%}")]
        rows.append((name, f"{best:.1f}", f"{yours:.3f}", *formulas))
    head = ("a failure every", "best interval", "yours", "closed form", "", "first order", "")
    return Table(f"Wall time over work; saves of {SAVE:.0f} minutes, restarts of {RESTART:.0f} if "
                 "nothing else is said", head, rows)


@shows("8.7")
def show_clusters(wall_time: Callable) -> Picture:
    """Draws the same for failures that come in clusters, with the same mean time between them."""
    mean = 60.0
    best = best_interval(lambda interval: _closed(interval, mean), 0.5, 3 * mean)
    places = [best * 2 ** (at / 2) for at in range(-5, 6)]
    figure, ax = canvas(WIDTH, 3.6 + marks.HEADLINE)
    words, drawn = [], {}
    for (name, shape), colour in zip(SHAPES.items(), RUN_COLOURS[1:], strict=False):
        walls = [_simulated(wall_time, at, mean, shape) for at in places]
        ax.plot(places, walls, "o-", color=colour, markersize=5, linewidth=1.2, label=name)
        least = places[walls.index(min(walls))]
        drawn[name] = dict(zip(places, walls, strict=True))
        words.append(f"failures {name}: minimum {min(walls):.3f} at {least:.0f} minutes, "
                     f"{walls[places.index(best)]:.3f} at Daly's {best:.0f}")
    ax.axvline(best, color=palette.MUTED, linewidth=1, linestyle=(0, (4, 3)))
    ax.annotate("Daly", (best, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
                textcoords="offset points", va="top", fontsize=9.5, color=palette.MUTED)
    ax.set_xscale("log")
    marks.plain_numbers(ax.xaxis)
    ax.xaxis.set_minor_formatter(lambda *_: "")
    ax.set_xticks([round(at) for at in places[1::2]])
    ax.grid(axis="y", color=palette.GRID)
    ax.set_xlabel("minutes of computing between two saves")
    ax.set_ylabel("wall time, as a multiple\nof the work")
    least = [min(walls.values()) for walls in drawn.values()]
    lesson = (f"Minimum of wall time over work: {least[0]:.2f} with independent failures, "
              f"{least[-1]:.2f} in clusters")
    marks.headline(figure, lesson)
    marks.legend_above(figure, ax.get_legend_handles_labels()[0])
    return Picture(figure, "\n".join([lesson, "a failure every hour on average", *words]),
                   data=drawn)
