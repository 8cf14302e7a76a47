"""Known ways to get a step of data-parallel training wrong, which several exercises tell apart.

Each is a `TrainingMistake` with a hint that fits everywhere; an exercise that can say more takes
`MISTAKE.with_hint("...")`, and adds its own. The first in an exercise's list that explains every
wrong number names the mistake."""

from collections.abc import Callable

import torch.distributed as dist

from labs.checks.explanations import TrainingMistake


def scaled(scale: Callable[[int], float]) -> Callable:
    """`TrainingMistake.gives` for a step whose mean gradient is multiplied by scale(N)."""
    return lambda reference: [reference.otherwise(scale=scale(dist.get_world_size()))]


def scaled_if_accumulated(scale: Callable[[int], float]) -> Callable:
    """`TrainingMistake.gives` for a step whose gradient, accumulated from several backward passes,
    is multiplied by scale(passes); of a step of one pass it explains nothing."""
    return lambda reference: ([reference.otherwise(scale=scale(reference.parts))]
                              if reference.parts > 1 else [])


def setting_missing(code: str, what: str, **settings) -> TrainingMistake:
    """An optimizer that was made without one of the settings given; settings: what it has then."""
    return TrainingMistake(code, f"updated without {what}",
                           "Pass all settings (**settings) to the optimizer that updates the "
                           "shard.", lambda reference: [reference.otherwise(**settings)])


NOT_UPDATED = TrainingMistake(
    "not_updated", "not changed by the step", "Does the optimizer have it, and its gradient?",
    lambda reference: [reference.unchanged()])
NOT_ACCUMULATED = TrainingMistake(
    "not_accumulated", "updated with the gradient of one of {parts} backward passes",
    "A new gradient is added to the one that is there.",
    scaled_if_accumulated(lambda parts: 1 / parts))
REDUCED_TWICE = TrainingMistake(
    "reduced_twice",
    "updated with gradients that had been reduced before, in an earlier backward pass",
    "Once they are reduced, free them: set the parameters' .grad to None. A hook that returns None "
    "frees nothing.",
    # of k equal passes the first is then reduced k times, the last once
    scaled_if_accumulated(lambda parts: (parts + 1) / 2))
GRADIENT_OF_ONE_RANK = TrainingMistake(
    "gradient_of_one_rank", "updated with the gradient of one rank alone",
    "Reduce the gradients over the ranks first, in every step and for every parameter.",
    # one set for each rank: where every element comes from some rank, the ranks differ by element
    lambda reference: [reference.otherwise(own) for own in reference.alone])
SUM_NOT_MEAN = TrainingMistake(
    "sum_not_mean", "updated with the SUM of the gradients over the ranks, not the mean",
    "Divide by the world size.", scaled(lambda ranks: ranks))
MEAN_TWICE = TrainingMistake(
    "mean_twice", "updated with the mean divided by the world size once more",
    "Divide once.", scaled(lambda ranks: 1 / ranks))
NEW_OPTIMIZER_STATE = TrainingMistake(
    "new_optimizer_state",
    "updated as if by a new optimizer: the state of the earlier steps is lost",
    "Make the optimizer once.", lambda reference: [reference.otherwise(new_optimizer=True)])
GRADIENTS_NOT_CLEARED = TrainingMistake(
    "gradients_not_cleared", "updated with the gradients of all steps so far",
    "zero_grad must forget the parameters' gradients, not only those of the shards.",
    lambda reference: [reference.otherwise(reference.accumulated())])
ZERO_GRADIENT = TrainingMistake(
    "zero_gradient", "updated with a gradient of zero",
    "Where did the gradient go before the update?", scaled(lambda ranks: 0))
WEIGHT_DECAY_MISSING = setting_missing("weight_decay_missing", "weight decay", weight_decay=0.0)
MOMENTUM_MISSING = setting_missing("momentum_missing", "momentum", momentum=0.0)
