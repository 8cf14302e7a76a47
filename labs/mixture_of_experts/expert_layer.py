"""Exercise 9.2: route, dispatch and combine of an expert layer."""

from collections.abc import Callable

import torch

from labs.checks.generator import new_generator
from labs.checks.verdicts import check
from labs.mixture_of_experts.layer_trial import Case, Trial

# k = 2 first, where most mistakes differ from each other: with k = 1 each weight is 1.
_CASES = (Case(20, 8, 2), Case(20, 8, 3, unused=4, dtype=torch.float64), Case(12, 5, 1, 1),
          Case(7, 4, 4, shared=True), Case(0, 4, 2), Case(40, 16, 4, dtype=torch.bfloat16))


@check("9.2")
def check_expert_layer(route: Callable, dispatch: Callable, combine: Callable):
    """route(logits, k) -> (weights, chosen); dispatch(tokens, chosen, experts) -> (copies, counts,
    order); combine(outputs, order, weights) -> the layer's output for each token."""
    # Other numbers in each run, so that no table of answers fits.
    generator = torch.Generator().manual_seed(new_generator().randrange(2 ** 32))
    trials = [Trial(case, generator) for case in _CASES]
    for trial in trials:
        trial.judge(route, dispatch, combine)
    # In bfloat16 the order of a sum decides the last of its two digits: outputs are not compared.
    for trial in trials:
        if trial.case.dtype != torch.bfloat16:
            trial.judge_layer(route, dispatch, combine)
    return ("a layer of your three functions gives the outputs and all gradients of the loop over "
            "experts, with k from 1 to all experts, with experts that get no token, and without "
            "any token; weights of bf16 logits are computed in fp32")
