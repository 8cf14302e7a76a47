"""Exercise 9.6, balance by a loss and by a bias: what its check rejects and accepts."""

import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits, named
from torch.nn import functional as F

import labs.mixture_of_experts as lab

solution = definitions("09_mixture_of_experts")
LOSS, ROUTE, BIAS = solution.auxiliary_loss, solution.route_with_bias, solution.new_bias


def softmax(logits):
    return logits.softmax(-1, dtype=torch.float32)


def shares(chosen, experts):
    return chosen.flatten().bincount(minlength=experts) / chosen.numel()


def loss_of(f, p, times=None):
    """E · Σ f · P with other parts."""
    def auxiliary_loss(logits, chosen):
        experts = logits.shape[1]
        return (experts if times is None else times) * (f(logits, chosen) * p(logits, chosen)).sum()
    return auxiliary_loss


def right_f(logits, chosen):
    return shares(chosen, logits.shape[1])


def right_p(logits, chosen):
    return softmax(logits).mean(0)


def mask(logits, chosen):
    return torch.zeros_like(logits).scatter(1, chosen, 1.0)


def straight_through(logits, chosen):
    p = right_p(logits, chosen)
    return right_f(logits, chosen) + p - p.detach()


class Loss:
    def nothing(logits, chosen):
        return None

    def zero(logits, chosen):
        return 0.0

    def one(logits, chosen):
        return torch.ones(())

    def of_each_token(logits, chosen):
        return logits.shape[1] * shares(chosen, logits.shape[1]) * softmax(logits)

    def as_a_number(logits, chosen):
        return LOSS(logits, chosen).item()

    def detached(logits, chosen):
        return LOSS(logits.detach(), chosen)

    def under_no_grad(logits, chosen):
        with torch.no_grad():
            return LOSS(logits, chosen)

    def counts_too_few(logits, chosen):
        f = chosen.flatten().bincount() / chosen.numel()
        return logits.shape[1] * (f * softmax(logits).mean(0)).sum()

    def largest_term(logits, chosen):
        return logits.shape[1] * (right_f(logits, chosen) * softmax(logits).mean(0)).max()

    def sorts_the_choice(logits, chosen):
        chosen.copy_(chosen.sort(1).values)
        if chosen.shape[1] > 1:
            chosen.copy_(chosen.flip(1))
        return LOSS(logits, chosen)

    def of_experts_in_use(logits, chosen):
        f = right_f(logits, chosen)
        return (f > 0).sum() * (f * softmax(logits).mean(0)).sum()

    def variation(logits, chosen):
        importance = softmax(logits).sum(0)
        return importance.var(unbiased=False) / importance.mean() ** 2

    def z_loss(logits, chosen):
        return logits.float().logsumexp(-1).square().mean()


    def softmax_in_bf16(logits, chosen):
        return logits.shape[1] * (right_f(logits, chosen) * logits.softmax(-1).mean(0)).sum()

    def calls_backward(logits, chosen):
        loss = LOSS(logits, chosen)
        loss.backward(retain_graph=True)
        return loss


