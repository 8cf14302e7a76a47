"""What the check of exercise 9.2 must reject, and what it must accept; its picture."""

import pytest
import torch
import transformers
from _build.definitions import definitions
from answers import assert_rejected, assert_waits, named
from torch.nn import functional as F

import labs
import labs.mixture_of_experts as lab
from labs.mixture_of_experts import expert_layer as exercise
from labs.training import data
from labs.training.mixtures import ExpertLayer

right = definitions("09_mixture_of_experts")
route, dispatch, combine = right.route, right.dispatch, right.combine


# route


def not_normalised(logits, k):
    return logits.softmax(-1, dtype=torch.float32).to(logits.dtype).topk(k)


def over_tokens(logits, k):
    weights, chosen = logits.softmax(0, dtype=torch.float32).topk(k)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen


def weights_over_tokens(logits, k):
    weights = logits.softmax(0).gather(1, logits.topk(k).indices)
    return weights / weights.sum(-1, keepdim=True), logits.topk(k).indices


def by_logits(logits, k):
    weights, chosen = logits.topk(k)
    return weights / weights.sum(-1, keepdim=True), chosen


def raw_logits(logits, k):
    return logits.topk(k)


def by_sigmoid(logits, k):
    weights, chosen = logits.sigmoid().topk(k)
    return weights / weights.sum(-1, keepdim=True), chosen


def equal(logits, k):
    chosen = logits.topk(k).indices
    return torch.full_like(chosen, 1, dtype=logits.dtype) / k, chosen


def least_probable(logits, k):
    return route(-logits, k)


def first_experts(logits, k):
    weights = logits.softmax(-1)[:, :k]
    chosen = torch.arange(k).expand(len(logits), k).contiguous()
    return weights / weights.sum(-1, keepdim=True), chosen


def in_bfloat16(logits, k):
    weights, chosen = logits.softmax(-1).topk(k)
    return weights / weights.sum(-1, keepdim=True), chosen


def stays_fp32(logits, k):
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(k)
    return weights / weights.sum(-1, keepdim=True), chosen


def detached(logits, k):
    weights, chosen = route(logits, k)
    return weights.detach(), chosen


def half_detached(logits, k):
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(k)
    return (weights / weights.sum(-1, keepdim=True).detach()).to(logits.dtype), chosen


def other_order(logits, k):
    weights, chosen = route(logits, k)
    return weights.flip(-1), chosen


def swapped(logits, k):
    return route(logits, k)[::-1]


def writes(logits, k):
    result = route(logits, k)
    logits.data.mul_(2)
    return result


# dispatch


def as_they_are(tokens, chosen, experts):
    return tokens.repeat_interleave(chosen.shape[1], 0), *dispatch(tokens, chosen, experts)[1:]


def repeated(tokens, chosen, experts):
    return tokens.repeat(chosen.shape[1], 1), *dispatch(tokens, chosen, experts)[1:]


def modulo(tokens, chosen, experts):
    _, counts, order = dispatch(tokens, chosen, experts)
    return tokens[order % max(len(tokens), 1)], counts, order


