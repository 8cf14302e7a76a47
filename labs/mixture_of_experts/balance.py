"""Exercise 9.6: experts balanced by an auxiliary loss, and by a bias without a gradient."""

from collections.abc import Callable

import torch

from labs.checks.generator import new_generator
from labs.checks.inputs import UnchangedInputs, require_dense, require_dtype
from labs.checks.numbers import (
    Mistake,
    as_number,
    common_cause,
    judge_number,
    require_number,
    require_several,
    require_signature,
)
from labs.checks.tolerances import BFLOAT16, SUMS
from labs.checks.verdicts import Wrong, check, kind_of
from labs.mixture_of_experts import balance_rules
from labs.mixture_of_experts.balance_rules import (
    BIAS_RULES,
    LOSS_RULES,
    ROUTE_RULES,
    BiasCase,
    LossCase,
    RouteCase,
    dense,
)
from labs.mixture_of_experts.other_rules import rule_of

_RETURNED = "weights", "chosen"


@check("9.6")
def check_balance(auxiliary_loss: Callable, route_with_bias: Callable, new_bias: Callable):
    """The three functions for random logits, choices, biases and counts: values and gradients."""
    require_signature(auxiliary_loss, ("logits", "chosen"))
    require_signature(route_with_bias, ("logits", "bias", "k"))
    require_signature(new_bias, ("bias", "counts", "speed"))
    rng = new_generator()
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    _judge_loss(auxiliary_loss, loss_cases(rng, generator))
    _judge_route(route_with_bias, route_cases(rng, generator))
    _judge_new_bias(new_bias, bias_cases(rng, generator))
    return ("loss, weights and their gradients, and the biases, for k = 1, 2 and all experts; an "
            "expert without a copy, and logits in bf16, are among them")


def _judge_loss(auxiliary_loss, cases):
    leaves = [case.logits.clone().requires_grad_() for case in cases]
    kept = UnchangedInputs("auxiliary_loss", logits=[case.logits for case in cases],
                           chosen=[case.chosen for case in cases])
    losses = [auxiliary_loss(leaf, case.chosen)
              for leaf, case in zip(leaves, cases, strict=True)]
    kept.judge()
    _judge_leaves("auxiliary_loss", cases, leaves)
    for case, loss in zip(cases, losses, strict=True):
        require_number(loss.detach() if isinstance(loss, torch.Tensor) else loss,
                       f"auxiliary_loss, {case.name}", "Return E · Σ f · P, a scalar tensor.")
    # An answer in bf16 is rounded too much to tell rules apart: it explains nothing.
    numbers = [None if case.logits.dtype == torch.bfloat16 else as_number(loss.detach())
               if isinstance(loss, torch.Tensor) else as_number(loss)
               for case, loss in zip(cases, losses, strict=True)]
    mistakes = [Mistake(rule.code, lambda case, rule=rule: rule.result(case).item(),
                        rule.sentence, rule.hint) for rule in LOSS_RULES]
    for at, (case, loss) in enumerate(zip(cases, losses, strict=True)):
        # Invariant: E · Σ f · P, with f and P that each add up to 1.
        judge_number(loss.detach() if isinstance(loss, torch.Tensor) else loss,
                     balance_rules.auxiliary_loss(case.logits, case.chosen).item(),
                     common_cause(mistakes, cases, numbers, at, rel_tol=SUMS),
                     f"auxiliary_loss, {case.name}",
                     hint="E · Σ f · P: f from `chosen`, P from softmax of the logits, in fp32.",
                     rel_tol=BFLOAT16 if getattr(loss, "dtype", None) == torch.bfloat16 else SUMS)
    for case, leaf, loss in zip(cases, leaves, losses, strict=True):
        _judge_loss_gradient(case, leaf, loss)