WRONG_LOSS = named(
    nothing=(Loss.nothing, "not_a_number"),
    zero=(Loss.zero, "wrong_number"),
    one=(Loss.one, "wrong_number"),
    of_each_token=(Loss.of_each_token, "not_a_number"),
    as_a_number=(Loss.as_a_number, "no_gradient"),
    detached=(Loss.detached, "no_gradient"),
    under_no_grad=(Loss.under_no_grad, "no_gradient"),
    counts_too_few=(Loss.counts_too_few, "raised_RuntimeError"),
    largest_term=(Loss.largest_term, "largest_only"),
    sorts_the_choice=(Loss.sorts_the_choice, "changes_input"),
    of_experts_in_use=(Loss.of_experts_in_use, "experts_in_use"),
    variation=(Loss.variation, "variation"),
    z_loss=(Loss.z_loss, "z_loss"),
    softmax_in_bf16=(Loss.softmax_in_bf16, "wrong_number bf16"),
    calls_backward=(Loss.calls_backward, "calls_backward"),
    f_from_probabilities=(loss_of(right_p, right_p), "f_from_probabilities"),
    squared_shares=(loss_of(right_f, right_f), "squared_shares"),
    no_experts=(loss_of(right_f, right_p, 1), "not_times_experts"),
    shares_of_tokens=(loss_of(lambda logits, chosen: chosen.shape[1] * right_f(logits, chosen),
                              right_p), "shares_of_tokens"),
    counts=(loss_of(lambda logits, chosen: chosen.numel() * right_f(logits, chosen), right_p),
            "counts_not_shares"),
    sums=(loss_of(right_f, lambda logits, chosen: softmax(logits).sum(0)), "sum_not_mean"),
    chosen_only=(loss_of(right_f, lambda logits, chosen: (
        softmax(logits) * mask(logits, chosen)).mean(0)), "chosen_probabilities_only"),
    weights=(loss_of(right_f, lambda logits, chosen: logits.masked_fill(
        mask(logits, chosen) == 0, -torch.inf).softmax(-1).mean(0)), "weights_not_probabilities"),
    first_choice=(loss_of(lambda logits, chosen: shares(chosen[:, 0], logits.shape[1]), right_p),
                  "first_choice_only"),
    chooses_again=(loss_of(lambda logits, chosen: shares(
        logits.topk(chosen.shape[1]).indices, logits.shape[1]), right_p), "chosen_ignored"),
    over_tokens=(loss_of(right_f, lambda logits, chosen: logits.float().softmax(0).mean(0)),
                 "softmax_over_tokens"),
    of_logits=(loss_of(right_f, lambda logits, chosen: logits.float().mean(0)),
               "logits_not_probabilities"),
    straight_through=(loss_of(straight_through, right_p), "wrong_gradient"))


class RightLoss:
    def by_one_hot(logits, chosen):
        f = F.one_hot(chosen, logits.shape[-1]).float().mean((0, 1))
        return logits.shape[-1] * torch.dot(f, logits.float().softmax(-1).mean(0))

    def by_scatter(logits, chosen):
        counts = torch.zeros(logits.shape[1]).scatter_add(
            0, chosen.reshape(-1), torch.ones(chosen.numel()))
        return (logits.shape[1] * counts / counts.sum() * logits.float().softmax(1)).sum(
            ) / len(logits)

    def expert_by_expert(logits, chosen):
        p = F.softmax(logits.float(), dim=1)
        return sum(logits.shape[1] * (chosen == i).float().mean() * p[:, i].mean()
                   for i in range(logits.shape[1]))


    def by_gathering(logits, chosen):
        """Where all experts are chosen its gradient is another rounding of zero."""
        return logits.shape[1] * softmax(logits).mean(0)[chosen].mean()

    def in_double(logits, chosen):
        f = chosen.flatten().bincount(minlength=logits.shape[1]).double() / chosen.numel()
        return logits.shape[1] * torch.einsum("e,te->", f, logits.double().softmax(-1)) / len(
            logits)


def route_by(choose, weigh=softmax, normalised=True):
    def route_with_bias(logits, bias, k):
        chosen = choose(logits, bias).topk(k).indices
        weights = weigh(logits).gather(1, chosen)
        return (weights / weights.sum(1, keepdim=True) if normalised else weights).to(
            logits.dtype), chosen
    return route_with_bias


def plus_bias(logits, bias):
    return softmax(logits) + bias


