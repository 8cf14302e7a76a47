"""What the check of exercise 7.6 must reject, with the words that must say why; and what it must
accept."""

import sys

import cloudpickle
import gate
import pytest
import torch
import torch.distributed as dist
from answers import assert_rejected, judge_in_one_launch
from torch import nn
from vocabulary_answers import (
    assert_all_rejected,
    right,
)

import labs.tensor_parallel as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["vocabulary_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


# wrong ones


def squares(parameters):
    return sum((p.grad.square().sum() for p in parameters if p.grad is not None),
               torch.zeros(()))


def scale(parameters, norm, max_norm):
    factor = (max_norm / (norm + 1e-6)).clamp(max=1)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    return norm


def reduced(number, group, op=dist.ReduceOp.SUM):
    dist.all_reduce(number, op, group=group)
    return number


class Clip:
    def nothing(sharded, replicated, max_norm, group):
        return torch.tensor(0.0)

    def torchs_on_each_rank(sharded, replicated, max_norm, group):
        return nn.utils.clip_grad_norm_([*sharded, *replicated], max_norm)

    def all_gradients_gathered(sharded, replicated, max_norm, group):
        found = [p.grad.flatten() for p in sharded if p.grad is not None]
        flat = torch.cat([*found, torch.zeros(100)])[:100]
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, flat, group=group)
        total = torch.cat(parts).square().sum() + squares(replicated)
        return scale([*sharded, *replicated], total.sqrt(), max_norm)

    def replicated_counted_on_every_rank(sharded, replicated, max_norm, group):
        total = reduced(squares([*sharded, *replicated]), group)
        return scale([*sharded, *replicated], total.sqrt(), max_norm)

    def norms_added(sharded, replicated, max_norm, group):
        norm = reduced(squares([*sharded, *replicated]).sqrt(), group)
        return scale([*sharded, *replicated], norm, max_norm)

    def shards_counted_twice(sharded, replicated, max_norm, group):
        total = reduced(reduced(squares(sharded), group), group) + squares(replicated)
        return scale([*sharded, *replicated], total.sqrt(), max_norm)

    def counted_twice(sharded, replicated, max_norm, group):
        """The sum over the ranks, in which all is, is summed over the ranks once more."""
        total = reduced(squares(sharded), group) + squares(replicated)
        return scale([*sharded, *replicated], reduced(total, group).sqrt(), max_norm)

    def shards_only(sharded, replicated, max_norm, group):
        return scale([*sharded, *replicated], reduced(squares(sharded), group).sqrt(), max_norm)

    def mean(sharded, replicated, max_norm, group):
        total = reduced(squares([*sharded, *replicated]), group) / dist.get_world_size(group)
        return scale([*sharded, *replicated], total.sqrt(), max_norm)

    def root_forgotten(sharded, replicated, max_norm, group):
        total = reduced(squares(sharded), group) + squares(replicated)
        return scale([*sharded, *replicated], total, max_norm)

    def norm_after_clipping(sharded, replicated, max_norm, group):
        norm = right.clip_grad_norm(sharded, replicated, max_norm, group)
        return norm.clamp(max=max_norm)

    def no_norm(sharded, replicated, max_norm, group):
        right.clip_grad_norm(sharded, replicated, max_norm, group)

    def always_scaled(sharded, replicated, max_norm, group):
        norm = (reduced(squares(sharded), group) + squares(replicated)).sqrt()
        for parameter in [*sharded, *replicated]:
            if parameter.grad is not None:
                parameter.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def shards_scaled_only(sharded, replicated, max_norm, group):
        norm = (reduced(squares(sharded), group) + squares(replicated)).sqrt()
        return scale(sharded, norm, max_norm)

    def scaled_by_own_norm(sharded, replicated, max_norm, group):
        """Each rank scales by its own norm: another factor on each."""
        norm = (reduced(squares(sharded), group) + squares(replicated)).sqrt()
        scale([*sharded, *replicated], squares([*sharded, *replicated]).sqrt(), max_norm)
        return norm

    def scaled_on_one_rank(sharded, replicated, max_norm, group):
        norm = (reduced(squares(sharded), group) + squares(replicated)).sqrt()
        return scale([*sharded, *replicated], norm, max_norm if dist.get_rank(group) else 1e9)

    def scaled_where_own_norm_is_large(sharded, replicated, max_norm, group):
        norm = (reduced(squares(sharded), group) + squares(replicated)).sqrt()
        if squares([*sharded, *replicated]).sqrt() > max_norm:
            scale([*sharded, *replicated], norm, max_norm)
        return norm

    def parameters_scaled_too(sharded, replicated, max_norm, group):
        with torch.no_grad():
            for parameter in replicated:
                parameter.mul_(0.5)
        return right.clip_grad_norm(sharded, replicated, max_norm, group)

    def replaced(sharded, replicated, max_norm, group):
        norm = (reduced(squares(sharded), group) + squares(replicated)).sqrt()
        for parameter in [*sharded, *replicated]:
            if parameter.grad is not None:
                parameter.grad = parameter.grad * (max_norm / norm).clamp(max=1)
        return norm

    def zeros_where_there_is_none(sharded, replicated, max_norm, group):
        for parameter in [*sharded, *replicated]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return right.clip_grad_norm(sharded, replicated, max_norm, group)

    def none_not_expected(sharded, replicated, max_norm, group):
        total = reduced(sum(p.grad.square().sum() for p in sharded), group)
        norm = (total + sum(p.grad.square().sum() for p in replicated)).sqrt()
        return scale([*sharded, *replicated], norm, max_norm)

    def parameters_in_place_of_gradients(sharded, replicated, max_norm, group):
        with torch.no_grad():
            total = reduced(sum(p.square().sum() for p in sharded), group)
            norm = (total + sum(p.square().sum() for p in replicated)).sqrt()
        return scale([*sharded, *replicated], norm, max_norm)

    def noise_added(sharded, replicated, max_norm, group):
        """Noise at right angles to the gradients: their projection on the old ones is right."""
        norm = right.clip_grad_norm(sharded, replicated, max_norm, group)
        for gradient in (p.grad.view(-1) for p in (*sharded, *replicated) if p.grad is not None):
            noise = torch.randn_like(gradient)
            noise -= gradient * (noise @ gradient) / (gradient @ gradient)
            gradient.add_(noise, alpha=0.01)
        return norm

    def over_the_world(sharded, replicated, max_norm, group):
        return right.clip_grad_norm(sharded, replicated, max_norm, dist.group.WORLD)


