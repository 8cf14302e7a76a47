"""Exercise 6.12: tokens per dollar, and dollars per billion tokens; the pictures of prices, of
costs by machine, and of what a budget trains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from matplotlib.lines import Line2D

from labs.checks.generator import new_generator
from labs.checks.guesses import guessed
from labs.checks.numbers import (
    Mistake,
    common_cause,
    judge_number,
    require_numbers,
    require_positive,
    require_signature,
)
from labs.checks.verdicts import check, shows
from labs.pictures import marks, palette
from labs.pictures.picture import WIDTH, Picture, canvas
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.cost.prices import MACHINES, NODE, Machine, hourly
from labs.predictions.memory import parameters
from labs.predictions.memory.predict import predict
from labs.predictions.step_time.efficiency import flops_per_token
from labs.predictions.step_time.reported_runs import ReportedRun, efficiency_of, reported_runs
from labs.training import hf_configs
from labs.training.memory_categories import GB

NAMES = ("tokens per dollar", "dollars per billion tokens")


@dataclass(frozen=True)
class Case:
    """A throughput of all GPUs of a machine together."""

    tokens_per_s: float
    machine: Machine

    @property
    def per_dollar(self) -> float:
        """Tokens for a dollar."""
        return 3600 * self.tokens_per_s / hourly(self.machine)

    @property
    def per_billion(self) -> float:
        """Dollars for 1e9 tokens."""
        return 1e9 / self.per_dollar


_SLIPS: list[Mistake] = [  # number: the factor of tokens per dollar
    Mistake("price_one_gpu_buys_tokens", lambda case: case.machine.gpus,
            "the price of one GPU buys the tokens of all of them",
            "machine.dollars is per GPU, tokens_per_s of all GPUs: multiply by machine.gpus."),
    Mistake("gpus_counted_twice", lambda case: 1 / case.machine.gpus, "the GPUs are counted twice",
            "tokens_per_s is of all GPUs together."),
    Mistake("dollars_per_hour", lambda case: 1 / 3600,
            "dollars are per hour, and tokens per second", "An hour has 3,600 seconds."),
    Mistake("minutes_for_hours", lambda case: 1 / 60, "an hour has 3,600 seconds, not 60",
            "60 minutes of 60 seconds."),
    Mistake("neither_gpus_nor_hour_seconds", lambda case: case.machine.gpus / 3600,
            "neither the GPUs nor the hour's seconds are counted",
            "An hour has 3,600 seconds, and machine.dollars is per GPU."),
    Mistake("price_hour_for_day", lambda case: 24, "that is the price of an hour for a day",
            "24 hours of a day cost 24 times."),
    Mistake("in_cents", lambda case: 100, "that is in cents", "machine.dollars is in dollars."),
    Mistake("spot_price",
            lambda case: case.machine.dollars / (case.machine.spot or case.machine.dollars),
            "that is the spot price",
            "machine.dollars is on demand; what spot costs is exercise 6.14."),
]
PER_DOLLAR: list[Mistake] = [
    *(replace(slip, number=lambda case, slip=slip: slip.number(case) * case.per_dollar)
      for slip in _SLIPS),
    Mistake("two_exchanged", lambda case: case.per_billion, "the two are exchanged",
            "Tokens per dollar come first."),
    Mistake("in_billions", lambda case: case.per_dollar / 1e9, "that is in billions",
            "Tokens, not billions of them."),
    Mistake("dollars_per_token", lambda case: 1 / case.per_dollar, "that is dollars per token",
            "Tokens for one dollar.")]
PER_BILLION: list[Mistake] = [
    *(replace(slip, number=lambda case, slip=slip: case.per_billion / slip.number(case))
      for slip in _SLIPS),
    Mistake("two_exchanged", lambda case: case.per_dollar, "the two are exchanged",
            "Tokens per dollar come first."),
    Mistake("multiplies_tokens_per_dollar", lambda case: 1e9 * case.per_dollar,
            "that multiplies by the tokens per dollar", "Divide 1e9 tokens by them."),
    Mistake("for_million_tokens", lambda case: case.per_billion / 1e3,
            "that is for a million tokens", "A billion is 1e9."),
    Mistake("for_thousand_billion_tokens", lambda case: case.per_billion * 1e3,
            "that is for a thousand billion tokens",
            "A billion is 1e9: 10^12 in some languages, not here."),
    Mistake("billion_taken_2_30", lambda case: case.per_billion * 2**30 / 1e9,
            "a billion is taken as 2^30", "Tokens are counted in decimal: 1e9.")]


@check("6.12")
def check_costs(costs):
    """Two numbers for machines of the table and for some drawn at random."""
    require_signature(costs, ("tokens_per_s", "machine"))
    cases = _cases()
    answers = [require_numbers(costs(case.tokens_per_s, case.machine), NAMES, _named(case))
               for case in cases]
    for column, (name, mistakes) in enumerate(zip(NAMES, (PER_DOLLAR, PER_BILLION), strict=True)):
        got = [answer[column] for answer in answers]
        for at, case in enumerate(cases):
            # Who counts whole tokens is right: less than one off, and the dollars by as much.
            judge_number(got[at], case.per_billion if column else case.per_dollar,
                         common_cause(mistakes, cases, got, at), f"{_named(case)}: {name}",
                         hint="3,600 seconds an hour, machine.gpus times machine.dollars.",
                         rel_tol=1.001 / case.per_dollar)
    return f"both numbers on {len(cases)} machines, with 1 to 64 GPUs"


def _cases() -> list[Case]:
    """The table's, a machine of one GPU last: with one GPU two mistakes look right."""
    rng = new_generator()
    # Several GPUs and a spot price, so that each mistake changes its numbers.
    own = Machine("random", "H100", rng.randint(2, 64), rng.uniform(0.2, 12), "", "",
                  spot=rng.uniform(0.05, 0.2))
    machines = [own, MACHINES["Lambda 8x A100-80"], MACHINES["AWS p5en.48xlarge"],
                MACHINES["Lambda 1x A10"]]
    return [Case(rng.uniform(1e3, 1e6), machine) for machine in map(replace, machines)]


