"""The pictures of part 6: what tokens cost by machine, what a budget trains, a claim, and spot."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from matplotlib.lines import Line2D

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_numbers, require_positive
from labs.exercises.verdicts import Wrong, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.predictions import hardware, parameters
from labs.predictions.efficiency import flops_per_token
from labs.predictions.memory import predict
from labs.predictions.prices import MACHINES, Machine, hourly
from labs.predictions.reported_runs import ReportedRun, efficiency_of, reported_runs
from labs.predictions.spot import billed_hours, break_even_rate
from labs.scaling.checks import claim as claims
from labs.scaling.checks import costs as cost_check
from labs.scaling.checks import spot_costs as spot_check
from labs.training import hf_configs
from labs.training.memory_categories import GB

# One model and one length on all GPUs: MPT-1b, 1,024 tokens, 8 GPUs each.
SPEEDS = {"A100-40": "mosaic-182", "A100-80": "mosaic-112", "H100": "mosaic-060"}
MODEL = "MPT-1b (1.3B), 1,024 tokens"
FAR = 3  # times the dearest or the cheapest seller: further than that an axis has no room for
GPT_1B = {"n_embd": 2048, "n_layer": 24, "n_head": 16, "vocab_size": 50368, "n_positions": 1024}


@dataclass(frozen=True)
class Cost:
    """Dollars per billion tokens of MODEL on a machine, on demand and on spot without any
    interruption (None where it is not sold)."""

    name: str
    dollars: float
    spot: float | None


@shows("6.12")
def show_costs(costs: Callable, own: ReportedRun, dollars_per_hour: float,
               machines: Mapping[str, Machine] = MACHINES) -> Picture:
    """Draws dollars per billion tokens by machine, by the student's function, with the student's
    own run, whose FLOP/s would train the same model, at its price per hour."""
    rows = [_cost(costs, machine) for machine in machines.values() if machine.gpu in SPEEDS]
    rows.sort(key=lambda row: row.dollars)
    mine = _own_cost(costs, own, dollars_per_hour)
    shown = [(row, palette.RUNS[1], "o") for row in rows]
    if (guess := guessed("6.12")) is not None and guess > 0:
        shown.append((Cost("your guess", guess, None), palette.readable(palette.GUESSED), "D"))
    shown.append((mine, palette.readable(palette.PLAIN), "s"))
    figure, ax = canvas(WIDTH, 1.5 + 0.31 * len(shown) + 2 * marks.NOTE_LINE)
    _cost_axis(ax, [row for row, _, _ in shown], rows)
    for place, (row, colour, marker) in enumerate(shown):
        _draw_cost(ax, place, row, colour, marker)
    left_out = sorted({machine.gpu for machine in machines.values()} - set(SPEEDS))
    note = (f"{MODEL}, at the speed that llm-foundry published for 8 of each GPU.\nWithout a "
            f"published speed, and so left out: {', '.join(left_out)}.")
    marks.note_below(figure, note)
    marks.legend_above(figure, _cost_legend(any(row.spot for row in rows)))
    lines = [f"{row.name}: {row.dollars:,.2f}" + (f", spot {row.spot:,.2f}" if row.spot else "")
             for row, _, _ in shown]
    return Picture(figure, "\n".join(["dollars per billion tokens", *lines, note]),
                   data=[*rows, mine])


def _cost(costs, machine) -> Cost:
    run = reported_runs()[SPEEDS[machine.gpu]]
    rate = run.tokens_per_s / run.gpus * machine.gpus
    dollars = _per_billion(costs, rate, machine)
    spot = machine.spot and dollars * machine.spot / machine.dollars
    return Cost(machine.name, dollars, spot)


def _own_cost(costs, own, dollars_per_hour) -> Cost:
    """The same FLOP/s on the chart's model."""
    model = efficiency_of(reported_runs()[SPEEDS["A100-80"]])
    rate = own.tokens_per_s * efficiency_of(own).flops / model.flops
    machine = Machine("yours", "", own.gpus, dollars_per_hour / own.gpus, "your own", "")
    return Cost(f"{own.name.partition(' on ')[2]}\nat {dollars_per_hour:g} dollars an hour",
                _per_billion(costs, rate, machine), None)


def _per_billion(costs, rate, machine) -> float:
    return _both(costs, rate, machine, machine.name)[1]


def _both(costs, rate, machine, name) -> tuple[float, ...]:
    """The student's two numbers, which are above 0."""
    return tuple(require_positive(number, f"{name}, {what}") for number, what in zip(
        require_numbers(costs(rate, machine), cost_check.NAMES, name), cost_check.NAMES,
        strict=True))