class Route:
    def nothing(logits, bias, k):
        return None

    def only_weights(logits, bias, k):
        return ROUTE(logits, bias, k)[0]

    def swapped(logits, bias, k):
        return ROUTE(logits, bias, k)[::-1]

    def without_bias(logits, bias, k):
        return ROUTE(logits, torch.zeros_like(bias), k)

    def bias_in_weights(logits, bias, k):
        weights, chosen = (softmax(logits) + bias).topk(k)
        return (weights / weights.sum(1, keepdim=True)).to(logits.dtype), chosen

    def bias_after_topk(logits, bias, k):
        weights, chosen = softmax(logits).topk(k)
        weights = weights + bias[chosen]
        return (weights / weights.sum(1, keepdim=True)).to(logits.dtype), chosen

    def bias_in_softmax(logits, bias, k):
        weights, chosen = solution.route(logits + bias, k)
        return weights.to(logits.dtype), chosen

    def detached(logits, bias, k):
        weights, chosen = ROUTE(logits, bias, k)
        return weights.detach(), chosen

    def sum_detached(logits, bias, k):
        p = softmax(logits)
        chosen = (p + bias).topk(k).indices
        weights = p.gather(1, chosen)
        return (weights / weights.detach().sum(1, keepdim=True)).to(logits.dtype), chosen

    def stays_in_fp32(logits, bias, k):
        weights, chosen = ROUTE(logits.float(), bias, k)
        return weights, chosen

    def one_expert(logits, bias, k):
        weights, chosen = ROUTE(logits, bias, 1)
        return weights.expand(-1, k), chosen.expand(-1, k)

    def over_tokens(logits, bias, k):
        chosen = (softmax(logits) + bias).topk(k, dim=0).indices.t()
        return softmax(logits)[:k].t(), chosen

    def changes_the_bias(logits, bias, k):
        bias += softmax(logits).mean(0)
        return ROUTE(logits, bias, k)

    def threshold(logits, bias, k):
        weights, chosen = ROUTE(logits, bias, k)
        return torch.where(weights < 0.3, 0.3, weights), chosen


    def shifts_in_place(logits, bias, k):
        logits.data -= logits.data.amax(1, keepdim=True)  # softmax is the same
        return ROUTE(logits, bias, k)

    def trains_the_bias(logits, bias, k):
        bias.requires_grad_()
        return ROUTE(logits, bias, k)

    def sparse(logits, bias, k):
        weights, chosen = ROUTE(logits, bias, k)
        return weights.to_sparse(), chosen

    def counted_from_the_end(logits, bias, k):
        weights, chosen = ROUTE(logits, bias, k)
        return weights, chosen - logits.shape[1]


WRONG_ROUTE = named(
    nothing=(Route.nothing, "wrong_count"),
    only_weights=(Route.only_weights, "wrong_count"),
    swapped=(Route.swapped, "wrong_dtype"),
    without_bias=(Route.without_bias, "bias_ignored"),
    bias_in_weights=(Route.bias_in_weights, "bias_in_weights"),
    bias_after_topk=(Route.bias_after_topk, "bias_after_topk"),
    bias_in_softmax=(Route.bias_in_softmax, "bias_on_logits"),
    bias_on_logits=(route_by(lambda logits, bias: logits + bias), "bias_on_logits"),
    subtracted=(route_by(lambda logits, bias: softmax(logits) - bias), "bias_subtracted"),
    multiplied=(route_by(lambda logits, bias: softmax(logits) * (1 + bias)), "bias_multiplied"),
    deepseeks_own=(route_by(lambda logits, bias: logits.float().sigmoid() + bias,
                            lambda logits: logits.float().sigmoid()), "sigmoid"),
    sigmoid_weights=(route_by(plus_bias, lambda logits: logits.float().sigmoid()), "sigmoid"),
    not_normalised=(route_by(plus_bias, normalised=False), "not_normalised"),
    equal_weights=(route_by(plus_bias, lambda logits: torch.ones_like(logits)), "equal_weights"),
    detached=(Route.detached, "weights_detached"),
    sum_detached=(Route.sum_detached, "wrong_gradient"),
    stays_in_fp32=(Route.stays_in_fp32, "wrong_dtype"),
    one_expert=(Route.one_expert, "wrong_choice"),
    over_tokens=(Route.over_tokens, "wrong_shape"),
    changes_the_bias=(Route.changes_the_bias, "changes_input"),
    shifts_in_place=(Route.shifts_in_place, "changes_input logits"),
    trains_the_bias=(Route.trains_the_bias, "bias_gets_gradient"),
    sparse=(Route.sparse, "not_dense sparse"),
    counted_from_the_end=(Route.counted_from_the_end, "wrong_choice no expert's"),
    threshold=(Route.threshold, "wrong_weights"))