def inverse_taken(tokens, chosen, experts):
    _, counts, order = dispatch(tokens, chosen, experts)
    return tokens[order.argsort() // chosen.shape[1]], counts, order


def descending(tokens, chosen, experts):
    order = chosen.flatten().argsort(stable=True, descending=True)
    return tokens[order // chosen.shape[1]], chosen.flatten().bincount(minlength=experts), order


def first_only(tokens, chosen, experts):
    return tokens, *dispatch(tokens, chosen, experts)[1:]


def no_minlength(tokens, chosen, experts):
    copies, _, order = dispatch(tokens, chosen, experts)
    return copies, chosen.flatten().bincount(), order


def counts_of_used(tokens, chosen, experts):
    copies, counts, order = dispatch(tokens, chosen, experts)
    return copies, counts[counts > 0], order


def counts_of_first(tokens, chosen, experts):
    copies, _, order = dispatch(tokens, chosen, experts)
    return copies, chosen[:, 0].bincount(minlength=experts), order


def a_list(tokens, chosen, experts):
    copies, counts, order = dispatch(tokens, chosen, experts)
    return copies, counts.tolist(), order


def tokens_detached(tokens, chosen, experts):
    return dispatch(tokens.detach(), chosen, experts)


def weighs(tokens, chosen, experts):
    copies, counts, order = dispatch(tokens, chosen, experts)
    return copies / chosen.shape[1], counts, order


# combine


def unweighted(outputs, order, weights):
    return outputs[order.argsort()].unflatten(0, weights.shape).sum(1) + 0 * weights.sum()


def mean(outputs, order, weights):
    return combine(outputs, order, weights) / weights.shape[1]


def in_dispatch_order(outputs, order, weights):
    return (weights[..., None] * outputs.unflatten(0, weights.shape)).sum(1)


def sorts_again(outputs, order, weights):
    return (weights[..., None] * outputs[order].unflatten(0, weights.shape)).sum(1)


def assigned(outputs, order, weights):
    result = outputs.new_zeros(len(weights), outputs.shape[1])
    result[order // weights.shape[1]] = outputs * weights.flatten()[order, None]
    return result


def added_by_index(outputs, order, weights):
    result = outputs.new_zeros(len(weights), outputs.shape[1])
    result[order // weights.shape[1]] += outputs * weights.flatten()[order, None]
    return result


def other_weights(outputs, order, weights):
    result = outputs.new_zeros(len(weights), outputs.shape[1])
    return result.index_add(0, order // weights.shape[1], outputs * weights.flatten()[:, None])


def weights_detached(outputs, order, weights):
    return combine(outputs, order, weights.detach())


def outputs_detached(outputs, order, weights):
    return combine(outputs.detach(), order, weights)


def zeros(outputs, order, weights):
    return outputs.new_zeros(len(weights), outputs.shape[1])


def float_result(outputs, order, weights):
    return combine(outputs.float(), order, weights.float())


WRONG = [
    *named(**{f.__name__: ((f, dispatch, combine), code) for f, code in (
        (not_normalised, "not_normalised"), (over_tokens, "wrong_dimension"),
        (weights_over_tokens, "wrong_dimension"), (by_logits, "weights_from_logits"),
        (raw_logits, "weights_from_logits"), (by_sigmoid, "weights_from_sigmoid"),
        (equal, "equal_weights"), (least_probable, "smallest"), (first_experts, "wrong_experts"),
        (in_bfloat16, "fewer_digits"), (stays_fp32, "wrong_dtype"),
        (detached, "weights_detached"), (half_detached, "wrong_gradient"),
        (other_order, "wrong_order"), (swapped, "wrong_dtype"), (writes, "changes_input"),
        (lambda logits, k: None, "wrong_count"), (lambda logits, k: (logits, k), "wrong_shape"))}),
    *named(**{f.__name__: ((route, f, combine), code) for f, code in (
        (as_they_are, "not_sorted"), (repeated, "not_sorted"), (modulo, "wrong_token"),
        (inverse_taken, "wrong_order"), (descending, "wrong_copies"), (first_only, "wrong_shape"),
        (no_minlength, "counts_too_short"), (counts_of_used, "counts_too_short"),
        (counts_of_first, "wrong_counts"), (a_list, "wrong_type"),
        (tokens_detached, "tokens_detached"), (weighs, "no_token"))}),
    *named(**{f.__name__: ((route, dispatch, f), code) for f, code in (
        (unweighted, "unweighted"), (mean, "averaged"), (in_dispatch_order, "not_restored"),
        (sorts_again, "wrong_order"), (assigned, "added_once"), (added_by_index, "added_once"),
        (other_weights, "weights_not_sorted"), (weights_detached, "weights_detached"),
        (outputs_detached, "weights_detached"), (zeros, "wrong_output"),
        (float_result, "wrong_dtype"))})]


@pytest.mark.parametrize("answers, code", WRONG)
def test_a_wrong_answer_is_rejected_for_its_reason(answers, code):
    assert_rejected(lab.check_expert_layer(*answers), code)


# right answers in other styles


def softmax_of_the_chosen(logits, k):
    """Softmax after top-k: exp(a) / Σ exp over the chosen is the probability divided by their sum,
    because the sum over all experts cancels."""
    values, chosen = logits.float().topk(k)
    if logits.dtype == torch.float64:
        values = logits.topk(k).values
    return values.softmax(-1).to(logits.dtype), chosen


def sorted_route(logits, k):
    """The k experts in the order of their numbers."""
    weights, chosen = route(logits, k)
    chosen, order = chosen.sort(-1)
    return weights.gather(1, order), chosen


def by_a_loop(tokens, chosen, experts):
    """Reads all of `chosen` once for each expert; its order says where each copy went."""
    found = [torch.where(chosen == expert) for expert in range(experts)]
    counts = torch.tensor([len(token) for token, _ in found])
    token, place = (torch.cat(parts) for parts in zip(*found, strict=True))
    return tokens[token], counts, (token, place)


def combine_by_pairs(outputs, order, weights):
    token, place = order
    result = torch.zeros(len(weights), outputs.shape[1], dtype=outputs.dtype)
    return result.index_add(0, token, weights[token, place, None] * outputs)


def by_place(tokens, chosen, experts):
    """Sorted by expert, then by the expert's place among a token's k."""
    order = chosen.t().flatten().argsort(stable=True)  # place · tokens + token
    return tokens[order % max(len(tokens), 1)], F.one_hot(chosen, experts).sum((0, 1)), order


def combine_by_place(outputs, order, weights):
    by_token = outputs[order.argsort()].unflatten(0, weights.t().shape)  # (k, tokens, hidden)
    return torch.einsum("tk,kth->th", weights, by_token)


@pytest.mark.parametrize("answers", [
    (route, dispatch, combine), (softmax_of_the_chosen, by_a_loop, combine_by_pairs),
    (sorted_route, by_place, combine_by_place)])
def test_a_right_answer_is_accepted(answers):
    for _ in range(3):
        verdict = lab.check_expert_layer(*answers)
        assert verdict.passed, str(verdict)


def test_the_picture_shows_what_sorting_does_and_how_uneven_the_experts_are():
    labs.guess("9.2", "copies", 350)
    picture = lab.show_dispatch(route, dispatch)
    place, counts = picture.data
    assert sorted(place) == list(range(20)) != place  # 10 tokens, two copies each
    assert sum(counts) == 2048 and len(counts) == 8
    # The text says "very different numbers", and that one expert would make the others wait.
    assert max(counts) > 1.4 * 256 and min(counts) < 0.7 * 256
    assert f"gets {max(counts)} copies" in str(picture) and "your guess: 350" in str(picture)
    for others in ((softmax_of_the_chosen, by_a_loop), (sorted_route, by_place)):
        assert lab.show_dispatch(*others).data[1] == counts
    for others in ((lambda logits, k: None, dispatch), (route, counts_of_used),
                   (route, a_list)):
        assert lab.show_dispatch(*others).code in ("wrong_count", "not_drawn")
    assert_waits(lab.show_dispatch, "9.2", 2)


def test_equal_bytes_choose_similar_experts():
    """As the text says of the picture."""
    first = exercise._untrained_logits().argmax(-1)
    tokens = data.lm_batches(1, 16, 64)[0]["input_ids"].flatten()
    same_byte, same_expert = (each[:, None] == each[None] for each in (tokens, first))
    others = ~torch.eye(len(first), dtype=torch.bool)
    shares = [same_expert[pairs & others].float().mean() for pairs in (same_byte, ~same_byte)]
    assert shares[0] > 1.5 * shares[1]


def test_functions_that_do_not_agree_on_their_order_are_rejected():
    assert_rejected(lab.check_expert_layer(route, by_place, combine), "wrong_output|wrong_order")


def test_a_size_that_cannot_be_inferred_without_tokens_is_explained():
    def with_minus_one(outputs, order, weights):
        by_token = outputs[order.argsort()].view(*weights.shape, -1)
        return (weights[..., None] * by_token).sum(1)

    verdict = lab.check_expert_layer(route, dispatch, with_minus_one)
    assert verdict.passed is False and "This case has no tokens" in verdict.hint, verdict


def test_answers_that_are_not_filled_in_are_waited_for():
    assert_waits(lab.check_expert_layer, "9.2", 3)
    assert_waits(lambda answer: lab.check_expert_layer(route, dispatch, answer), "9.2")


def test_the_layer_is_hugging_faces():
    """Outputs and gradients of transformers' own block, with the same parameters."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    # Before transformers 5 the experts were a list of modules, not stacked.
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("another layout of the experts")
    torch.manual_seed(0)
    layer = ExpertLayer(8, 16, 24, 2)
    block = mixtral.MixtralSparseMoeBlock(transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_local_experts=8, num_experts_per_tok=2,
        experts_implementation="eager"))
    block.load_state_dict({"gate.weight": layer.router.weight,
                           "experts.gate_up_proj": layer.experts.gate_up,
                           "experts.down_proj": layer.experts.down})
    mine = right.ExpertLayer(layer)
    x, upstream = torch.randn(2, 3, 10, 16)
    found = []
    for module in (block, mine, layer):
        module.zero_grad()  # the two layers share their router
        given = x.clone().requires_grad_()
        output = module(given)
        (output * upstream).sum().backward()
        # gate or router, gate_up, down: in this order in all three
        parameters = dict(module.named_parameters())
        ordered = sorted(parameters, key=lambda name: ("down" in name, "experts" in name))
        found.append([output, given.grad, *(parameters[name].grad.clone() for name in ordered)])
    assert len(found[0]) == 5
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
