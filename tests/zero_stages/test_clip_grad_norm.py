"""What the check of exercise 3.6 must reject, and what it must accept."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from zero_answers import N, accepted, named, rejected, right

import labs.zero_stages as lab
from labs.zero_stages.collectives import all_gather

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["zero_answers"])
pytestmark = pytest.mark.usefixtures("warm_launcher")


def gradients_of(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [p.grad for p in parameters if p.grad is not None]


def scaled(optimizer, norm, max_norm):
    for gradient in gradients_of(optimizer):
        gradient.mul_(min(1.0, max_norm / float(norm)))
    return norm


def local_square(optimizer):
    return sum(gradient.square().sum() for gradient in gradients_of(optimizer))


# 3.6 clip_grad_norm


class Clip:
    def nothing(optimizer, max_norm):
        pass

    def torchs(optimizer, max_norm):
        """Sees this rank's shards alone."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def own_norm(optimizer, max_norm):
        return scaled(optimizer, local_square(optimizer).sqrt(), max_norm)

    def sleeps(optimizer, max_norm):
        """Instead of waiting for the sum."""
        square = local_square(optimizer)
        dist.all_reduce(square, async_op=True)
        time.sleep(0.2)
        return scaled(optimizer, square.sqrt(), max_norm)

    def norms_added(optimizer, max_norm):
        norm = local_square(optimizer).sqrt()
        dist.all_reduce(norm)
        return scaled(optimizer, norm, max_norm)

    def mean_of_norms(optimizer, max_norm):
        norm = local_square(optimizer).sqrt()
        dist.all_reduce(norm)
        return scaled(optimizer, norm / N(), max_norm)

    def largest_norm(optimizer, max_norm):
        norm = local_square(optimizer).sqrt()
        dist.all_reduce(norm, dist.ReduceOp.MAX)
        return scaled(optimizer, norm, max_norm)

    def root_forgotten(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        return scaled(optimizer, square, max_norm)

    def each_shard_by_itself(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        for gradient in gradients_of(optimizer):
            gradient.mul_(min(1.0, max_norm / gradient.norm().item()))
        return square.sqrt()

    def always_scaled(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        for gradient in gradients_of(optimizer):
            gradient.mul_(max_norm / square.sqrt())
        return square.sqrt()

    def not_scaled(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        return square.sqrt()

    def not_a_number(optimizer, max_norm):
        return scaled(optimizer, local_square(optimizer) * float("nan"), max_norm)

    def returns_nothing(optimizer, max_norm):
        right.clip_grad_norm(optimizer, max_norm)

    def first_group_alone(optimizer, max_norm):
        optimizer.param_groups = optimizer.param_groups[:1]
        return right.clip_grad_norm(optimizer, max_norm)

    def first_group_scaled(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        norm = square.sqrt()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(min(1.0, max_norm / float(norm)))
        return norm

    def replaced(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        norm = square.sqrt()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * min(1.0, max_norm / float(norm))
        return norm

    def norm_afterwards(optimizer, max_norm):
        return right.clip_grad_norm(optimizer, max_norm).clamp(max=max_norm)

    def clipped_by_value(optimizer, max_norm):
        square = local_square(optimizer)
        dist.all_reduce(square)
        for gradient in gradients_of(optimizer):
            gradient.clamp_(-max_norm, max_norm)
        return square.sqrt()

    def noise_added(optimizer, max_norm):
        """Noise at right angles to the gradients: their projection on the old ones is right."""
        norm = right.clip_grad_norm(optimizer, max_norm)
        for gradient in gradients_of(optimizer):
            noise = torch.randn_like(gradient)
            noise -= gradient * (noise @ gradient) / (gradient @ gradient)
            gradient.add_(noise, alpha=0.01)
        return norm

    def of_the_weights(optimizer, max_norm):
        square = sum(p.detach().square().sum() for group in optimizer.param_groups
                     for p in group["params"])
        dist.all_reduce(square)
        return scaled(optimizer, square.sqrt(), max_norm)

    def not_reduced_before(optimizer, max_norm):
        square = local_square(optimizer) + torch.zeros(())
        dist.all_reduce(square)
        return scaled(optimizer, square.sqrt(), max_norm)

    def everything_gathered(optimizer, max_norm):
        square = 0.0
        for gradient in gradients_of(optimizer):
            whole = gradient.new_empty(gradient.numel() * N())
            all_gather(whole, gradient)
            square += whole.square().sum()
        return scaled(optimizer, square.sqrt(), max_norm)


@pytest.mark.parametrize("answer, words", [
    (Clip.nothing, "not_a_number"),
    (Clip.torchs, "norm_of_one_rank"),
    (Clip.sleeps, "never_waited"),
    (Clip.own_norm, "norm_of_one_rank"),
    (Clip.norms_added, "wrong_number"),
    (Clip.mean_of_norms, "wrong_number"),
    (Clip.largest_norm, "norm_of_one_rank"),
    (Clip.root_forgotten, "square_not_root"),
    (Clip.each_shard_by_itself, "wrong_scale"),
    (Clip.always_scaled, "clipped_below_limit"),
    (Clip.not_scaled, "not_scaled"),
    (Clip.not_a_number, "not_a_number number"),
    (Clip.returns_nothing, "not_a_number"),
    (Clip.first_group_alone, "wrong_number"),
    (Clip.first_group_scaled, "not_scaled"),
    (Clip.replaced, "gradient_replaced"),
    (Clip.norm_afterwards, "norm_after_clipping"),
    (Clip.clipped_by_value, "wrong_scale"),
    (Clip.noise_added, "not_one_factor"),
    (Clip.of_the_weights, "wrong_number"),
    (Clip.not_reduced_before, "norm_before_reduce"),
    (Clip.everything_gathered, "too_much_sent")], ids=named)
def test_wrong_clip(answer, words):
    rejected(lab.check_clip_grad_norm(answer), words)


def clip_by_a_vector(optimizer, max_norm):
    """As torch does it: the norm of the norms, and a small number in the divisor."""
    optimizer.reduce_once()
    norms = torch.stack([gradient.norm() for gradient in gradients_of(optimizer)])
    square = norms.norm().square()
    dist.all_reduce(square)
    factor = min(1.0, max_norm / (square.sqrt().item() + 1e-6))
    for gradient in gradients_of(optimizer):
        gradient.mul_(factor)
    return square.sqrt().item()


def clip_by_torchs_pieces(optimizer, max_norm):
    """torch's own functions for a norm and for scaling by one."""
    optimizer.reduce_once()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.get_total_norm(gradients_of(optimizer)) ** 2
    dist.all_reduce(norm)
    norm = norm.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def clip_by_objects(optimizer, max_norm):
    """Each rank's sum of squares as an object."""
    optimizer.reduce_once()
    of_ranks = [None] * N()
    dist.all_gather_object(of_ranks, local_square(optimizer))
    return scaled(optimizer, sum(of_ranks).sqrt(), max_norm)


def clip_by_gathered_norms(optimizer, max_norm):
    """One number of each rank, by a functional collective."""
    optimizer.reduce_once()
    mine = local_square(optimizer).sqrt().reshape(1)
    norm = torch.linalg.vector_norm(funcol.all_gather_tensor(mine, 0, dist.group.WORLD))
    torch._foreach_mul_(gradients_of(optimizer), min(1.0, max_norm / norm.item()))
    return norm


@pytest.mark.parametrize("answer", [right.clip_grad_norm, clip_by_a_vector, clip_by_torchs_pieces,
                                    clip_by_gathered_norms, clip_by_objects])
def test_right_clip(answer):
    accepted(lab.check_clip_grad_norm(answer))