class RightRoute:
    def softmax_of_the_chosen(logits, bias, k):
        """p / Σp of the chosen is softmax of the chosen logits."""
        chosen = (logits.float().softmax(-1) + bias).argsort(-1, descending=True)[:, :k]
        return logits.gather(1, chosen).float().softmax(-1).to(logits.dtype), chosen

    def in_another_order(logits, bias, k):
        chosen = (softmax(logits) + bias).topk(k).indices.sort(1).values
        weights = softmax(logits).gather(1, chosen)
        return F.normalize(weights, p=1, dim=1).to(logits.dtype), chosen

    def bias_taken_off_again(logits, bias, k):
        scores, chosen = (softmax(logits) + bias).topk(k, sorted=False)
        weights = torch.take_along_dim(softmax(logits), chosen, 1)
        assert scores.shape == weights.shape
        return weights.div(weights.sum(1, keepdim=True)).type_as(logits), chosen


def bias_by(change):
    return lambda bias, counts, speed: bias + change(counts.float(), speed)


def signs(counts):
    return torch.sign(counts.mean() - counts)


class Bias:
    def nothing(bias, counts, speed):
        return None

    def the_same(bias, counts, speed):
        return bias

    def in_place(bias, counts, speed):
        bias += speed * signs(counts.float())
        return bias

    def of_one(bias, counts, speed):
        return BIAS(bias, counts, speed)[:1]

    def lost(bias, counts, speed):
        return speed * signs(counts.float())

    def proportional_to_shares(bias, counts, speed):
        return bias + speed * (1 - counts / counts.float().mean())

    def used_experts(bias, counts, speed):
        return bias + speed * torch.sign(counts[counts > 0].float().mean() - counts)

    def whole_mean(bias, counts, speed):
        return bias + speed * torch.sign(counts.sum() // len(counts) - counts)

    def fewer_or_more(bias, counts, speed):
        return torch.where(counts < counts.float().mean(), bias + speed, bias - speed)

    def more_or_fewer(bias, counts, speed):
        return torch.where(counts > counts.float().mean(), bias - speed, bias + speed)

    def extremes(bias, counts, speed):
        change = torch.zeros_like(bias)
        change[counts.argmax()], change[counts.argmin()] = -speed, speed
        return bias + change

    def in_double(bias, counts, speed):
        return BIAS(bias.double(), counts, speed)


    def a_parameter(bias, counts, speed):
        return torch.nn.Parameter(BIAS(bias, counts, speed))

    def clamped(bias, counts, speed):
        return BIAS(bias, counts, speed).clamp(-0.5, 0.5)


WRONG_BIAS = named(
    nothing=(Bias.nothing, "wrong_shape"),
    the_same=(Bias.the_same, "unchanged"),
    in_place=(Bias.in_place, "changes_input"),
    of_one=(Bias.of_one, "wrong_shape"),
    lost=(Bias.lost, "old_bias_lost"),
    sign_flipped=(bias_by(lambda counts, speed: -speed * signs(counts)), "sign_flipped"),
    proportional=(bias_by(lambda counts, speed: speed * (counts.mean() - counts)),
                  "proportional"),
    proportional_to_shares=(Bias.proportional_to_shares, "proportional"),
    used_experts=(Bias.used_experts, "mean_of_used_experts"),
    zero_counts=(bias_by(lambda counts, speed: speed * signs(counts) * (counts > 0)),
                 "zero_counts_left"),
    a_parameter=(Bias.a_parameter, "bias_gets_gradient"),
    clamped=(Bias.clamped, "wrong_bias"),
    nearest_mean=(bias_by(lambda counts, speed: speed * torch.sign(counts.mean().round() - counts)),
                  "mean_rounded|wrong_bias"),
    whole_mean=(Bias.whole_mean, "mean_rounded"),
    median=(bias_by(lambda counts, speed: speed * torch.sign(counts.median() - counts)),
            "median"),
    fewer_or_more=(Bias.fewer_or_more, "changes_equal_counts"),
    more_or_fewer=(Bias.more_or_fewer, "changes_equal_counts"),
    only_up=(bias_by(lambda counts, speed: speed * signs(counts).clamp(min=0)),
             "one_direction"),
    no_speed=(bias_by(lambda counts, speed: signs(counts)), "speed_missing"),
    torchtitans=(bias_by(lambda counts, speed: speed * (signs(counts) - signs(counts).mean())),
                 "centred"),
    extremes=(Bias.extremes, "wrong_bias"),
    in_double=(Bias.in_double, "wrong_dtype"))


class RightBias:
    def by_where(bias, counts, speed):
        mean = counts.float().mean()
        result = bias.clone()
        result[counts < mean] += speed
        result[counts > mean] -= speed
        return result

    def by_whole_numbers(bias, counts, speed):
        return bias - speed * (counts * len(counts) - counts.sum()).sign()

    @torch.no_grad()
    def expert_by_expert(bias, counts, speed):
        mean = sum(counts.tolist()) / len(counts)
        return torch.stack([b + speed * ((c < mean) - (c > mean))
                            for b, c in zip(bias, counts.tolist(), strict=True)])


@pytest.mark.parametrize("answer, expected", WRONG_LOSS)
def test_a_wrong_loss(answer, expected):
    assert_rejected(lab.check_balance(answer, ROUTE, BIAS), expected)


@pytest.mark.parametrize("answer, expected", WRONG_ROUTE)
def test_a_wrong_router(answer, expected):
    assert_rejected(lab.check_balance(LOSS, answer, BIAS), expected)


@pytest.mark.parametrize("answer, expected", WRONG_BIAS)
def test_a_wrong_bias(answer, expected):
    assert_rejected(lab.check_balance(LOSS, ROUTE, answer), expected)


@pytest.mark.parametrize("answers", [
    (LOSS, ROUTE, BIAS),
    (RightLoss.by_one_hot, RightRoute.softmax_of_the_chosen, RightBias.by_where),
    (RightLoss.by_scatter, RightRoute.in_another_order, RightBias.by_whole_numbers),
    (RightLoss.expert_by_expert, RightRoute.bias_taken_off_again, RightBias.expert_by_expert),
    (RightLoss.by_gathering, ROUTE, BIAS), (RightLoss.in_double, ROUTE, BIAS)])
def test_right(answers):
    for _ in range(5):  # other cases each time
        verdict = lab.check_balance(*answers)
        assert verdict.passed is True, str(verdict)


def test_it_waits():
    assert_waits(lab.check_balance, "9.6", functions=3)


def test_a_verdict_of_points_does_not_say_the_right_number(monkeypatch):
    monkeypatch.setenv("WORKBOOK_GRADES", "1")
    said = str(lab.check_balance(loss_of(right_f, right_p, 1), ROUTE, BIAS))
    assert "which is not right" in said and "it is" not in said


@pytest.mark.parametrize("k", [1, 2, 5])
def test_hugging_faces_loss_is_k_times_ours(k):
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(40, 5, generator=torch.Generator().manual_seed(k))
    theirs = load_balancing_loss_func((logits,), num_experts=5, top_k=k)
    torch.testing.assert_close(theirs, k * LOSS(logits, logits.topk(k).indices))


def test_the_notebooks_example_of_two_micro_batches():
    """Almost 2 for each, and 1 for both together."""
    parts = torch.tensor([[4.0, 0.0]] * 8), torch.tensor([[0.0, 4.0]] * 8)
    each = [LOSS(part, part.topk(1).indices).item() for part in parts]
    both = torch.cat(parts)
    assert each == pytest.approx([1.964] * 2, abs=1e-3)
    assert LOSS(both, both.topk(1).indices).item() == pytest.approx(1)