def _draw_cost(ax, place, row, colour, marker):
    """The dollars as a mark with their number; where that is far outside the axis, an arrow."""
    low, high = ax.get_xlim()
    at = min(max(row.dollars, low), high)
    beyond = {low: "<", high: ">"}.get(at)
    ax.plot(at, place, beyond or marker, color=colour, markersize=7, zorder=3, clip_on=False)
    text, side = marks.format_number(row.dollars), -1 if beyond == ">" else 1
    ax.annotate(f"{text}, off the scale" if beyond else text, (at, place), xytext=(9 * side, 0),
                textcoords="offset points", va="center", ha="left" if side > 0 else "right",
                fontsize=9.5, **marks.ON_PAPER)
    if row.spot:
        ax.plot(row.spot, place, "o", markerfacecolor=palette.PAPER, markeredgecolor=colour,
                markersize=7, zorder=3)


def _cost_axis(ax, shown, sellers):
    """An axis that has all sellers; of the other rows those that are not FAR from them."""
    marks.name_rows(ax, [row.name for row in shown], size=9)
    prices = [price for row in sellers for price in (row.dollars, row.spot or row.dollars)]
    low, high = min(prices), max(prices)
    near = [row.dollars for row in shown if low / FAR < row.dollars < FAR * high]
    low, high = min(low, *near) / 1.25, max(high, *near) * 1.6
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ticks = [digit * 10**power for power in range(-4, 10) for digit in (1, 2, 3, 5, 7)]
    ax.set_xticks([tick for tick in ticks if low <= tick <= high])
    ax.minorticks_off()
    marks.plain_numbers(ax.xaxis)
    ax.set_xlabel("dollars per billion tokens")
    ax.grid(axis="x", color=palette.GRID, linewidth=0.8)
    ax.set_axisbelow(True)


def _cost_legend(has_spot) -> list:
    handles = [Line2D([], [], marker="o", linestyle="", color=palette.RUNS[1], label="on demand"),
               Line2D([], [], marker="o", linestyle="", markerfacecolor=palette.PAPER,
                      markeredgecolor=palette.RUNS[1], label="spot, if never interrupted"),
               Line2D([], [], marker="s", linestyle="", color=palette.readable(palette.PLAIN),
                      label="your machine")]
    return [handle for handle in handles if has_spot or "spot" not in handle.get_label()]


@shows("6.12")
def show_budget(costs: Callable, mfu: float = 0.3,
                machines: Mapping[str, Machine] = MACHINES) -> Table:
    """Returns a table of what 2 A10 train in an evening of 4 hours and 8 A100 in an hour. mfu: what
    the A10s are assumed to reach; of the A100s published speeds are known."""
    small, large = (hf_configs.config("GPT-2"), hf_configs.make("gpt2", **GPT_1B))
    a10, a100 = machines["Lambda 1x A10"], machines["Lambda 8x A100-80"]
    sizes = parameters.shape_of(small)
    flops = flops_per_token(parameters.count(small), sizes.layers, sizes.hidden, 1024)
    peak = hardware.gpu("A10").flops
    rows = [
        _budget(costs, "2 × A10, 4\N{NO-BREAK SPACE}h", a10, 2, 4, "GPT-2", small, (8, 1024),
                2 * peak * mfu / flops, f"MFU {mfu:g}, assumed"),
        _budget(costs, "8 × A100-80, 1\N{NO-BREAK SPACE}h", a100, 8, 1, "GPT-2", small, (24, 1024),
                reported_runs()["mosaic-136"].tokens_per_s, "published, MPT-125m"),
        _budget(costs, "8 × A100-80, 1\N{NO-BREAK SPACE}h", a100, 8, 1, "1.3B", large, (18, 1024),
                reported_runs()["mosaic-112"].tokens_per_s, "published, MPT-1b")]
    return Table("what a budget trains", (
        "rented", "model", "speed", "tokens/s", "million tokens", "tokens per parameter",
        "dollars", "dollars per billion", "GB needed / there"), rows, left=2,
        note="GB of a GPU: FSDP2 with bf16 compute, 8 to 24 sequences of 1,024 tokens a GPU, "
             "predicted as in 01. The two A10s are two machines: between them lies a network.")


