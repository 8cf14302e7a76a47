"""What the check of exercise 9.4 must reject, and what it must accept; and its picture."""

import sys
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_rejected, assert_waits, judge_all
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import labs.mixture_of_experts as lab
from labs.checks.reference import Reference
from labs.checks.training import train_and_compare
from labs.mixture_of_experts import average_gradients as exercise
from labs.mixture_of_experts.reference_parallel import KINDS, gathered, kind_of
from labs.training.mixtures import Mixture
from labs.workers.launcher import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("warm_launcher")
solution = definitions("09_mixture_of_experts")
right = solution.average_gradients


def with_gradients(model):
    return [(name, p) for name, p in model.named_parameters() if p.grad is not None]


def is_expert(name):
    return ".experts." in name


def averaged(over, divisor=lambda name, n, r: n):
    """An answer that sums over `over(name, replicas)` and divides by divisor(name, N, R)."""
    def answer(model, replicas):
        for name, parameter in with_gradients(model):
            dist.all_reduce(parameter.grad, group=over(name, replicas))
            parameter.grad /= divisor(name, dist.get_world_size(), dist.get_world_size(replicas))
    return answer


def rightly(name, replicas):
    """The group to sum over; None means all ranks."""
    return replicas if is_expert(name) else None


def only(chosen):
    """The right answer for some of the parameters, and nothing for the others."""
    def answer(model, replicas):
        for name, parameter in with_gradients(model):
            if chosen(name):
                dist.all_reduce(parameter.grad, group=rightly(name, replicas))
                parameter.grad /= dist.get_world_size()
    return answer


class Wrong:
    def nothing(model, replicas):
        pass

    def zeros(model, replicas):
        for _, parameter in with_gradients(model):
            parameter.grad.zero_()

    def only_divided(model, replicas):
        for _, parameter in with_gradients(model):
            parameter.grad /= dist.get_world_size()

    def torchs_ddp(model, replicas):
        nn.parallel.DistributedDataParallel(model)

    def reduced_copies(model, replicas):
        for name, parameter in with_gradients(model):
            gradient = parameter.grad.clone()
            dist.all_reduce(gradient, group=rightly(name, replicas))
            gradient /= dist.get_world_size()

    def parameters_averaged(model, replicas):
        right(model, replicas)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter += 1e-2 * dist.get_rank()
                dist.all_reduce(parameter, group=rightly(name, replicas))
                parameter /= dist.get_world_size(rightly(name, replicas))

    def only_on_rank_0(model, replicas):
        for name, parameter in with_gradients(model):
            if is_expert(name):
                dist.all_reduce(parameter.grad, group=replicas)
            else:
                dist.reduce(parameter.grad, dst=0)
            parameter.grad /= dist.get_world_size()

    def frozen_too(model, replicas):
        for _, parameter in model.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        right(model, replicas)

    def unfreezes(model, replicas):
        right(model, replicas)
        model.requires_grad_(True)

    def overflows(model, replicas):
        """As memory that was never written may."""
        for _, parameter in with_gradients(model):
            parameter.grad.fill_(3e38)

    def gradients_removed(model, replicas):
        right(model, replicas)
        for name, parameter in model.named_parameters():
            if not is_expert(name):
                parameter.grad = None

    def not_awaited(model, replicas):
        for name, parameter in with_gradients(model):
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad, group=rightly(name, replicas), async_op=True)

    def everything_gathered(model, replicas):
        for name, parameter in with_gradients(model):
            group = rightly(name, replicas)
            parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, parameter.grad, group=group)
            dist.all_gather(parts, parameter.grad, group=group)
            dist.all_gather(parts, parameter.grad, group=group)
            parameter.grad = sum(parts) / dist.get_world_size()

    def in_bfloat16(model, replicas):
        for name, parameter in with_gradients(model):
            gradient = parameter.grad.bfloat16()
            dist.all_reduce(gradient, group=rightly(name, replicas))
            parameter.grad.copy_(gradient.float() / dist.get_world_size())

    def twice(model, replicas):
        right(model, replicas)
        right(model, replicas)

    def what_is_left_of_earlier_calls(model, replicas):
        """Adds what it saw before: the published 2^N, from one step to the next."""
        kept = model.__dict__.setdefault("kept", {})
        for name, parameter in with_gradients(model):
            kept[name] = kept.get(name, 0) + parameter.grad.clone()
            parameter.grad.copy_(kept[name])
        right(model, replicas)


def by_part_of_the_name(name, replicas):
    return replicas if "experts" in name else None


