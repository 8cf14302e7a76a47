"""Steps that exercise 6.2 must reject, and right ones written differently."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import asked_for, assert_rejected, judge_in_one_launch
from torch.nn import functional as F

import labs.scaling as lab
from labs.scaling.ragged import count_answers

pytestmark = pytest.mark.usefixtures("warm_launcher")
right = definitions("06_scaling")


def tokens_of(micro_batches, reduce=True):
    tokens = sum(count_answers(batch) for batch in micro_batches)
    if reduce:
        dist.all_reduce(tokens)
    return tokens


def step(module, micro_batches, scale, loss_of=lab.loss_sum, report=None):
    """backward of each micro-batch's sum times scale(batch); the right loss, or report(sum)."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in micro_batches:
        loss = loss_of(module, batch)
        (loss * scale(batch)).backward()
        total += loss.detach()
    if report:
        return report(total)
    dist.all_reduce(total)
    return total / tokens_of(micro_batches)


class Wrong:
    def means_of_means(module, parts):
        return step(module, parts, lambda b: 1 / count_answers(b).clamp(min=1) / len(parts))

    def the_models_own_loss(module, parts):
        return step(module, parts, lambda b: 1 / len(parts), lambda m, b: m(**b).loss)

    def means_of_the_ranks(module, parts):
        own = tokens_of(parts, reduce=False).clamp(min=1)
        return step(module, parts, lambda b: 1 / own)

    def count_of_each_part(module, parts):
        return step(module, parts, lambda b: dist.get_world_size() / tokens_of([b]) / len(parts))

    def ddp_divides_once_more(module, parts):
        tokens = tokens_of(parts)
        return step(module, parts, lambda b: 1 / tokens)

    def multiplied_twice(module, parts):
        tokens = tokens_of(parts)
        return step(module, parts, lambda b: dist.get_world_size() ** 2 / tokens)

    def padding_counts(module, parts):
        tokens = torch.tensor(sum(b["labels"].numel() for b in parts))
        dist.all_reduce(tokens)
        return step(module, parts, lambda b: dist.get_world_size() / tokens)

    def parts_divide(module, parts):
        tokens = tokens_of(parts)
        return step(module, parts, lambda b: dist.get_world_size() / tokens / len(parts))

    def not_divided(module, parts):
        return step(module, parts, lambda b: 1)

    def zeroed_each_time(module, parts):
        tokens = tokens_of(parts)

        def loss_of(module, batch):
            module.zero_grad()
            return lab.loss_sum(module, batch)

        return step(module, parts, lambda b: dist.get_world_size() / tokens, loss_of)

    def no_backward(module, parts):
        return step(module, parts, lambda b: 1) if False else torch.zeros(())

    def reports_its_own(module, parts):
        tokens, own = tokens_of(parts), tokens_of(parts, reduce=False).clamp(min=1)
        return step(module, parts, lambda b: dist.get_world_size() / tokens,
                    report=lambda total: total / own)

    def reports_its_share(module, parts):
        tokens = tokens_of(parts)
        return step(module, parts, lambda b: dist.get_world_size() / tokens,
                    report=lambda total: total / tokens)

    def reports_nothing(module, parts):
        tokens = tokens_of(parts)
        return step(module, parts, lambda b: dist.get_world_size() / tokens,
                    report=lambda total: None)


WORDS = {
    "means_of_means": "wrong_gradient rank's",
    "the_models_own_loss": "wrong_gradient rank's",
    "means_of_the_ranks": "wrong_gradient rank's",
    "count_of_each_part": "wrong_gradient one's",
    "ddp_divides_once_more": "wrong_gradient",
    "multiplied_twice": "wrong_gradient times", "padding_counts": "wrong_gradient prompts",
    "parts_divide": "wrong_gradient",
    "zeroed_each_time": "last_micro_batch_only",
    "not_divided": "wrong_gradient losses", "no_backward": "gradient_missing",
    "reports_its_own": "mean_rank_alone", "reports_its_share": "rank_share",
    "reports_nothing": "wrong_type"}


class Right:
    as_worked = right.ragged_step

    def synchronized_once(module, parts):
        tokens, total = tokens_of(parts), 0
        for number, batch in enumerate(parts):
            last = number == len(parts) - 1
            with contextlib.nullcontext() if last else module.no_sync():
                loss = lab.loss_sum(module, batch)
                (loss / tokens * dist.get_world_size()).backward()
                total = total + loss.item()
        reported = torch.tensor(total)
        dist.all_reduce(reported)
        return (reported / tokens).item()

    def gradients_scaled_afterwards(module, parts):
        tokens, total = tokens_of(parts), step(module, parts, lambda b: 1)
        for parameter in module.parameters():
            parameter.grad *= dist.get_world_size() / tokens
        return total

    def one_sum_and_own_loss(module, parts):
        def loss_of(module, batch):
            logits = module(batch["input_ids"]).logits[:, :-1]
            labels = batch["labels"][:, 1:]
            each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            return each[labels != -100].sum()

        tokens, losses = tokens_of(parts), [loss_of(module, batch) for batch in parts]
        (sum(losses) * dist.get_world_size() / tokens).backward()
        total = sum(losses).detach()
        dist.all_reduce(total)
        return total / tokens


def functions(kind):
    return {name: function for name, function in vars(kind).items() if name[0] != "_"}


@pytest.fixture(scope="module")
def verdicts(warm_launcher, request):
    names = asked_for(request, "name")
    answers = {name: (answer,) for name, answer in {**functions(Wrong), **functions(Right)}.items()
               if name in names}
    found = judge_in_one_launch(lab.check_ragged_step, list(answers.values()), 2)
    return dict(zip(answers, found, strict=True))


@pytest.mark.parametrize("name", functions(Wrong))
def test_wrong_step(verdicts, name):
    assert_rejected(verdicts[name], WORDS[name])


@pytest.mark.parametrize("name", functions(Right))
def test_right_step(verdicts, name):
    assert verdicts[name].passed, verdicts[name]


def skips_empty_parts(module, parts):
    tokens = tokens_of(parts)
    return step(module, [batch for batch in parts if count_answers(batch)],
                lambda b: dist.get_world_size() / tokens)


def test_a_rank_that_leaves_out_an_empty_part_is_named():
    verdict = lab.check_ragged_step(skips_empty_parts)
    assert verdict.passed is False and "rank" in verdict.sentence, verdict


def test_an_int_is_no_tensor():
    def reduces_an_int(module, parts):
        dist.all_reduce(sum(count_answers(batch).item() for batch in parts))

    verdict = lab.check_ragged_step(reduces_an_int)
    assert verdict.passed is False and "got <class 'int'>" in verdict.sentence, verdict
    assert "Collectives take tensors" in verdict.hint


def test_the_worked_one_on_all_world_sizes():
    verdict = lab.check_ragged_step(Right.as_worked)
    assert verdict.passed, verdict
    assert lab.check_ragged_step(...).passed is None
