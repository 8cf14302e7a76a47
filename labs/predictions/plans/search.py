"""The fastest plan that fits: all that the sizes allow, by the models of memory and time."""

import functools
from collections.abc import Iterator, Mapping

from labs.predictions.plans.job import RECOMPUTE, SHARDING, Job, Plan, impossible, training_run
from labs.predictions.plans.memory import fits
from labs.predictions.step_time import StepTime, step_time

MICRO_BATCHES = (1, 2, 4, 8)
FEWEST_TOKENS = 1024  # of a sequence on a context rank: shorter pieces cannot hide what they send


@functools.cache
def step_parts(job: Job, plan: Plan) -> StepTime:
    """Seconds of a step by cause, by the model of notebook 06. Raises ValueError where the plan
    cannot be run."""
    return step_time(training_run(job, plan), job.code.constants)


@functools.cache
def step_seconds(job: Job, plan: Plan) -> float:
    """Seconds of a step: all its causes together."""
    return step_parts(job, plan).total


@functools.cache  # to list them takes seconds, and a table asks for a job's plans eight times
def plans(job: Job, expert: int = 0) -> tuple[Plan, ...]:
    """All plans that can be run and make sense: tensor-parallel groups stay in a node, a context
    rank has at least FEWEST_TOKENS, and the micro-batch is one of MICRO_BATCHES. expert: the
    expert-parallel size; 0: 1, and in a model with experts the largest power of two of a node's
    GPUs too."""
    return tuple(_sizes(job, expert))


def _sizes(job, expert) -> Iterator[Plan]:
    for tensor in _divisors(job.gpus_per_node):
        # layers + 2: the embedding and the head may stand in a layer's place (`Plan.layers`).
        for pipeline in sorted({*_divisors(job.shape.layers), *_divisors(job.shape.layers + 2)}):
            for context in _powers_of_two(max(1, job.sequence // FEWEST_TOKENS)):
                data, rest = divmod(job.gpus, tensor * pipeline * context)
                if data and not rest:
                    experts = [expert] if expert else _expert_sizes(job, data * context, tensor)
                    yield from _with_settings(job, data, tensor, pipeline, context, experts)


def _with_settings(job, data, tensor, pipeline, context, experts) -> Iterator[Plan]:
    for micro_batch in MICRO_BATCHES:
        for sharding in SHARDING if data * context > 1 else SHARDING[:1]:
            # FlashAttention keeps no scores, so selective recomputation would save nothing.
            for recompute in RECOMPUTE if not job.flash else (RECOMPUTE[0], RECOMPUTE[-1]):
                for chunks, schedule in _schedules(job, pipeline):
                    for expert in experts:
                        plan = Plan(data, tensor, pipeline, context, sharding, micro_batch,
                                    recompute, chunks, schedule, expert=expert)
                        if not impossible(job, plan):
                            yield plan


def _expert_sizes(job, ranks, tensor) -> list[int]:
    """Expert-parallel sizes to try on `ranks` data-parallel and context-parallel ranks: 1, and the
    largest power of two that divides both them and the experts and stays in a node."""
    if not job.shape.is_mixture:
        return [1]
    largest = [size for size in _powers_of_two(max(1, job.gpus_per_node // tensor))
               if ranks % size == job.shape.experts % size == 0][-1]
    return sorted({1, largest})


def _schedules(job, pipeline) -> list[tuple[int, str]]:
    """(chunks, schedule) that a pipeline of so many stages may have."""
    if pipeline == 1:
        return [(1, "1F1B")]
    layers = -(-job.shape.layers // pipeline)
    return [(1, "ZB-H1"), *((chunks, "1F1B") for chunks in _divisors(layers))]


def fastest(job: Job, **settings) -> Plan | None:
    """The plan with the shortest step of those that fit and have these settings, as `tensor=1`;
    None where none fits."""
    # The number decides between equal times: plans have no order.
    listed = plans(job, settings.get("expert", 0))
    timed = ((step_seconds(job, plan), number, plan) for number, plan in enumerate(listed)
             if has_settings(plan, settings) and fits(job, plan))
    return min(timed, default=(0, 0, None))[-1]


def has_settings(plan: Plan, settings: Mapping[str, object]) -> bool:
    """Whether each of these attributes of the plan has this value."""
    return all(getattr(plan, name) == value for name, value in settings.items())


def _divisors(number) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _powers_of_two(most) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]
