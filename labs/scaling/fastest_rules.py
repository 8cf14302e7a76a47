"""Exercise 6.18: the rule by which a plan is chosen, and known ways to choose otherwise."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from labs.scaling.gpu_steps import Candidate, right_parts, right_seconds
from labs.training.memory_categories import GB

NEAR = 1.05  # of seconds: what the model of 6.16 cannot tell apart


def choice(plans: Sequence[Candidate], fits: Callable[[Candidate], bool] | None = None,
           seconds: Callable[[Candidate], float] | None = None, near: float = NEAR,
           least: Callable[[Candidate], float] | None = None) -> Candidate | None:
    """Of those whose memory fits with its interval, and that are within 5 % of the fastest of
    them, the one with the least memory. The arguments are for those who do one thing otherwise."""
    seconds = seconds or (lambda plan: right_seconds(plan.step))
    fitting = list(filter(fits or (lambda plan: plan.memory_high <= plan.free), plans))
    shortest = min(map(seconds, fitting), default=0)
    return min((plan for plan in fitting if seconds(plan) <= near * shortest),
               key=least or (lambda plan: plan.memory_high), default=None)


def right(plans: Sequence[Candidate]) -> Candidate | None:
    """What `fastest` is to return."""
    return choice(plans)


def _parts_but(*names) -> Callable[[Candidate], float]:
    """Seconds without some parts."""
    return lambda plan: sum(seconds for name, seconds in right_parts(plan.step).items()
                            if name not in names)


class Rule(NamedTuple):
    """A known way to choose otherwise."""

    code: str
    choose: Callable[[Sequence[Candidate]], Candidate | None]
    sentence: str
    hint: str


MEMORY_HINT = "A prediction has an interval. Compare its upper end, memory_high, with free."
SECONDS_HINT = "The seconds of a plan are sum(step_parts(plan.step).values()), of exercise 6.16."
LIMIT_HINT = "Plans that take at most 1.05 times the shortest step are equally good."
LEAST_HINT = "Of these, the one with the least memory_high."
RULES = [
    Rule("bare_memory", lambda plans: choice(plans, lambda plan: plan.memory <= plan.free),
         "memory is compared with free, not its upper end", MEMORY_HINT),
    Rule("no_limit", lambda plans: choice(plans, lambda plan: True),
         "no plan is left out for its memory", MEMORY_HINT),
    Rule("strict_limit", lambda plans: choice(plans, lambda plan: plan.memory_high < plan.free),
         "a plan whose memory_high is exactly free is left out", "It fits: at most free."),
    Rule("own_limit", lambda plans: choice(plans, lambda plan: plan.memory_high <= 80 * GB),
         "memory is compared with 80 GB", "plan.free says what this GPU has for tensors."),
    Rule("fastest_alone", lambda plans: choice(plans, near=1.0),
         "the fastest is chosen, where others are equally good", f"{LIMIT_HINT} {LEAST_HINT}"),
    Rule("fastest_alone", lambda plans: choice(
        plans, near=math.inf, least=lambda plan: right_seconds(plan.step)),
         "the fastest is chosen, where others are equally good", f"{LIMIT_HINT} {LEAST_HINT}"),
    Rule("least_alone", lambda plans: choice(plans, near=math.inf),
         "the plan with the least memory is chosen, however slow", LIMIT_HINT),
    Rule("other_limit", lambda plans: choice(plans, near=1.06),
         "a plan that takes over 1.05 times the shortest step counts as equally good", LIMIT_HINT),
    Rule("other_limit", lambda plans: choice(plans, near=1.10),
         "a plan that takes over 1.05 times the shortest step counts as equally good", LIMIT_HINT),
    Rule("other_limit", lambda plans: choice(plans, near=1.04),
         "a plan that takes less than 1.05 times the shortest step counts as slower", LIMIT_HINT),
    Rule("least_of_bare", lambda plans: choice(plans, least=lambda plan: plan.memory),
         "equally good plans are told apart by memory, not memory_high", LEAST_HINT),
    Rule("least_interval",
         lambda plans: choice(plans, least=lambda plan: plan.memory_high - plan.memory),
         "equally good plans are told apart by the width of their interval", LEAST_HINT),
    Rule("most_memory", lambda plans: choice(plans, least=lambda plan: -plan.memory_high),
         "of equally good plans the one with the most memory is chosen", LEAST_HINT),
    Rule("first_alike", lambda plans: choice(plans, least=lambda plan: 0),
         "of equally good plans the first is chosen", LEAST_HINT),
    Rule("wrong_seconds", lambda plans: choice(plans, seconds=_parts_but("once")),
         "`once` is missing in the seconds", SECONDS_HINT),
    Rule("wrong_seconds", lambda plans: choice(
        plans, seconds=lambda plan: right_seconds(plan.step)
        - (plan.step.micro_batches - 1) * plan.step.head),
         "the head is counted for one micro-batch", SECONDS_HINT),
    Rule("wrong_seconds", lambda plans: choice(plans, seconds=_parts_but("head")),
         "the head is missing in the seconds", SECONDS_HINT),
    Rule("wrong_seconds", lambda plans: choice(plans, seconds=_parts_but("head", "once")),
         "head and `once` are missing in the seconds", SECONDS_HINT),
    Rule("wrong_seconds",
         lambda plans: choice(plans, seconds=_parts_but("waiting for the host")),
         "the time that the GPU waits for the host is missing", SECONDS_HINT),
    Rule("wrong_seconds", lambda plans: choice(
        plans, seconds=lambda plan: max(right_parts(plan.step).values())),
         "only the longest part counts", SECONDS_HINT),
    Rule("wrong_seconds", lambda plans: choice(
        plans, seconds=lambda plan: right_seconds(plan.step) / plan.step.micro_batches),
         "the seconds are those of one micro-batch", SECONDS_HINT),
    Rule("shortest_of_all", lambda plans: min(
        (plan for plan in plans if plan.memory_high <= plan.free and right_seconds(plan.step)
         <= NEAR * min(right_seconds(each.step) for each in plans)),
        key=lambda plan: plan.memory_high, default=None),
         "the shortest step is taken from plans that do not fit",
         "The shortest step is that of the plans that fit: drop the others first.")]