def _budget(costs, name, machine, gpus, hours, model, config, batch, rate, source) -> tuple:
    rented = Machine(name, machine.gpu, gpus, machine.dollars, machine.source, machine.read)
    per_dollar, per_billion = _both(costs, rate, rented, name)
    tokens = 3600 * hours * rate
    held = predict(config, batch=batch[0], sequence=batch[1], ranks=gpus, strategy="fsdp2",
                   recipe="bf16 policy", device="cuda")["peak"].total + hardware.overhead(gpus)
    usable = hardware.gpu(machine.gpu).usable
    return (name, model, source, f"{rate:,.0f}", f"{tokens / 1e6:,.0f}",
            f"{tokens / parameters.count(config):.1f}", f"{tokens / per_dollar:,.2f}",
            f"{per_billion:,.2f}", f"{held / GB:.1f} / {usable / GB:.1f}")


@shows("6.13")
def show_claim(judge_claim: Callable, mfu: float = 0.4, name: str = "Lambda 8x A100-80") -> Table:
    """Returns a table of the printed FLOPs and the right ones: the days and dollars of each."""
    machine, slip = MACHINES[name], claims.SLIP
    peak = hardware.gpu(machine.gpu).flops
    factor, days, dollars = require_numbers(judge_claim(slip, machine, peak, mfu), claims.NAMES,
                                            str(slip))
    require_positive(factor, f"{slip}, {claims.NAMES[0]}")
    printed = claims.printed_flops(slip)
    rows = [("as printed: 84 quintillion", f"{printed:.1e}", f"{days / factor:,.2f}",
             f"{dollars / factor:,.0f}"),
            ("right: 84 sextillion", f"{printed * factor:.1e}", f"{days:,.0f}",
             f"{dollars:,.0f}")]
    return Table(f"7B parameters on 2T tokens, {name} at {hourly(machine):.2f} dollars an hour, "
                 f"MFU {mfu:g}", ("FLOPs", "", "days", "dollars"), rows)


SETTINGS = {"a checkpoint every 30 minutes, restart 6 minutes": (0.5, 0.1),
            "every 3 hours, restart 30 minutes": (3.0, 0.5)}
HOURS, SIMULATED, DRAWN = 6000, 8, 80  # hours of a simulated run; points of each curve


@shows("6.14")
def show_spot(spot_costs: Callable, machine: Machine = MACHINES["GCP a3-highgpu-1g"]) -> Picture:
    """Draws dollars per hour of training on spot over the rate of interruptions: an event
    simulation and the student's formula, with the price on demand and the break-even rates."""
    if machine.spot is None:
        raise Wrong(f"{machine.name} has no spot price", "Choose a machine that has one.")
    figure, ax = canvas(WIDTH, 3.9)
    lines = [_draw_setting(ax, spot_costs, machine, name, colour)
             for name, colour in zip(SETTINGS, palette.RUNS[1:], strict=False)]
    right = 1.3 * max(_even(machine, setting) for setting in SETTINGS.values())
    for price, words, above in ((machine.dollars, "on demand", True),
                                (machine.spot, "spot, never interrupted", False)):
        ax.axhline(price, color=palette.MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        ax.annotate(words, (right, price), xytext=(0, 3 if above else -5), ha="right",
                    va="bottom" if above else "top", textcoords="offset points", fontsize=9.5,
                    color=palette.MUTED, annotation_clip=False)
    ax.set_xlim(0, right)
    ax.set_ylim(0.8 * machine.spot, 1.45 * machine.dollars)
    ax.set_xlabel("interruptions in a billed hour")
    ax.set_ylabel("dollars per GPU and\nhour of training")
    marks.legend_above(figure, _spot_legend())
    title = f"{machine.name}: {machine.dollars} on demand, {machine.spot} on spot"
    return Picture(figure, "\n".join([title, *lines]), data=lines)


def _draw_setting(ax, spot_costs, machine, name, colour) -> str:
    """Draws the simulation and the student's formula up to above break-even; returns what they
    say of it."""
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
    return f"{name}: your break-even {yours:.2f} an hour, simulated {even:.2f}"


def _even(machine, setting) -> float:
    return break_even_rate(machine.dollars / machine.spot, *setting)


def _spot(spot_costs, machine, rate, setting) -> tuple[float, ...]:
    """The student's (dollars of one hour of training, break-even rate)."""
    return require_numbers(spot_costs(1, machine.dollars, machine.spot, rate, *setting),
                           spot_check.NAMES, f"{rate:.3g} interruptions an hour")


def _spot_legend() -> list:
    named = [Line2D([], [], marker="o", color=colour, label=name)
             for colour, name in zip(palette.RUNS[1:], SETTINGS, strict=False)]
    return [*named, Line2D([], [], marker="o", linestyle="", color=palette.MUTED,
                           label="simulated"),
            Line2D([], [], color=palette.MUTED, label="your formula"),
            Line2D([], [], marker="|", linestyle="", markersize=12, markeredgewidth=3,
                   color=palette.MUTED, label="your break-even")]