def _judge_loss_gradient(case, leaf, loss):
    gradient = _gradient(loss, leaf)
    if gradient is None:
        raise Wrong(f"auxiliary_loss, {case.name}: the logits get no gradient from it",
                    "P needs one: no detach, no .item(), no torch.no_grad(). f has none by "
                    "itself.", code="no_gradient")
    twin = case.logits.clone().requires_grad_()
    want = _gradient(balance_rules.auxiliary_loss(twin, case.chosen), twin)
    # Invariant: the gradient is that of P alone. Catches counts with a straight-through gradient.
    # Where all experts are chosen it is zero, of terms as large as 1 / tokens that cancel.
    if not _close(gradient, want, 1 / len(case.logits)):
        raise Wrong(f"auxiliary_loss, {case.name}: the value is right, the gradient is not",
                    "Only P has a gradient: f is a number for each expert.",
                    code="wrong_gradient")


def _gradient(result, leaf) -> torch.Tensor | None:
    """Of the logits; None where there is none."""
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        return None
    return torch.autograd.grad(result, leaf, allow_unused=True)[0]


def _close(got, want, terms: float = 0.0) -> bool:
    """Whether they differ by rounding, beside the largest element. terms: the size of what is
    added up in it, where its sum may be smaller."""
    tolerance = BFLOAT16 if want.dtype == torch.bfloat16 else SUMS
    most = max(want.abs().max().item(), terms)
    return torch.allclose(got.float(), want.float(), rtol=0, atol=tolerance * most + 1e-12)


def _judge_leaves(function, cases, leaves):
    """leaves: the logits that the function was given, which have a gradient."""
    for case, leaf in zip(cases, leaves, strict=True):
        # Invariant: nothing is written, and nothing is left in .grad. A backward() in the function
        # would add its gradient to that of the caller's own backward.
        if not torch.equal(leaf, case.logits):
            raise Wrong(f"{function} changed its input `logits`: the caller continues using it",
                        "Work on a copy: what writes in place ends in `_`.", code="changes_input")
        if leaf.grad is not None:
            raise Wrong(f"{function} called backward: the logits have a gradient already",
                        "Return the tensor: backward is called once, by the training loop.",
                        code="calls_backward")


def _judge_route(route_with_bias, cases):
    leaves = [case.logits.clone().requires_grad_() for case in cases]
    kept = UnchangedInputs("route_with_bias", logits=[case.logits for case in cases],
                           bias=[case.bias for case in cases])
    found = [_require_routing(route_with_bias(leaf, case.bias, case.k), case)
             for leaf, case in zip(leaves, cases, strict=True)]
    kept.judge()
    _judge_leaves("route_with_bias", cases, leaves)
    if any(case.bias.requires_grad for case in cases):
        raise Wrong("route_with_bias made `bias` require a gradient", "The bias gets no gradient: "
                    "`new_bias` changes it, not the optimizer.", code="bias_gets_gradient")
    answers = [dense(weights.detach(), chosen, case.logits.shape[1])
               for (weights, chosen), case in zip(found, cases, strict=True)]
    right = [_right_weights(case) for case in cases]
    for case, answer, want, (weights, _) in zip(cases, answers, right, found, strict=True):
        what = f"route_with_bias, {case.name}"
        tolerance = BFLOAT16 if case.logits.dtype == torch.bfloat16 else SUMS
        if not (_chosen_alike(answer, want) and _weights_alike(answer, want, tolerance)):
            if rule := rule_of(ROUTE_RULES, cases, answers, _weights_alike):
                raise rule.wrong(what)
            # Invariant: first the choice, then the weights: who chooses others has other weights.
            if not _chosen_alike(answer, want):
                raise Wrong(f"{what}: other experts are chosen",
                            "The k largest of the probabilities plus the bias.",
                            code="wrong_choice")
            raise Wrong(f"{what}: the right experts, with wrong weights",
                        "The probabilities of the chosen experts, divided by their sum.",
                        code="wrong_weights")
        require_dtype(weights, case.logits, f"{what}: weights")
    for case, leaf, (weights, chosen) in zip(cases, leaves, found, strict=True):
        _judge_route_gradient(case, leaf, weights, chosen)


