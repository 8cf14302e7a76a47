"""Exercise 6.12: tokens per dollar, and dollars per billion tokens."""

from dataclasses import dataclass, replace

from labs.exercises.generator import new_generator
from labs.exercises.numbers import (
    Mistake,
    common_cause,
    judge_number,
    require_numbers,
    require_signature,
)
from labs.exercises.verdicts import check
from labs.predictions.prices import MACHINES, Machine, hourly

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
    dice = new_generator()
    own = Machine("drawn at random", "H100", dice.randint(2, 64), dice.uniform(0.2, 12), "", "",
                  spot=dice.uniform(0.05, 0.2))
    machines = [own, MACHINES["Lambda 8x A100-80"], MACHINES["AWS p5en.48xlarge"],
                MACHINES["Lambda 1x A10"]]
    return [Case(dice.uniform(1e3, 1e6), machine) for machine in map(replace, machines)]


def _named(case) -> str:
    machine = case.machine
    return (f"{machine.name}, {machine.gpus} x {machine.dollars:.4g} dollars an hour, "
            f"{case.tokens_per_s:,.0f} tokens/s")
