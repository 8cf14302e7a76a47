"""Exercise 6.3: efficiency from throughputs, and what a promised speed-up is as one."""

import random
from collections.abc import Callable, Iterator

from labs.exercises.numbers import (
    Cause,
    as_number,
    judge_number,
    require_numbers,
    require_signature,
)
from labs.exercises.verdicts import Wrong, check
from labs.words import counted

CLAIMED = (1.5, 1.7)  # times the throughput of one GPU, on two
_RULE = "N ranks could do N times the work of one: divide what they do by what they could do."


@check("6.3")
def check_efficiency(efficiency: Callable, claimed):
    """efficiency(ranks, throughput, alone): of N ranks. claimed: (lowest, highest) efficiency that
    the figure means."""
    require_signature(efficiency, ("ranks", "throughput", "alone"))
    for ranks, throughput, alone in _cases():
        # Invariant: 1 where N ranks do N times the work of one, whatever the units and N are.
        judge_number(efficiency(ranks, throughput, alone), throughput / (ranks * alone),
                     _causes(ranks, throughput, alone), f"{counted(ranks, 'rank')} with "
                     f"{throughput:,.10g} tokens/s, one alone with {alone:,.10g}: the efficiency",
                     "", _RULE)
    _judge_claim(claimed)
    return ("right for 1 to 1,024 ranks; the promised figure is a speed-up, and its "
            f"efficiency {CLAIMED[0] / 2:.0%} to {CLAIMED[1] / 2:.0%}")


def _cases() -> Iterator[tuple[int, float, float]]:
    """(ranks, throughput of all, throughput of one): some that were chosen, and random ones."""
    yield from ((2, 1500.0, 1000.0), (8, 6000, 1000), (4, 4400.0, 1000.0), (1, 730.5, 730.5))
    for ranks in (3, 7, 64, 1024):
        alone = random.uniform(100, 5000)
        yield ranks, ranks * alone * random.uniform(0.4, 0.97), alone


def _causes(ranks, throughput, alone) -> list[Cause]:
    speedup = throughput / alone
    return [
        Cause("speed_up", speedup, "that is the speed-up", "Divide it by the number of ranks."),
        Cause("in_percent", 100 * speedup / ranks, "that is in percent",
              "An efficiency of 80 % is 0.8."),
        Cause("speed_up_in_percent", 100 * speedup, "that is the speed-up in percent", _RULE),
        Cause("share_time_step_takes", 1 / speedup,
              "that is the share of the time that a step takes", _RULE),
        Cause("upside_down", ranks / speedup, "that is upside down",
              "What they do stands above, what they could do below."),
        Cause("lost", 1 - speedup / ranks, "that is what is lost", "Efficiency is what is left."),
        Cause("multiplies_number_ranks", ranks * speedup, "that multiplies by the number of ranks",
              "Take throughput as that of all ranks together, and divide."),
        Cause("throughput_rank", throughput / ranks, "that is the throughput of a rank",
              "Compare it with that of one alone."),
        Cause("gain_over_one_rank", speedup - 1, "that is the gain over one rank", _RULE),
        Cause("leaves_out_one_rank", (speedup - 1) / max(ranks - 1, 1),
              "that leaves out one rank on both sides",
              "All N ranks could do N times the work, the first one too."),
        Cause("hides_efficiency_above_1", min(speedup / ranks, 1),
              "that hides an efficiency above 1", "It can be above 1, if a smaller share fits into "
              "a cache: report what was measured.")]


def _judge_claim(claimed) -> None:
    names = ("the lowest", "the highest")
    found = require_numbers(claimed, names, "the promised figure", "`claimed` is")
    want = [each / 2 for each in CLAIMED]
    if list(map(as_number, found)) == want[::-1]:
        raise Wrong("the promised figure: the highest efficiency stands first",
                    "Return the lowest, then the highest.", code="wrong_order")
    for name, got, right, speedup in zip(names, found, want, CLAIMED, strict=True):
        # A speed-up of 2 would be perfect on 2 GPUs: an efficiency of 150 % is impossible there.
        judge_number(got, right, [
            Cause("speed_up", speedup, "that is the speed-up", "What would 2 GPUs do at best?"),
            Cause("in_percent", 100 * right, "that is in percent", "An efficiency of 80 % is 0.8."),
            Cause("second_gpu_adds", speedup - 1, "that is what the second GPU adds",
                  "Call your function: throughput and alone may be in any unit."),
            Cause("share_time", 1 / speedup, "that is the share of the time",
                  "Call your function: throughput and alone may be in any unit."),
            Cause("upside_down", 2 / speedup, "that is upside down",
                  "Call your function: throughput and alone may be in any unit.")],
            f"the promised figure, {name}", "",
            "Call your function with 2 ranks: throughput and alone may be in any unit.")