def _judge_route_gradient(case, leaf, weights, chosen):
    if case.k == 1:
        return  # the weight is p / p = 1: there is nothing to learn from it
    # A sum of the weights would be k, whatever the logits: each gets another factor.
    factors = torch.linspace(1, 2, case.logits.shape[1])
    got = _gradient((dense(weights, chosen, len(factors)) * factors).sum(), leaf)
    if got is None:
        raise Wrong(f"route_with_bias, {case.name}: the logits get no gradient from the weights",
                    "The router learns through the weights: do not detach them.",
                    code="weights_detached")
    twin = case.logits.clone().requires_grad_()
    routed = balance_rules.route_with_bias(twin, case.bias, case.k)
    want = _gradient((dense(*routed, len(factors)) * factors).sum(), twin)
    if not _close(got, want):
        raise Wrong(f"route_with_bias, {case.name}: the weights are right, their gradient is not",
                    "It goes through the probabilities and through their sum.",
                    code="wrong_gradient")


def _right_weights(case) -> torch.Tensor:
    return dense(*balance_rules.route_with_bias(case.logits, case.bias, case.k),
                 case.logits.shape[1])


def _chosen_alike(got, want) -> bool:
    """Which experts, of dense weights; in any order."""
    return torch.equal(got != 0, want != 0)


def _weights_alike(got, want, tolerance=BFLOAT16) -> bool:
    return torch.allclose(got, want, rtol=tolerance, atol=tolerance)


def _require_routing(returned, case) -> tuple[torch.Tensor, torch.Tensor]:
    what = f"route_with_bias, {case.name}"
    weights, chosen = require_several(returned, _RETURNED, f"{what}: it returned")
    shape = (len(case.logits), case.k)
    for name, tensor in zip(_RETURNED, (weights, chosen), strict=True):
        if not isinstance(tensor, torch.Tensor) or tensor.shape != shape:
            raise Wrong(f"{what}: `{name}` is {kind_of(tensor)}, not a tensor of shape (tokens, k)",
                        "Return what `route` returns.", code="wrong_shape")
        require_dense(tensor, f"{what}: `{name}`")
    if chosen.dtype != torch.int64:
        raise Wrong(f"{what}: `chosen` is {chosen.dtype}, not numbers of experts",
                    "topk returns values and indices, in this order.", code="wrong_dtype")
    ordered = chosen.sort(1).values
    if not 0 <= int(chosen.min()) <= int(chosen.max()) < case.logits.shape[1]:
        raise Wrong(f"{what}: `chosen` has a number that is no expert's",
                    "Experts have the numbers 0 to E - 1.", code="wrong_choice")
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise Wrong(f"{what}: a token's experts are not k different ones",
                    "topk over the last dimension chooses different experts.",
                    code="wrong_choice")
    return weights, chosen


def _judge_new_bias(new_bias, cases):
    kept = UnchangedInputs("new_bias", bias=[case.bias for case in cases],
                           counts=[case.counts for case in cases])
    answers = [new_bias(case.bias, case.counts, case.speed) for case in cases]
    kept.judge()
    for case, answer in zip(cases, answers, strict=True):
        what = f"new_bias, {case.name}"
        if not isinstance(answer, torch.Tensor) or answer.shape != case.bias.shape:
            raise Wrong(f"{what}: it returned {kind_of(answer)}, not a tensor of the shape of "
                        "`bias`", "Return the bias of the next step.", code="wrong_shape")
        require_dense(answer, what)
    for case, answer in zip(cases, answers, strict=True):
        what = f"new_bias, {case.name}"
        if not _bias_alike(answer, balance_rules.new_bias(*_arguments(case))):
            if rule := rule_of(BIAS_RULES, cases, answers, _bias_alike):
                raise rule.wrong(what)
            raise Wrong(f"{what}: it is not the old bias, with `speed` added where a count is "
                        "below the mean and subtracted where it is above",
                        "torch.sign of what is missing is 1, -1 or 0.", code="wrong_bias")
        require_dtype(answer, case.bias, what)
        if answer.requires_grad:
            raise Wrong(f"{what}: it requires a gradient", "The bias gets none: the optimizer must "
                        "not change it.", code="bias_gets_gradient")
        # Invariant: another tensor. One that shares memory changes with the next in-place update.
        if answer.untyped_storage().data_ptr() == case.bias.untyped_storage().data_ptr():
            raise Wrong(f"{what}: it returned the old tensor", "bias + change is a new one.",
                        code="same_tensor")


