"""The picture of exercise 6.14: dollars on spot over the rate of interruptions."""

from collections.abc import Callable

from matplotlib.lines import Line2D

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_numbers, require_positive
from labs.exercises.verdicts import Wrong, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.prices import MACHINES, Machine
from labs.predictions.spot import billed_hours, break_even_rate, first_order_rates
from labs.scaling.checks import spot_costs as spot_check

SHORT = ("saved every 30 min, restart 6 min", "every 3 h, restart 30 min")  # for the legend
SETTINGS = {"a checkpoint every 30 minutes, restart 6 minutes": (0.5, 0.1),
            "every 3 hours, restart 30 minutes": (3.0, 0.5)}
HOURS, SIMULATED, DRAWN = 6000, 8, 80  # hours of a simulated run; points of each curve


@shows("6.14")
def show_spot(spot_costs: Callable, machine: Machine = MACHINES["AWS p5en.48xlarge"]) -> Picture:
    """Draws dollars per hour of training on spot over the rate of interruptions: an event
    simulation, the student's function, and the first-order line, with the price on demand and the
    break-even rates; says how far each rate is from the exact one."""
    if machine.spot is None:
        raise Wrong(f"{machine.name} has no spot price", "Choose a machine that has one.",
                    code="no_spot_price")
    figure, ax = canvas(WIDTH, 3.9)
    lines = [_draw_setting(ax, spot_costs, machine, name, colour)
             for name, colour in zip(SETTINGS, palette.RUNS[1:], strict=False)]
    right = 1.75 * max(_even(machine, setting) for setting in SETTINGS.values())
    for price, words, above in ((machine.dollars, "on demand", True),
                                (machine.spot, "spot, never interrupted", False)):
        ax.axhline(price, color=palette.MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        ax.annotate(words, (right, price), xytext=(0, 3 if above else -5), ha="right",
                    va="bottom" if above else "top", textcoords="offset points", fontsize=9.5,
                    color=palette.MUTED, annotation_clip=False)
    handles = _spot_legend()
    if (guess := guessed("6.14")) is not None:
        handles += ax.plot(min(guess, right), machine.dollars, "D", color=palette.GUESSED,
                           markersize=7, zorder=5, clip_on=False, linestyle="",
                           label=f"your guess: {guess:g}")
    ax.set_xlim(0, right)
    ax.set_ylim(0.8 * machine.spot, 1.45 * machine.dollars)
    ax.set_xlabel("interruptions in a billed hour")
    ax.set_ylabel("dollars per GPU and\nhour of training")
    marks.legend_above(figure, handles)
    title = f"{machine.name}: {machine.dollars} on demand, {machine.spot} on spot"
    return Picture(figure, "\n".join([title, *lines]), data=lines)


def _draw_setting(ax, spot_costs, machine, name, colour) -> str:
    """Draws the simulation and the student's dollars up to above break-even, and the first-order
    line up to the price on demand; returns the break-even rates in words."""
    setting = SETTINGS[name]
    even = _even(machine, setting)
    simulated = [1.25 * even * number / SIMULATED for number in range(1, SIMULATED + 1)]
    ax.plot(simulated, [machine.spot * billed_hours(HOURS, rate, *setting, seed=14) / HOURS
                        for rate in simulated], "o", color=colour, markersize=5, zorder=3)
    rates = [1.25 * even * number / DRAWN for number in range(1, DRAWN + 1)]
    dollars = [_spot(spot_costs, machine, rate, setting)[0] for rate in rates]
    kept = [one if 0 < one < 3 * machine.dollars else float("nan") for one in dollars]
    ax.plot(rates, kept, color=colour, linewidth=1.6, zorder=2)
    yours = require_positive(_spot(spot_costs, machine, even, setting)[1], "the break-even rate")
    ax.plot(yours, machine.dollars, "|", color=colour, markersize=18, markeredgewidth=3, zorder=4)
    approximate = first_order_rates(machine.dollars / machine.spot, *setting)
    straight = approximate["1 + rate·lost"]
    ax.plot([0, straight], [machine.spot, machine.dollars], color=colour, linewidth=1,
            linestyle=":", zorder=1)
    said = [f"by {formula} {rate:.2f} ({marks.with_minus(f'{rate / even - 1:+z.0%}')})"
            for formula, rate in approximate.items()]
    return f"{name}: your break-even {yours:.2f} an hour, exact {even:.2f}; {', '.join(said)}"


def _even(machine, setting) -> float:
    return break_even_rate(machine.dollars / machine.spot, *setting)


def _spot(spot_costs, machine, rate, setting) -> tuple[float, ...]:
    """The student's (dollars of one hour of training, break-even rate)."""
    return require_numbers(spot_costs(1, machine.dollars, machine.spot, rate, *setting),
                           spot_check.NAMES, f"{rate:.3g} interruptions an hour")


def _spot_legend() -> list:
    named = [Line2D([], [], marker="o", color=colour, label=name)
             for colour, name in zip(palette.RUNS[1:], SHORT, strict=False)]
    return [*named, Line2D([], [], marker="o", linestyle="", color=palette.MUTED,
                           label="simulated"),
            Line2D([], [], color=palette.MUTED, label="your dollars"),
            Line2D([], [], color=palette.MUTED, linewidth=1, linestyle=":",
                   label="spot · (1 + rate·lost)"),
            Line2D([], [], marker="|", linestyle="", markersize=12, markeredgewidth=3,
                   color=palette.MUTED, label="your break-even")]
