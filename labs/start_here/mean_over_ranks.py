"""Exercise 0.1: the mean over ranks, and the picture of it."""

from collections.abc import Callable

import torch

from labs.checks.guesses import guessed
from labs.checks.verdicts import Wrong, check, shows
from labs.pictures.bars import numbers_before_and_after
from labs.pictures.picture import Picture
from labs.start_here import recorded_collectives
from labs.start_here.recorded_collectives import RETURNS_NONE, first_number, try_on_ranks
from labs.start_here.return_values import require_tensor, require_world_size

TO_ALL = "Every rank must get the result: which collective gives it to all?"


@check("0.1", hints=RETURNS_NONE)
def check_mean_over_ranks(mean_over_ranks: Callable):
    """Every rank must hold the mean of all ranks' tensors, and still hold its own tensor."""
    for tried in try_on_ranks(mean_over_ranks, recorded_collectives.tensors_to_average):
        ranks, mean = len(tried), sum(one.own for one in tried) / len(tried)
        # Every rank holds the mean, in its own tensor's shape and dtype: catches a sum, a divisor
        # that is right on one world size only, and a reduce to rank 0.
        for rank, one in enumerate(tried):
            _require_like(rank, ranks, one.result, one.own)
            if not torch.allclose(one.result, mean):
                raise _not_the_mean(rank, ranks, tried)
        # The argument is unchanged: catches all_reduce on `mine` itself.
        for rank, one in enumerate(tried):
            if not torch.equal(one.own, one.after):
                raise Wrong(f"rank {rank} of {ranks}: `mine` was changed, and its owner still "
                            "needs it", "all_reduce writes into its argument: give it a clone.",
                            code="changes_input")
    return "on 2, 3 and 4 ranks, every rank holds the mean and kept its own tensor"


def _require_like(rank, ranks, result, own):
    where = f"rank {rank} of {ranks}"
    require_tensor(rank, ranks, result)
    if result.shape != own.shape:
        raise Wrong(f"{where} returned shape {list(result.shape)}, its tensor has "
                    f"{list(own.shape)}", "The mean is taken number by number, over ranks only.",
                    code="wrong_shape")
    if result.dtype != own.dtype:
        raise Wrong(f"{where} returned {result.dtype}, its tensor is {own.dtype}",
                    "Keep the type: divide with `/`, and convert nothing.", code="wrong_dtype")


def _not_the_mean(rank, ranks, tried) -> Wrong:
    results, total = [one.result for one in tried], sum(one.own for one in tried)
    result, own = results[rank], tried[rank].own
    where = f"rank {rank} of {ranks}"
    right = [r for r, other in enumerate(results) if torch.allclose(other, total / ranks)]
    # What it held before, divided or not: a collective that had not written yet.
    if tried[rank].is_async and any(torch.allclose(result, own / n) for n in (1, ranks)):
        return Wrong(f"{where}: nothing from the other ranks was there yet when the tensor was "
                     "used", recorded_collectives.NOT_WAITED, code="waits_too_late")
    if torch.equal(result, own):
        return Wrong(f"{where} returned its own tensor: nothing from the other ranks is in it"
                     + (f" (rank {right[0]} does hold the mean)" if right else ""), TO_ALL,
                     code="result_on_one_rank" if right else "not_summed")
    if torch.allclose(result, total):
        return Wrong(f"{where} holds the SUM over ranks, {ranks}x the mean",
                     "Divide by the world size.", code="sum_not_mean")
    for divisor in (2, 3, 4, 8):
        if torch.allclose(result, total / divisor):
            return Wrong(f"{where} holds the sum divided by {divisor}, not by {ranks}",
                         "dist.get_world_size() knows how many ranks there are.",
                         code="wrong_divisor")
    if right:
        return Wrong(f"{where} does not hold the mean, though rank {right[0]} does", TO_ALL,
                     code="result_on_one_rank")
    return Wrong(f"{where} holds {first_number(result)}, the mean is {first_number(total / ranks)}",
                 "Sum over all ranks, then divide by how many there are.", code="wrong_output")


@shows("0.1")
def before_and_after(own_and_result: Callable, ranks: int, guess: str | None = None) -> Picture:
    """Runs a function that returns a rank's own number and a result, and draws both for each rank.
    guess: the exercise of the guess that is drawn beside them. Raises Wrong where a rank's own
    number is not (rank + 1)²."""
    require_world_size(ranks)
    pairs = recorded_collectives.run_answer(
        recorded_collectives.try_own_number, own_and_result, ranks=ranks)
    return numbers_before_and_after(*map(list, zip(*pairs, strict=True)),
                                    guessed(guess) if guess else None)