def _named(case) -> str:
    machine = case.machine
    return (f"{machine.name}, {machine.gpus} x {machine.dollars:.4g} dollars an hour, "
            f"{case.tokens_per_s:,.0f} tokens/s")


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
    guess = guessed("6.12")
    figure, ax = canvas(WIDTH, 1.7 + 0.31 * len(shown) + marks.HEADLINE
                        + marks.NOTE_LINE * (2 + (guess is not None)))
    _cost_axis(ax, [row for row, _, _ in shown], rows, guess)
    for place, (row, colour, marker) in enumerate(shown):
        _draw_cost(ax, place, row, colour, marker)
    left_out = sorted({machine.gpu for machine in machines.values()} - set(SPEEDS))
    note = (f"{MODEL}, at the speed that llm-foundry published for 8 of each GPU.\nWithout a "
            f"published speed, and so left out: {', '.join(left_out)}.")
    handles = _cost_legend(any(row.spot for row in rows))
    if guess is not None and guess > 0:
        _draw_guess(ax, guess, handles)
    answers = [marks.answered(guess, row.dollars, f"dollars on {NODE}")
               for row in rows if row.name == NODE]
    note = "\n".join([*filter(None, answers), note])
    cheapest, dearest = rows[0], rows[-1]
    lesson = (f"The same tokens cost {dearest.dollars / cheapest.dollars:.2g} times as much on "
              f"{dearest.name} as on {cheapest.name}")
    marks.headline(figure, lesson)
    marks.note_below(figure, note)
    marks.legend_above(figure, handles)
    lines = [f"{row.name}: {row.dollars:,.2f}" + (f", spot {row.spot:,.2f}" if row.spot else "")
             for row, _, _ in shown]
    return Picture(figure, "\n".join([lesson, "dollars per billion tokens", *lines, note]),
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
    return both_costs(costs, rate, machine, machine.name)[1]


def both_costs(costs, rate, machine, name) -> tuple[float, ...]:
    """The student's two numbers, which are above 0."""
    return tuple(require_positive(number, f"{name}, {what}") for number, what in zip(
        require_numbers(costs(rate, machine), NAMES, name), NAMES,
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


def _draw_guess(ax, guess, handles):
    """A line across all rows, because the guess is of no row; none beyond the axis."""
    if guess < ax.get_xlim()[1]:
        handles.append(ax.axvline(guess, color=palette.GUESSED, linestyle=(0, (3, 2)), zorder=2,
                                  label=f"your guess, for {NODE}: {guess:g}"))


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
    per_dollar, per_billion = both_costs(costs, rate, rented, name)
    tokens = 3600 * hours * rate
    held = predict(config, batch=batch[0], sequence=batch[1], ranks=gpus, strategy="fsdp2",
                   recipe="bf16 policy", device="cuda")["peak"].total + hardware.overhead(gpus)
    usable = hardware.gpu(machine.gpu).usable
    return (name, model, source, f"{rate:,.0f}", f"{tokens / 1e6:,.0f}",
            f"{tokens / parameters.count(config):.1f}", f"{tokens / per_dollar:,.2f}",
            f"{per_billion:,.2f}", f"{held / GB:.1f} / {usable / GB:.1f}")