def _arguments(case) -> tuple:
    return case.bias, case.counts, case.speed


def _bias_alike(got, want) -> bool:
    return got.shape == want.shape and torch.allclose(got.float(), want.float(), rtol=0, atol=SUMS)


def loss_cases(rng, generator) -> list[LossCase]:
    """Logits that prefer some experts; the choice is a router's with a bias, so topk of the logits
    is another one."""
    cases = []
    for k, name in ((1, "k = 1"), (2, "k = 2"), (3, "k = 3"), (None, "k = all experts")):
        experts, tokens = rng.randint(5, 9), rng.randint(20, 60)
        logits = torch.randn(tokens, experts, generator=generator)
        bias = torch.randn(experts, generator=generator)
        cases.append(LossCase(name, logits, (logits + bias).topk(k or experts).indices))
    logits = torch.randn(rng.randint(20, 60), 6, generator=generator)
    # the last expert gets no copy: bincount without minlength is too short
    unused = logits[:, :5].topk(2).indices
    return [*cases, LossCase("an expert without a copy", logits, unused),
            LossCase("bf16", logits.bfloat16(), unused)]


def route_cases(rng, generator) -> list[RouteCase]:
    """Biases that change the choice of most tokens; in one case of none."""
    cases = []
    for k, name in ((1, "k = 1"), (2, "k = 2"), (3, "k = 3"), (2, "bf16")):
        experts, tokens = rng.randint(6, 9), rng.randint(30, 60)
        logits = torch.randn(tokens, experts, generator=generator)
        bias = 0.3 * torch.randn(experts, generator=generator)
        if name == "bf16":
            logits = logits.bfloat16()
        cases.append(RouteCase(name, logits[_is_clear(logits, bias, k)], bias, k))
    logits = torch.randn(rng.randint(20, 40), 5, generator=generator)
    far = torch.tensor([0.0, -9.0, 0.1, 9.0, 0.0])
    return [*cases, RouteCase("k = all experts", logits, 0.3 * torch.randn(
        5, generator=generator), 5), RouteCase("a bias of zeros", logits, torch.zeros(5), 2),
        RouteCase("one expert never, one always", logits, far, 2)]


def _is_clear(logits, bias, k) -> torch.Tensor:
    """bool (tokens,): whether rounding cannot change which k experts are chosen, and no two logits
    are equal, which is common in bf16."""
    scores = (logits.softmax(-1, dtype=torch.float32) + bias).topk(k + 1).values
    return ((scores[:, k - 1] - scores[:, k] > 1e-4)
            & (logits.sort(1).values.diff(dim=1) > 0).all(1))


def bias_cases(rng, generator) -> list[BiasCase]:
    """Counts below, above and exactly at the mean. No change can be mistaken for another: `speed`
    is far above rounding."""
    speed = rng.uniform(0.05, 0.2)
    mean = rng.randint(20, 40)
    counts = torch.tensor([rng.randint(1, 60) for _ in range(7)] + [61])
    at_mean = torch.tensor([0, mean, 2 * mean + 3, mean, mean - 3, mean])
    # a mean that is no whole number, and a median on the other side of it than a count
    uneven = torch.tensor([mean, mean, mean + 1, 0, 9 * mean, mean + 1, 0, 3 * mean])
    cases = [("random counts", counts), ("counts equal to the mean", at_mean),
             ("experts without a copy", uneven),
             ("a mean between two counts", torch.tensor([mean, mean, mean + 1])),
             ("equal counts", torch.full((5,), mean))]
    return [BiasCase(name, torch.randn(len(counts), generator=generator), counts, speed)
            for name, counts in cases]