WRONG_CLIPS = [
    (Clip.nothing, "wrong_number"),
    (Clip.torchs_on_each_rank, "norm_rank_gradients_alone"),
    (Clip.all_gradients_gathered, "too_much_sent"),
    (Clip.replicated_counted_on_every_rank, "squares_replicated_parameters"),
    (Clip.norms_added, "sum_all_ranks_norms"),
    (Clip.shards_counted_twice, "squares_shards_counted_times"),
    (Clip.counted_twice, "all_squares_counted_times"),
    (Clip.shards_only, "replicated_parameters_missing"),
    (Clip.mean, "mean_shards_squares_over_ranks"),
    (Clip.root_forgotten, "square"),
    (Clip.norm_after_clipping, "norm_after_clipping"),
    (Clip.no_norm, "wrong_type"),
    (Clip.always_scaled, "wrong_scale below"),
    (Clip.shards_scaled_only, "wrong_scale"),
    (Clip.scaled_by_own_norm, "wrong_scale"),
    (Clip.scaled_on_one_rank, "wrong_scale"),
    (Clip.scaled_where_own_norm_is_large, "wrong_scale 0.9500x"),
    (Clip.noise_added, "not_one_factor"),
    (Clip.parameters_scaled_too, "parameters_changed"),
    (Clip.replaced, "gradient_replaced"),
    (Clip.zeros_where_there_is_none, "gradient_made"),
    (Clip.none_not_expected, "raised_AttributeError"),
    (Clip.parameters_in_place_of_gradients, "wrong_number"),
    (Clip.over_the_world, "wrong_number"),
]


