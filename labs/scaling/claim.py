"""Exercise 6.13: a printed number of FLOPs, how far off it is, and what the job really takes."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from labs.checks.generator import new_generator
from labs.checks.numbers import (
    Mistake,
    common_cause,
    judge_number,
    require_numbers,
    require_positive,
    require_signature,
)
from labs.checks.verdicts import check, shows
from labs.pictures.tables import Table
from labs.predictions import hardware
from labs.predictions.cost.prices import MACHINES, Machine, hourly
from labs.predictions.hardware import GPUS
from labs.predictions.step_time.efficiency import six_nd

NAMES = ("how many times too few", "days", "dollars")
SCALES = ("thousand", "million", "billion", "trillion", "quadrillion", "quintillion", "sextillion",
          "septillion")
"""The short scale, as in English: each is 1,000 times the one before."""


@dataclass(frozen=True)
class Claim:
    """A sentence in a text: training `parameters` on `tokens` takes `number` `scale` FLOPs."""

    parameters: float
    tokens: float
    number: float
    scale: str

    def __str__(self):
        return (f'"{self.parameters / 1e9:g}B parameters on {self.tokens / 1e12:g}T tokens take '
                f'{self.number:g} {self.scale} FLOPs"')


def printed_flops(claim: Claim) -> float:
    """FLOPs that the sentence names."""
    return claim.number * 1000 ** (1 + SCALES.index(claim.scale))


SLIP = Claim(7e9, 2e12, 84, "quintillion")
"""An example, made up for the exercise. 6·N·D is 8.4e22, 84 sextillion."""


@dataclass(frozen=True)
class Case:
    """A claim, and a machine that reaches a share `mfu` of its peak."""

    claim: Claim
    machine: Machine
    mfu: float

    @property
    def flops(self) -> float:
        """FLOPs of the job."""
        return six_nd(self.claim.parameters, self.claim.tokens)

    @property
    def factor(self) -> float:
        """Right FLOPs over printed ones."""
        return self.flops / printed_flops(self.claim)

    @property
    def days(self) -> float:
        """On the machine."""
        peak = GPUS[self.machine.gpu].flops
        return self.flops / (self.machine.gpus * peak * self.mfu) / 86400

    @property
    def dollars(self) -> float:
        """Of the machine, on demand."""
        return 24 * self.days * hourly(self.machine)


def _spot(machine) -> float:
    """Dollars per GPU and hour on spot, on demand where it is not sold."""
    return machine.spot or machine.dollars


def _times(right: Callable, factors: list[Mistake]) -> list[Mistake]:
    """The mistakes that make the right number so many times as large."""
    return [replace(one, number=lambda case, one=one: one.number(case) * right(case))
            for one in factors]


_SCALE = "Each name is 1,000 times the one before: million 10^6, billion 10^9, trillion 10^12, ..."
_FLOPS: list[Mistake] = [  # number: the factor of the right FLOPs
    Mistake("forward_alone", lambda case: 1 / 3, "that is forward alone: 2ND",
            "Forward and backward: 6·N·D."),
    Mistake("one_flop_each", lambda case: 1 / 6, "that is N·D",
            "6 FLOPs per parameter and token: 6·N·D."),
    Mistake("recomputes_forward", lambda case: 4 / 3, "that recomputes forward: 8ND", "6·N·D.")]
_JOB: list[Mistake] = [  # number: the factor of the right days and dollars
    Mistake("on_one_gpu", lambda case: case.machine.gpus, "that is on one GPU",
            "machine.gpus share the work."),
    Mistake("peak", lambda case: case.mfu, "that is at the peak",
            "Divide by mfu: only that share is reached."),
    Mistake("mfu_taken_percentage", lambda case: 100, "mfu is taken as a percentage",
            "mfu is a share: 0.4 are 40 %."),
    Mistake("mfu_makes_faster", lambda case: case.mfu**2, "mfu makes it faster, not slower",
            "Divide by mfu, not multiply."),
    Mistake("for_printed_flops", lambda case: 1 / case.factor, "that is for the printed FLOPs",
            "The job takes 6·N·D, whatever the sentence says.")]
FACTOR: list[Mistake] = [
    Mistake("printed_number_over_right_one", lambda case: 1 / case.factor,
            "that is the printed number over the right one",
            "How many times too few: 6·N·D over what is printed."),
    Mistake("scale_off_by_one", lambda case: 1000 * case.factor,
            "the scale's name is read as one too low", _SCALE),
    Mistake("scale_off_by_one", lambda case: case.factor / 1000,
            "the scale's name is read as one too high: that is the slip", _SCALE),
    Mistake("scale_name_left_out", lambda case: case.flops / case.claim.number,
            "the scale's name is left out", _SCALE),
    Mistake("right_for_first_sentence", lambda case: 1000.0,
            "that is right for the first sentence only",
            "Compute it from claim.number and claim.scale: some sentences are right."),
    Mistake("right_number_flops", lambda case: case.flops, "that is the right number of FLOPs",
            "Divide by what is printed."),
    Mistake("printed_number", lambda case: printed_flops(case.claim), "that is the printed number",
            "6·N·D divided by it."),
    Mistake("names_read_in_long_scale",
            lambda case: case.flops / (
                case.claim.number * 10 ** (6 * SCALES.index(case.claim.scale))),
            "names are read in the long scale", _SCALE),
    *_times(lambda case: case.factor, _FLOPS)]
DAYS: list[Mistake] = [
    Mistake("in_hours", lambda case: 24 * case.days, "that is in hours", "A day has 24 hours."),
    Mistake("in_seconds", lambda case: 86400 * case.days, "that is in seconds",
            "A day has 86,400 seconds."),
    Mistake("tflop_s_flop_s_mixed", lambda case: case.days / 1e12, "TFLOP/s and FLOP/s are mixed",
            "The peak is in FLOP/s."),
    *_times(lambda case: case.days, _JOB), *_times(lambda case: case.days, _FLOPS)]
DOLLARS: list[Mistake] = [
    Mistake("day_paid_hour", lambda case: case.dollars / 24, "a day is paid as an hour",
            "Prices are per hour."),
    Mistake("spot_price", lambda case: case.dollars * _spot(case.machine) / case.machine.dollars,
            "that is the spot price",
            "machine.dollars is on demand; what spot costs is exercise 6.14."),
    Mistake("one_gpu_paid", lambda case: case.dollars / case.machine.gpus, "one GPU is paid",
            "machine.dollars is per GPU."),
    Mistake("gpus_paid_twice", lambda case: case.dollars * case.machine.gpus,
            "the GPUs are paid twice", "machine.gpus times machine.dollars, each hour."),
    Mistake("price_taken_per_second", lambda case: case.dollars * 3600,
            "the price is taken per second", "It is per hour."),
    *_times(lambda case: case.dollars, _JOB), *_times(lambda case: case.dollars, _FLOPS)]
_HINTS = (_SCALE, "FLOPs over the machine's FLOP/s.",
          "Hours of the whole machine: machine.gpus times machine.dollars in each.")


@check("6.13")
def check_claim(judge_claim):
    """Three numbers for sentences of which some are right."""
    require_signature(judge_claim, ("claim", "machine", "peak", "mfu"))
    cases = _cases()
    answers = [require_numbers(
        judge_claim(case.claim, case.machine, GPUS[case.machine.gpu].flops, case.mfu), NAMES,
        _named(case)) for case in cases]
    for column, mistakes in enumerate((FACTOR, DAYS, DOLLARS)):
        got = [answer[column] for answer in answers]
        for at, case in enumerate(cases):
            judge_number(got[at], (case.factor, case.days, case.dollars)[column],
                         common_cause(mistakes, cases, got, at),
                         f"{_named(case)}: {NAMES[column]}", rel_tol=1e-6, hint=_HINTS[column])
    return (f"{SLIP} is {_cases()[0].factor:,.0f} times too few: 84 sextillion. Right, too, for "
            f"{len(cases) - 1} other sentences")


def _cases() -> list[Case]:
    """The slip; a right sentence; wrong ones by a thousand up and down, drawn at random."""
    rng = new_generator()
    found = [Case(replace(SLIP), replace(MACHINES["Lambda 8x A100-80"]), 0.4)]
    for power in (0, 1, -1, rng.randint(-1, 1)):
        parameters, tokens = 1e9 * rng.randint(2, 90), 1e12 * rng.randint(1, 15)
        # The number stays, and the name of the scale is one too high or too low.
        exponent = 7 - power  # of 1000: sextillions where the sentence is right
        claim = Claim(parameters, tokens, six_nd(parameters, tokens) / 1000**7,
                      SCALES[exponent - 1])
        machine = rng.choice([machine for machine in MACHINES.values() if machine.gpus > 1])
        # each with a spot price, which is not what the job is paid by
        found.append(Case(claim, replace(machine, spot=rng.uniform(0.3, 0.7) * machine.dollars),
                          rng.uniform(0.2, 0.6)))
    return found


def _named(case) -> str:
    return f"{case.claim} on {case.machine.name}, MFU {case.mfu:.2f}"


@shows("6.13")
def show_claim(judge_claim: Callable, mfu: float = 0.4, name: str = "Lambda 8x A100-80") -> Table:
    """Returns a table of the printed FLOPs and the right ones: the days and dollars of each."""
    machine, slip = MACHINES[name], SLIP
    peak = hardware.gpu(machine.gpu).flops
    factor, days, dollars = require_numbers(judge_claim(slip, machine, peak, mfu), NAMES,
                                            str(slip))
    require_positive(factor, f"{slip}, {NAMES[0]}")
    printed = printed_flops(slip)
    rows = [("as printed: 84 quintillion", f"{printed:.1e}", f"{days / factor:,.2f}",
             f"{dollars / factor:,.0f}"),
            ("right: 84 sextillion", f"{printed * factor:.1e}", f"{days:,.0f}",
             f"{dollars:,.0f}")]
    return Table(f"7B parameters on 2T tokens, {name} at {hourly(machine):.2f} dollars an hour, "
                 f"MFU {mfu:g}", ("FLOPs", "", "days", "dollars"), rows)
