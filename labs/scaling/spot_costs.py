"""Exercise 6.14: what a spot machine costs with its interruptions, and when it stops paying."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.lines import Line2D

from labs.checks.generator import new_generator, unless_graded
from labs.checks.guesses import guessed
from labs.checks.numbers import Mistake, require_numbers, require_positive, require_signature
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.predictions.cost.prices import MACHINES, Machine
from labs.predictions.cost.spot import (
    billed_hours,
    break_even_rate,
    expected_hours,
    first_order_rates,
)
from labs.words import times

NAMES = ("expected dollars", "break-even rate")
INTERRUPTIONS = 3000  # in a simulated run: its hours are within half a percent of their mean
TOLERANCE = 0.04  # of the dollars: what a formula leaves out where a tenth of the time is lost
# Of the rate itself: ln(on_demand / spot) / lost is within it here, and the first-order rates, 9 to
# 19 % off, are not.
EVEN_TOLERANCE = 0.03


@dataclass(frozen=True)
class Case:
    """Hours of training; on_demand, spot: dollars per hour; rate: interruptions per hour; interval:
    hours between checkpoints; restart: hours of a restart."""

    hours: float
    on_demand: float
    spot: float
    rate: float
    interval: float
    restart: float

    @property
    def lost(self) -> float:
        """Hours lost by one interruption on average."""
        return self.interval / 2 + self.restart

    def simulated(self) -> float:
        """Dollars of one long simulated run on spot, scaled to the hours."""
        long = INTERRUPTIONS / self.rate
        billed = billed_hours(long, self.rate, self.interval, self.restart, seed=14)
        return self.spot * self.hours * billed / long

    def dollars_at(self, rate: float) -> float:
        """Expected dollars on spot with so many interruptions per hour."""
        return self.spot * expected_hours(self.hours, rate, self.interval, self.restart)

    @property
    def even(self) -> float:
        """The rate at which both cost the same, from the exact mean (Daly, 2006, equation 20)."""
        return break_even_rate(self.on_demand / self.spot, self.interval, self.restart)


# Interruptions of the training hours, or of the billed ones: two formulas for the same thing.
_HOURS = (lambda case, lost: case.hours * (1 + case.rate * lost),
          lambda case, lost: case.hours / (1 - case.rate * lost))
_SAVED = (lambda case: case.on_demand / case.spot - 1, lambda case: 1 - case.spot / case.on_demand,
          lambda case: math.log(case.on_demand / case.spot))


def _dollars(lost, code, sentence, hint) -> list[Mistake]:
    """Other hours that an interruption loses."""
    return [Mistake(code, lambda case, hours=hours: case.spot * hours(case, lost(case)), sentence,
                    hint) for hours in _HOURS]


def _even(rate, code, sentence, hint) -> list[Mistake]:
    """Another break-even rate, of the share that spot saves."""
    return [Mistake(code, lambda case, saved=saved: rate(case, saved(case)), sentence, hint)
            for saved in _SAVED]


_HALF = ("An interruption comes anywhere between two checkpoints: half an interval is lost on "
         "average.")
_WHOLE = "full_interval_lost", "a whole interval is lost each time", _HALF
_NO_RESTART = ("restart_missing", "the restart is missing",
               "The machine is billed while it restarts.")
_NOTHING_AGAIN = "repeated_work_missing", "the training that is done again is missing", _HALF
_AGAIN = ("What is trained again and the restart can be interrupted, too. The exact mean of the "
          "billed hours is lab.expected_wall: find the rate where they cost what on demand does.")
_DIVIDE = "Divide by the hours that one interruption loses."
DOLLARS: list[Mistake] = [
    Mistake("interruptions_cost_nothing", lambda case: case.spot * case.hours,
            "interruptions cost nothing",
            "Each costs half an interval and a restart, and these hours are billed."),
    *_dollars(lambda case: case.interval + case.restart, *_WHOLE),
    *_dollars(lambda case: case.interval / 2, *_NO_RESTART),
    *_dollars(lambda case: case.restart, *_NOTHING_AGAIN),
    *_dollars(lambda case: case.interval / 2 + 2 * case.restart, "restart_twice",
              "the restart is counted twice",
              "An interruption has one restart."),
    Mistake("one_hour_interruptions", lambda case: case.spot * (case.hours + case.rate * case.lost),
            "one hour's interruptions only",
            "There are rate interruptions in every hour of the job."),
    Mistake("one_interruption", lambda case: case.spot * (case.hours + case.lost),
            "one interruption only", "There are rate interruptions in every hour of the job."),
    Mistake("interruptions_make_cheaper",
            lambda case: case.spot * case.hours * (1 - case.rate * case.lost),
            "interruptions make it cheaper", "What is lost is added."),
    Mistake("on_demand_price",
            lambda case: case.on_demand * case.hours * (1 + case.rate * case.lost),
            "that is the on-demand price", "On spot every hour costs `spot` dollars."),
    Mistake("on_demand", lambda case: case.on_demand * case.hours,
            "that is on demand, without interruptions", "Return what spot costs."),
    Mistake("in_hours", lambda case: case.hours * (1 + case.rate * case.lost), "that is in hours",
            "Times the price of an hour."),
    Mistake("for_one_hour_training", lambda case: case.spot * (1 + case.rate * case.lost),
            "that is for one hour of training", "Times hours."),
]
EVEN: list[Mistake] = [
    Mistake("restart_missing",
            lambda case: break_even_rate(case.on_demand / case.spot, case.interval, 0),
            *_NO_RESTART[1:]),
    Mistake("for_job", lambda case: case.even * case.hours, "that is for the whole job",
            "Interruptions per hour, whatever the hours of the job."),
    Mistake("hours_per_interruption", lambda case: 1 / case.even, "that is hours per interruption",
            "Interruptions per hour: the inverse."),
    Mistake("ratio_prices", lambda case: case.on_demand / case.spot, "that is the ratio of prices",
            "At which rate do the lost hours cost what spot saves?"),
    Mistake("rate_hour_lost_in_hour", lambda case: 1 / case.lost,
            "that is the rate at which an hour is lost in each hour",
            "At break-even only what spot saves is lost."),
    Mistake("difference_prices", lambda case: (case.on_demand - case.spot) / case.lost,
            "that is the difference of prices, not its share", "Divide by a price first."),
    *_even(lambda case, saved: saved / case.lost, "first_order", "that is a first-order rate",
           _AGAIN),
    *_even(lambda case, saved: saved / (case.interval + case.restart), *_WHOLE),
    *_even(lambda case, saved: saved / (case.interval / 2), *_NO_RESTART),
    *_even(lambda case, saved: saved / case.restart, *_NOTHING_AGAIN),
    *_even(lambda case, saved: saved * case.hours / case.lost, "of_the_job",
           "that is for the whole job",
           "Interruptions per hour, whatever the hours of the job."),
    *_even(lambda case, saved: saved, "share_of_hours", "that is a share of the hours", _DIVIDE),
    *_even(lambda case, saved: saved * case.lost, "multiplied",
           "that multiplies by the hours lost", _DIVIDE),
    *_even(lambda case, saved: case.lost / saved, "hours_per_interruption",
           "that is hours per interruption", "Interruptions per hour: the inverse."),
]


@check("6.14")
def check_spot_costs(spot_costs):
    """Expected dollars against an event simulation, and the break-even rate against the one at
    which the exact mean of the billed hours costs what on demand does."""
    require_signature(spot_costs, ("hours", "on_demand", "spot", "rate", "interval", "restart"))
    for case in _cases():
        what = (f"{case.hours:.0f} h at {case.spot:.2f} dollars spot ({case.on_demand:.2f} on "
                f"demand), {case.rate:.3g} interruptions an hour, checkpoints every "
                f"{case.interval:.3g} h, restart {case.restart:.3g} h")
        dollars, rate = require_numbers(spot_costs(*vars(case).values()), NAMES, what)
        _judge_dollars(float(dollars), case, what)
        _judge_rate(float(rate), case, what)
    return (f"expected dollars within {TOLERANCE:.0%} of an event simulation, and the break-even "
            f"rate within {EVEN_TOLERANCE:.0%} of the exact one")


def _judge_dollars(dollars, case, what):
    # Any honest formula is near the simulation here; each slip moves the dollars by more.
    simulated = case.simulated()
    right = unless_graded(f"{simulated:,.2f} ({times(dollars, simulated)})")
    if abs(dollars / simulated - 1) > TOLERANCE:
        _raise_mistake(
            dollars, DOLLARS, case, f"{what}: you expect {dollars:,.2f} dollars, the event "
            f"simulation {right}",
            "Billed are the hours of training, and for each interruption what it loses.")


def _judge_rate(rate, case, what):
    if rate <= 0:
        raise Wrong(f"{what}: your break-even rate is {rate:.3g}", "Spot is cheaper here: it pays "
                    "up to some rate above 0.", code="not_positive")
    # The rate itself is compared, not the dollars at it: near break-even these change little.
    right = unless_graded(f"{case.even:.3g} ({times(rate, case.even)})")
    if abs(rate / case.even - 1) > EVEN_TOLERANCE:
        _raise_mistake(
            rate, EVEN, case, f"{what}: your break-even rate is {rate:.3g} interruptions an hour, "
            f"the exact one {right}",
            "At the break-even rate lab.expected_wall(hours, interval, 0, restart, 1 / rate) "
            "hours at the price of spot cost what hours at the price on demand do.")


def _raise_mistake(got, mistakes, case, said, hint):
    for mistake in mistakes:
        if abs(got / mistake.number(case) - 1) < 1e-6:
            raise Wrong(f"{said}: {mistake.sentence}", mistake.hint, code=mistake.code)
    raise Wrong(said, hint, code="wrong_number")


def _cases() -> list[Case]:
    """About a tenth of the time is lost in each, so that the dollars of formulas that count
    interruptions of lost hours and of those that do not are both near the simulation. Spot saves a
    quarter: at break-even so much is lost that the two differ."""
    rng = new_generator()
    found = []
    # Hours between checkpoints, and the restart as a share of them: each term of what is lost
    # matters in one case, and in the first one an interruption loses far less than an hour.
    for shortest, longest, restart_share in ((0.2, 0.4, 0.8), (1, 2, 0.25), (0.5, 3, 1.5)):
        interval = rng.uniform(shortest, longest)
        restart = restart_share * interval
        spot = rng.uniform(1, 6)
        found.append(Case(rng.uniform(20, 400), spot * rng.uniform(1.27, 1.33), spot,
                          rng.uniform(0.12, 0.15) / (interval / 2 + restart), interval, restart))
    return found


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
    guess, [first, *_] = guessed("6.14"), SETTINGS
    even = _break_even(machine, SETTINGS[first])
    answer = marks.answered(guess, even, "interruptions an hour")
    lesson = f"Break-even at {even:.2f} interruptions an hour with {first}"
    figure, ax = canvas(WIDTH, 3.9 + marks.HEADLINE + marks.NOTE_LINE * bool(answer))
    marks.headline(figure, lesson)
    marks.note_below(figure, answer)
    lines = [_draw_setting(ax, spot_costs, machine, name, colour)
             for name, colour in zip(SETTINGS, palette.RUNS[1:], strict=False)]
    right = 1.75 * max(_break_even(machine, setting) for setting in SETTINGS.values())
    for price, words, above in ((machine.dollars, "on demand", True),
                                (machine.spot, "spot, never interrupted", False)):
        ax.axhline(price, color=palette.MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        ax.annotate(words, (right, price), xytext=(0, 3 if above else -5), ha="right",
                    va="bottom" if above else "top", textcoords="offset points", fontsize=9.5,
                    color=palette.MUTED, annotation_clip=False)
    handles = _spot_legend()
    if guess is not None:
        handles += ax.plot(min(guess, right), machine.dollars, "D", color=palette.GUESSED,
                           markersize=7, zorder=5, clip_on=False, linestyle="",
                           label=f"your guess: {guess:g}")
    ax.set_xlim(0, right)
    ax.set_ylim(0.8 * machine.spot, 1.45 * machine.dollars)
    ax.set_xlabel("interruptions in a billed hour")
    ax.set_ylabel("dollars per GPU and\nhour of training")
    marks.legend_above(figure, handles)
    title = f"{machine.name}: {machine.dollars} on demand, {machine.spot} on spot"
    return Picture(figure, "\n".join([lesson, title, *lines, *filter(None, [answer])]), data=lines)


def _draw_setting(ax, spot_costs, machine, name, colour) -> str:
    """Draws the simulation and the student's dollars up to above break-even, and the first-order
    line up to the price on demand; returns the break-even rates in words."""
    setting = SETTINGS[name]
    even = _break_even(machine, setting)
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


def _break_even(machine, setting) -> float:
    return break_even_rate(machine.dollars / machine.spot, *setting)


def _spot(spot_costs, machine, rate, setting) -> tuple[float, ...]:
    """The student's (dollars of one hour of training, break-even rate)."""
    return require_numbers(spot_costs(1, machine.dollars, machine.spot, rate, *setting),
                           NAMES, f"{rate:.3g} interruptions an hour")


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