# The published faults are first; see the table of notebook 09.
WRONG = [
    (averaged(rightly, lambda name, n, r: r if is_expert(name) else n), "averaged_over_replicas"),
    (averaged(lambda name, replicas: None), "experts_mixed averaged"),
    (averaged(lambda name, replicas: None, lambda *_: 1), "experts_mixed summed"),
    (only(lambda name: ".router." not in name), "gradient_of_one_rank router's"),
    (averaged(rightly, lambda name, n, r: n * (1 + (n - 1) * ("shared" in name))),
     "mean_twice shared"),
    (averaged(by_part_of_the_name), "summed_over_replicas .experts."),
    (averaged(by_part_of_the_name, lambda name, n, r: r if "experts" in name else n),
     "averaged_over_replicas"),
    (averaged(rightly, lambda *_: 1), "sum_not_mean"),
    (averaged(rightly, lambda name, n, r: r), "averaged_over_replicas"),
    (averaged(rightly, lambda name, n, r: n // r), "divided_by_expert_ranks"),
    (averaged(rightly, lambda name, n, r: n if is_expert(name) else r), "divided_by_replicas"),
    (averaged(rightly, lambda name, n, r: 2), "wrong_divisor"),
    (averaged(lambda name, replicas: replicas), "summed_over_replicas"),
    (only(lambda name: not is_expert(name)), "gradient_of_one_rank expert's"),
    (only(is_expert), "gradient_of_one_rank"),
    (only(lambda name: ".down" not in name), "gradient_of_one_rank down"),
    (Wrong.nothing, "gradient_of_one_rank"),
    (Wrong.zeros, "zero_gradient"),
    (Wrong.only_divided, "not_summed"),
    (Wrong.torchs_ddp, "ready_made"),
    (Wrong.reduced_copies, "gradient_of_one_rank copy"),
    (Wrong.parameters_averaged, "changes_parameters"),
    (Wrong.only_on_rank_0, "not_summed|wrong_gradient|wrong_divisor"),
    (Wrong.frozen_too, "frozen_parameter"),
    (Wrong.unfreezes, "changes_parameters requires_grad"),
    (Wrong.overflows, "wrong_gradient"),
    (Wrong.gradients_removed, "gradient_missing"),
    (Wrong.in_bfloat16, "low_precision"),
    (Wrong.not_awaited, "never_waited"),
    (Wrong.everything_gathered, "too_much_sent"),
    (Wrong.what_is_left_of_earlier_calls, "wrong_gradient step")]


class Right:
    def new_tensors(model, replicas):
        for name, parameter in with_gradients(model):
            total = parameter.grad.clone()
            dist.all_reduce(total, group=rightly(name, replicas))
            parameter.grad = total / dist.get_world_size()

    def in_two_buckets(model, replicas):
        for group, chosen in ((replicas, True), (None, False)):
            found = [p for name, p in with_gradients(model) if is_expert(name) == chosen]
            flat = parameters_to_vector([p.grad for p in found])
            dist.all_reduce(flat, group=group)
            flat /= dist.get_world_size()
            vector_to_parameters(flat, [p.grad for p in found])

    def by_module(model, replicas):
        """Asynchronous, divided first, and no all-reduce where an expert has no other replica."""
        own = {id(p) for block in model.layers for p in block.mlp.experts.parameters()}
        handles = []
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            parameter.grad /= dist.get_world_size()
            group = replicas if id(parameter) in own else dist.group.WORLD
            if dist.get_world_size(group) > 1:
                handles.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
        for handle in handles:
            handle.wait()

    def as_ddp_does(model, replicas):
        """The mean over the group, and what the mean of an expert has too much."""
        ranks = dist.get_world_size()
        for name, parameter in with_gradients(model):
            group = rightly(name, replicas)
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)
            if is_expert(name):
                parameter.grad *= dist.get_world_size(replicas) / ranks


def test_answers_are_judged():
    judge_all(lab.check_average_gradients, WRONG, [
        right, Right.new_tensors, Right.in_two_buckets, Right.by_module, Right.as_ddp_does], 4)


def test_a_right_answer_passes_on_all_world_sizes():
    verdict = lab.check_average_gradients(right)
    assert verdict.passed and "4 × 1" in str(verdict), str(verdict)


def skips_zeros(model, replicas):
    """An expert without tokens on this rank may have some on its replica."""
    for name, parameter in with_gradients(model):
        if parameter.grad.any():
            dist.all_reduce(parameter.grad, group=rightly(name, replicas))
            parameter.grad /= dist.get_world_size()


def takes_every_gradient(model, replicas):
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad, group=rightly(name, replicas))
        parameter.grad /= dist.get_world_size()


@pytest.mark.parametrize("answer, expected", [
    (skips_zeros, "collectives_differ|deadlock|no_progress All ranks call"),
    (takes_every_gradient, "raised_TypeError frozen")])
def test_an_answer_that_ends_the_launch_is_named(answer, expected):
    assert_rejected(lab.check_average_gradients(answer), expected)


def test_an_unfilled_exercise_waits():
    assert_waits(lab.check_average_gradients, "9.4")


def the_notebooks_strategy():
    """On a rank: the given strategy, with the layer of 9.3, beside one process."""
    case = exercise.Case(2, exercise.SGD, parts=2)
    model = case.model()
    reference = Reference(model, case.optimizer_of)
    kind, settings = exercise.SGD
    module, optimizer = solution.expert_parallel(model, kind, **settings)
    return train_and_compare(module, optimizer, [reference], case.steps(3),
                             parameters_of=partial(gathered, group=module.layers[0].mlp.group))


def test_the_strategy_of_the_notebook_equals_one_process():
    assert max(launch(the_notebooks_strategy, ranks=4, quiet=True)) < 1e-5


def test_kinds_are_those_of_the_models_names():
    found = {name: kind_of(name) for name, _ in Mixture(shared=True).named_parameters()}
    assert found["layers.1.mlp.shared_experts.down.weight"] == "shared"
    assert found["layers.1.mlp.experts.down"] == "experts"
    assert found["layers.0.mlp.router.weight"] == "router"
    assert set(found.values()) == set(KINDS)


def test_the_uneven_case_leaves_experts_without_tokens_on_some_ranks_only():
    """So that an answer which skips them waits for another rank."""
    case = exercise.PROBED[4][1]
    model = case.model()
    tokens = torch.arange(0, 256, 16)[None, :exercise.SEQUENCE]
    for first, used in ((0, 0), (128, len(model.layers[0].mlp.router.weight) // 2)):
        model.zero_grad()
        model(tokens % 128 + first).loss.backward()
        by_expert = model.layers[0].mlp.experts.down.grad.flatten(1).abs().sum(1)
        assert by_expert.nonzero().flatten().tolist() == [used]
