"""The pictures of part 6: prices, what tokens cost by machine, what a budget trains, a claim."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from matplotlib.lines import Line2D

from labs.exercises.guesses import guessed
from labs.exercises.numbers import require_numbers, require_positive
from labs.exercises.verdicts import shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.predictions import hardware, parameters
from labs.predictions.efficiency import flops_per_token
from labs.predictions.memory import predict
from labs.predictions.prices import MACHINES, Machine, hourly
from labs.predictions.reported_runs import ReportedRun, efficiency_of, reported_runs
from labs.scaling.checks import claim as claims
from labs.scaling.checks import costs as cost_check
from labs.training import hf_configs
from labs.training.memory_categories import GB

# One model and one length on all GPUs: MPT-1b, 1,024 tokens, 8 GPUs each.
SPEEDS = {"A100-40": "mosaic-182", "A100-80": "mosaic-112", "H100": "mosaic-060"}
MODEL = "MPT-1b (1.3B), 1,024 tokens"
FAR = 3  # times the most expensive seller: further than that an axis has no room for
GPT_1B = {"n_embd": 2048, "n_layer": 24, "n_head": 16, "vocab_size": 50368, "n_positions": 1024}


@shows("6.12")
def show_prices(machines: Mapping[str, Machine] = MACHINES) -> Table:
    """Returns a table of the machines: dollars per GPU and hour, the seller's page, the day it was
    read, and which public page transcribed it."""
    rows = [(machine.name, f"{machine.gpus} × {machine.gpu}", machine.source or "–",
             machine.read or "–", machine.transcribed or "–", f"{machine.dollars:.2f}",
             f"{machine.spot:.2f}" if machine.spot else "–") for machine in machines.values()]
    return Table("dollars per GPU and hour", (
        "offer", "GPUs", "the seller's page", "read on", "transcribed by", "on demand", "spot"),
        rows, left=4, note="– : no spot price with a page and a day was found.")


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
    shown = [*((row, palette.RUNS[1], "o") for row in rows),
             (mine, palette.readable(palette.PLAIN), "s")]
    figure, ax = canvas(WIDTH, 1.7 + 0.31 * len(shown) + 2 * marks.NOTE_LINE)
    guess = guessed("6.12")
    _cost_axis(ax, [row for row, _, _ in shown], rows, guess)
    for place, (row, colour, marker) in enumerate(shown):
        _draw_cost(ax, place, row, colour, marker)
    left_out = sorted({machine.gpu for machine in machines.values()} - set(SPEEDS))
    note = (f"{MODEL}, at the speed that llm-foundry published for 8 of each GPU.\nWithout a "
            f"published speed, and so left out: {', '.join(left_out)}.")
    handles = _cost_legend(any(row.spot for row in rows))
    if guess is not None and guess > 0:
        note += _draw_guess(ax, guess, handles)
    marks.note_below(figure, note)
    marks.legend_above(figure, handles)
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
    """The dollars as a mark with their number; where that is right of the axis, an arrow."""
    high = ax.get_xlim()[1]
    is_beyond = row.dollars >= high
    ax.plot(min(row.dollars, high), place, ">" if is_beyond else marker, color=colour, markersize=7,
            zorder=3, clip_on=False)
    text, side = marks.format_number(row.dollars), -1 if is_beyond else 1
    ax.annotate(f"{text}, off the scale" if is_beyond else text, (min(row.dollars, high), place),
                xytext=(9 * side, 0), textcoords="offset points", va="center",
                ha="right" if is_beyond else "left", fontsize=9.5, **marks.ON_PAPER)
    if row.spot:
        ax.plot(row.spot, place, "o", markerfacecolor=palette.PAPER, markeredgecolor=colour,
                markersize=7, zorder=3)


def _cost_axis(ax, shown, sellers, guess):
    """An axis from 0 that has all sellers; of the other rows, and of the guess, what is not FAR
    from them."""
    marks.name_rows(ax, [row.name for row in shown], size=9)
    highest = max(row.dollars for row in sellers)
    near = [each for each in (*(row.dollars for row in shown), guess or 0) if each < FAR * highest]
    ax.set_xlim(0, 1.12 * max(near))
    ax.set_xlabel("dollars per billion tokens")
    ax.grid(axis="x", color=palette.GRID, linewidth=0.8)
    ax.set_axisbelow(True)


def _draw_guess(ax, guess, handles) -> str:
    """A line across all rows, because the guess is of no row; returns what the note says of it."""
    if guess < ax.get_xlim()[1]:
        handles.append(ax.axvline(guess, color=palette.GUESSED, linestyle=(0, (3, 2)), zorder=2,
                                  label=f"your guess, for Lambda 8x A100-80: {guess:g}"))
        return ""
    return f"\nYour guess, for Lambda 8x A100-80: {guess:g}, off the scale."


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