# right ones written differently, and one that ends its launch


def by_torch(sharded, replicated, max_norm, group):
    """torch's own, put together: norms of both lists, and one factor."""
    norms = [nn.utils.get_total_norm([p.grad for p in each if p.grad is not None])
             for each in (sharded, replicated)]
    total = norms[0]**2
    dist.all_reduce(total, group=group)
    norm = torch.stack([total.sqrt(), norms[1]]).norm()
    nn.utils.clip_grads_with_norm_([*sharded, *replicated], max_norm, norm)
    return norm


def by_shares(sharded, replicated, max_norm, group):
    """What is replicated is divided by the ranks before one sum; a float is returned."""
    total = squares(sharded) + squares(replicated) / dist.get_world_size(group)
    norm = reduced(total.double(), group).sqrt().item()
    for parameter in filter(lambda p: p.grad is not None, [*sharded, *replicated]):
        parameter.grad *= min(1.0, max_norm / (norm + 1e-6))
    return norm


def no_collective_without_gradients(sharded, replicated, max_norm, group):
    """A rank without gradients of shards does not come to the all-reduce."""
    total = squares(sharded)
    if total > 0:
        dist.all_reduce(total, group=group)
    return scale([*sharded, *replicated], (total + squares(replicated)).sqrt(), max_norm)


def by_objects(sharded, replicated, max_norm, group):
    """Each rank's sum of squares as an object, in a tensor of its own."""
    of_ranks = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, torch.as_tensor(squares(sharded)), group=group)
    norm = (sum(of_ranks) + squares(replicated)) ** 0.5
    return scale([*sharded, *replicated], norm, max_norm)


RIGHT_CLIPS = [right.clip_grad_norm, by_torch, by_shares, by_objects]


def untouched(model, optimizer_class, **settings):
    raise NotImplementedError("Exercise 7.3")


def judge_clips(answers):
    """The function alone: no Llama is trained."""
    return judge_in_one_launch(lab.check_clip_grad_norm, [(each, untouched) for each in answers], 4)


def test_clipping():
    """Wrong ones are rejected, right ones accepted, in one launch."""
    verdicts = judge_clips([*(answer for answer, _ in WRONG_CLIPS), *RIGHT_CLIPS])
    assert_all_rejected(WRONG_CLIPS, verdicts[:len(WRONG_CLIPS)])
    for verdict in verdicts[len(WRONG_CLIPS):]:
        assert verdict.passed is None and "waits for Exercise 7.3" in str(verdict), verdict


def test_clipping_that_ends_its_launch_is_rejected():
    verdict = lab.check_clip_grad_norm(no_collective_without_gradients, untouched)
    assert_rejected(verdict, "collectives_differ|deadlock|no_progress|rank_died")


# what is trained with it


def with_a_scale_on_one_rank(model, optimizer_class, **settings):
    module, optimizer = right.fully_sharded_llama(model, optimizer_class, **settings)
    if dist.get_rank() == 1:
        model.lm_head.weight.register_hook(lambda gradient: gradient / 2)
    return module, optimizer


def without_the_vocabulary(model, optimizer_class, **settings):
    return right.tensor_parallel(model, optimizer_class, **settings)


def whole(model, optimizer_class, **settings):
    return model, optimizer_class(model.parameters(), **settings)


WRONG_STRATEGIES = [(whole, "parameter_memory_too_high"),
                    (without_the_vocabulary, "parameter_memory_too_high"),
                    (with_a_scale_on_one_rank, "wrong_number Llama")]


@pytest.mark.slow
def test_what_is_trained_with_clipping():
    wrong = gate.some_of(WRONG_STRATEGIES)
    answers = [(right.clip_grad_norm, strategy) for strategy, _ in wrong]
    *verdicts, last = judge_in_one_launch(
        lab.check_clip_grad_norm, [*answers, (by_torch, right.fully_sharded_llama)], 2)
    for (strategy, words), verdict in zip(wrong, verdicts, strict=True):
        print(f"{strategy.__name__} → {verdict.sentence}")
        assert_rejected(verdict, words)
    assert last.passed, last
