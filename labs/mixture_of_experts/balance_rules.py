"""The right rules of exercise 9.6, and those that wrong answers follow in their place."""

from dataclasses import dataclass

import torch

from labs.mixture_of_experts.other_rules import OtherRule


@dataclass(frozen=True)
class LossCase:
    """logits (tokens, experts); chosen (tokens, k), which a router with a bias may have chosen."""

    name: str
    logits: torch.Tensor
    chosen: torch.Tensor


@dataclass(frozen=True)
class RouteCase:
    """logits (tokens, experts), bias (experts,)."""

    name: str
    logits: torch.Tensor
    bias: torch.Tensor
    k: int


@dataclass(frozen=True)
class BiasCase:
    """bias, counts (experts,)."""

    name: str
    bias: torch.Tensor
    counts: torch.Tensor
    speed: float


def auxiliary_loss(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """E · Σ f · P of Switch Transformer, section 2.2, equations 4 to 6, with f the share of all
    copies. Hugging Face's load_balancing_loss_func counts k shares for each token: k times this."""
    shares = chosen.flatten().bincount(minlength=logits.shape[1]) / chosen.numel()
    return logits.shape[1] * (shares * _probabilities(logits).mean(0)).sum()


def route_with_bias(logits: torch.Tensor, bias: torch.Tensor, k: int
                    ) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, chosen), (tokens, k) each, as in DeepSeek-V3, section 2.1.2, equations 13 to 16,
    with softmax in place of its sigmoid."""
    probabilities = _probabilities(logits)
    chosen = (probabilities + bias).topk(k).indices
    weights = probabilities.gather(1, chosen)
    return (weights / weights.sum(1, keepdim=True)).to(logits.dtype), chosen


def new_bias(bias: torch.Tensor, counts: torch.Tensor, speed: float) -> torch.Tensor:
    """DeepSeek-V3, section 2.1.2: the bias update, with `speed` for its γ."""
    return bias + speed * torch.sign(counts.float().mean() - counts.float())


def dense(weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """(tokens, experts): the weight of each expert, 0 where it was not chosen, in fp32."""
    # not in place: it has the weights' gradient
    empty = torch.zeros(len(weights), experts, device=weights.device)
    return empty.scatter(1, chosen, weights.float())


def _probabilities(logits, dim=-1) -> torch.Tensor:
    return logits.softmax(dim, dtype=torch.float32)


def _shares(case, chosen=None) -> torch.Tensor:
    chosen = case.chosen if chosen is None else chosen
    return chosen.flatten().bincount(minlength=case.logits.shape[1]) / chosen.numel()


def _loss(shares=_shares, mean=lambda case: _probabilities(case.logits).mean(0),
          times=lambda case: case.logits.shape[1]):
    """E · Σ f · P with one of its three parts replaced."""
    return lambda case: times(case) * (shares(case) * mean(case)).sum()


def _only_chosen(case) -> torch.Tensor:
    """The probabilities of the chosen experts, 0 elsewhere."""
    probabilities = _probabilities(case.logits)
    return dense(probabilities.gather(1, case.chosen), case.chosen, case.logits.shape[1])


def _variation(case) -> torch.Tensor:
    importance = _probabilities(case.logits).sum(0)
    return importance.var(unbiased=False) / importance.mean() ** 2


_F = "f is a share of counts: bincount of `chosen`, divided by the number of copies."
_P = "P is the mean over the tokens of softmax's probabilities, of all experts."
LOSS_RULES = [
    OtherRule("f_from_probabilities", _loss(lambda case: _probabilities(case.logits).mean(0)),
              "f is computed from the probabilities, not from the choice", _F),
    OtherRule("squared_shares", _loss(mean=_shares),
              "it is the sum of squared shares, which has no gradient", _P),
    OtherRule("not_times_experts", _loss(times=lambda case: 1), "the factor E is missing",
              "With it, equal shares give 1."),
    OtherRule("experts_in_use", _loss(times=lambda case: int((_shares(case) > 0).sum())),
              "E counts only the experts that got a copy", "E is the number of all experts."),
    OtherRule("largest_only", lambda case: case.logits.shape[1] * (
        _shares(case) * _probabilities(case.logits).mean(0)).max(),
        "it is the largest term, not the sum", "Add up over the experts."),
    OtherRule("shares_of_tokens", _loss(times=lambda case: (
        case.logits.shape[1] * case.chosen.shape[1])),
        "f is a share of the tokens: it adds up to k, as in Hugging Face's "
        "load_balancing_loss_func", "f adds up to 1 here: a share of all copies."),
    OtherRule("counts_not_shares", _loss(times=lambda case: (
        case.logits.shape[1] * case.chosen.numel())), "f are counts, not shares", _F),
    OtherRule("sum_not_mean", _loss(times=lambda case: case.logits.numel()),
              "P is a sum over the tokens, not a mean", _P),
    OtherRule("chosen_probabilities_only", _loss(mean=lambda case: _only_chosen(case).mean(0)),
              "P has the probabilities of chosen experts only", _P),
    OtherRule("weights_not_probabilities", _loss(mean=lambda case: torch.nn.functional.normalize(
        _only_chosen(case), p=1, dim=1).mean(0)),
        "P is made of the weights of the chosen experts", _P),
    OtherRule("first_choice_only", _loss(lambda case: _shares(case, case.chosen[:, 0])),
              "f counts the first choices only", "Each of the k choices is a copy."),
    OtherRule("chosen_ignored", _loss(lambda case: _shares(case, case.logits.topk(
        case.chosen.shape[1]).indices)), "`chosen` is not used: the experts are chosen again",
        "A router with a bias chooses others: count `chosen`."),
    OtherRule("softmax_over_tokens", _loss(mean=lambda case: _probabilities(case.logits, 0).mean(
        0)), "softmax runs over the tokens", "Each token's probabilities add up to 1: dim=-1."),
    OtherRule("logits_not_probabilities", _loss(mean=lambda case: case.logits.float().mean(0)),
              "P is made of logits", _P),
    OtherRule("variation", _variation,
              "it is the squared coefficient of variation of Shazeer et al., 2017",
              "The formula here is E · Σ f · P."),
    OtherRule("z_loss", lambda case: case.logits.float().logsumexp(1).square().mean(),
              "it is the z-loss, which keeps logits small", "The formula here is E · Σ f · P.")]


def _routed(choose, weigh=lambda case: _probabilities(case.logits), normalised=True):
    """The dense weights of a router. choose: what topk sees; weigh: what the weights are of."""
    def result(case):
        chosen = choose(case).topk(case.k).indices
        weights = weigh(case).gather(1, chosen)
        return dense(weights / weights.sum(1, keepdim=True) if normalised else weights, chosen,
                     case.logits.shape[1])
    return result


def _biased(case) -> torch.Tensor:
    return _probabilities(case.logits) + case.bias


def _sigmoid(case) -> torch.Tensor:
    return case.logits.float().sigmoid()


def _biased_logits(case) -> torch.Tensor:
    return case.logits + case.bias


_CHOICE = "topk sees the probabilities plus the bias, and nothing else does."
ROUTE_RULES = [
    OtherRule("bias_after_topk", _routed(lambda case: _probabilities(case.logits), _biased),
              "the bias changes the weights and not the choice: it should be the other way round",
              _CHOICE),
    OtherRule("bias_ignored", _routed(lambda case: case.logits),
              "the bias does not change the choice", _CHOICE),
    OtherRule("bias_in_weights", _routed(_biased, _biased), "the bias is in the weights", _CHOICE),
    OtherRule("bias_on_logits", _routed(_biased_logits),
              "the bias is added to the logits, which chooses other experts",
              "Add it to the probabilities, as the papers add it to the affinities."),
    OtherRule("bias_on_logits", _routed(_biased_logits, lambda case: _probabilities(
        _biased_logits(case))), "the bias is added to the logits, and is in the weights too",
        _CHOICE),
    OtherRule("sigmoid", _routed(lambda case: _sigmoid(case) + case.bias, _sigmoid),
              "these are DeepSeek-V3's own affinities, a sigmoid of each logit",
              "Here the affinities are softmax's probabilities, as in `route`."),
    OtherRule("sigmoid", _routed(_biased, _sigmoid), "the weights are sigmoids of the logits",
              "Here they are softmax's probabilities, as in `route`."),
    OtherRule("bias_subtracted", _routed(lambda case: _probabilities(case.logits) - case.bias),
              "the bias is subtracted", _CHOICE),
    OtherRule("bias_multiplied", _routed(lambda case: _probabilities(case.logits) * (
        1 + case.bias)), "the probabilities are multiplied by the bias, not added to it", _CHOICE),
    OtherRule("not_normalised", _routed(_biased, normalised=False),
              "the weights do not add up to 1", "Divide by the sum of the k weights."),
    OtherRule("equal_weights", _routed(_biased, lambda case: torch.ones_like(case.logits).float()),
              "all k weights are equal", "They are the probabilities, divided by their sum.")]


def _moved(signs, keep=True):
    return lambda case: (case.bias if keep else 0) + case.speed * signs(case)


def _missing(case, mean=None) -> torch.Tensor:
    """How many copies each expert has too few."""
    counts = case.counts.float()
    return (counts.mean() if mean is None else mean) - counts


def _signs(case) -> torch.Tensor:
    return _missing(case).sign()


def _with_equal(sign):
    """Moves experts that have exactly the mean, too."""
    return _moved(lambda case: torch.where(_missing(case) == 0, sign, _signs(case)))


_RULE = "Too few copies: plus `speed`. Too many: minus `speed`. Exactly the mean: as it was."
BIAS_RULES = [
    OtherRule("unchanged", lambda case: case.bias, "the bias is not changed", _RULE),
    OtherRule("sign_flipped", _moved(lambda case: -_signs(case)),
              "the sign is wrong: experts with many copies get even more", _RULE),
    OtherRule("proportional", _moved(_missing),
              "the change is proportional to what is missing", "Take the sign alone: `speed` is "
              "the size of every change."),
    OtherRule("proportional", _moved(lambda case: _missing(case) / case.counts.float().mean()),
              "the change is proportional to the share that is missing", "Take the sign alone: "
              "`speed` is the size of every change."),
    OtherRule("old_bias_lost", _moved(_signs, keep=False), "the old bias is not in it",
              "Add the change to the old bias."),
    OtherRule("mean_of_used_experts", _moved(lambda case: _missing(
        case, case.counts[case.counts > 0].float().mean()).sign()),
        "the mean is that of the experts that got a copy", "Experts without a copy count too."),
    OtherRule("zero_counts_left", _moved(lambda case: _signs(case) * (case.counts > 0)),
              "an expert without a copy keeps its bias", "It has fewer than the mean."),
    OtherRule("mean_rounded", _moved(lambda case: _missing(
        case, case.counts.sum() // len(case.counts)).sign()),
        "the mean is rounded to a whole number", "Convert the counts to float first."),
    OtherRule("median", _moved(lambda case: _missing(case, case.counts.float().median()).sign()),
              "counts are compared with the median", "Compare them with the mean."),
    OtherRule("changes_equal_counts", _with_equal(1.0),
              "an expert that has exactly the mean is changed", _RULE),
    OtherRule("changes_equal_counts", _with_equal(-1.0),
              "an expert that has exactly the mean is changed", _RULE),
    OtherRule("one_direction", _moved(lambda case: _signs(case).clamp(min=0)),
              "biases grow and never shrink", _RULE),
    OtherRule("one_direction", _moved(lambda case: _signs(case).clamp(max=0)),
              "biases shrink and never grow", _RULE),
    OtherRule("speed_missing", lambda case: case.bias + _signs(case), "`speed` is not used",
              _RULE),
    OtherRule("centred", lambda case: case.bias + case.speed * (_signs(case) - _signs(case).mean()),
              "the mean of all changes is taken off, as in torchtitan: that changes no choice, but "
              "it is not the rule of the paper", _RULE)]
