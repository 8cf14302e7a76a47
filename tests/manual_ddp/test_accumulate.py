"""What the check of exercise 2.9 must reject, and what it must accept."""

import contextlib
import sys

import cloudpickle
import pytest
import torch
from ddp_answers import (
    Answers,
    N,
    accepted,
    rejected,
    right,
    trainable,
)

import labs.manual_ddp as lab

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(sys.modules["ddp_answers"])
# slow: the first case of a group tries all answers of the group, in one launch
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
# 2.9 accumulate


class Accumulate:
    def nothing(module, parts):
        pass

    def only_the_last(module, parts):
        module(**parts[-1]).loss.backward()

    def unweighted_sum(module, parts):
        for number, part in enumerate(parts, 1):
            with contextlib.nullcontext() if number == len(parts) else module.no_sync():
                module(**part).loss.backward()

    def plain_mean(module, parts):
        for number, part in enumerate(parts, 1):
            with contextlib.nullcontext() if number == len(parts) else module.no_sync():
                (module(**part).loss / len(parts)).backward()

    def synchronized_each_time(module, parts):
        total = sum(len(part["x"]) for part in parts)
        for part in parts:
            (module(**part).loss * len(part["x"]) / total).backward()

    def never_synchronized(module, parts):
        total = sum(len(part["x"]) for part in parts)
        for part in parts:
            with module.no_sync():
                (module(**part).loss * len(part["x"]) / total).backward()

    def all_at_once(module, parts):
        total = sum(len(part["x"]) for part in parts)
        sum(module(**part).loss * len(part["x"]) / total for part in parts).backward()

    def cleared_between(module, parts):
        total = sum(len(part["x"]) for part in parts)
        for number, part in enumerate(parts, 1):
            module.zero_grad()
            with contextlib.nullcontext() if number == len(parts) else module.no_sync():
                (module(**part).loss * len(part["x"]) / total).backward()

    def first_synchronized(module, parts):
        total = sum(len(part["x"]) for part in parts)
        for number, part in enumerate(parts):
            with module.no_sync() if number else contextlib.nullcontext():
                (module(**part).loss * len(part["x"]) / total).backward()

    def forwards_first(module, parts):
        total = sum(len(part["x"]) for part in parts)
        losses = [module(**part).loss * len(part["x"]) / total for part in parts]
        with module.no_sync():
            for loss in losses[:-1]:
                loss.backward()
        losses[-1].backward()

    def empties_the_list(module, parts):
        total = sum(len(part["x"]) for part in parts)
        while parts:
            part = parts.pop(0)
            with module.no_sync() if parts else contextlib.nullcontext():
                (module(**part).loss * len(part["x"]) / total).backward()

    def three_parts(module, parts):
        with module.no_sync():
            for part in parts[:2]:
                (module(**part).loss * len(part["x"]) / 6).backward()
        for part in parts[2:]:
            (module(**part).loss * len(part["x"]) / 6).backward()

    def of_all_ranks(module, parts):
        total = sum(len(part["x"]) for part in parts) * N()
        for number, part in enumerate(parts, 1):
            with contextlib.nullcontext() if number == len(parts) else module.no_sync():
                (module(**part).loss * len(part["x"]) / total).backward()

    def one_large_batch(module, parts):
        batch = {name: torch.cat([part[name] for part in parts]) for name in ("x", "y")}
        module(**batch).loss.backward()

    def detached_weights_of_the_last(module, parts):
        for number, part in enumerate(parts, 1):
            with contextlib.nullcontext() if number == len(parts) else module.no_sync():
                (module(**part).loss * len(parts[-1]["x"]) / 6).backward()

    def steps_too(module, parts):
        right.accumulate(module, parts)
        with torch.no_grad():
            for parameter in trainable(module):
                parameter -= parameter.grad
                parameter.grad = None


WRONG = [
    (Accumulate.nothing, "zero_gradient"),
    (Accumulate.only_the_last, "only_last_micro_batch"),
    (Accumulate.unweighted_sum, "sum_of_micro_batches"),
    (Accumulate.plain_mean, "unweighted_mean"),
    (Accumulate.synchronized_each_time, "wrong_traffic"),
    (Accumulate.never_synchronized, "gradient_of_one_rank"),
    (Accumulate.all_at_once, "one_backward_for_all"),
    (Accumulate.cleared_between, "only_last_micro_batch"),
    (Accumulate.first_synchronized, "last_backward_not_reduced"),
    (Accumulate.forwards_first, "forwards_before_backwards"),
    (Accumulate.empties_the_list, "changes_input"),
    (Accumulate.three_parts, "gradient_of_one_rank"),
    (Accumulate.of_all_ranks, "mean_twice"),
    (Accumulate.one_large_batch, "one_backward_for_all"),
    (Accumulate.detached_weights_of_the_last, "unweighted_mean"),
    (Accumulate.steps_too, "zero_gradient")]
WRONG_ANSWERS = Answers([(lab.check_accumulate, (answer, right.accumulating), words)
                         for answer, words in WRONG])


@pytest.mark.parametrize("number", **WRONG_ANSWERS.parameters)
def test_wrong(number, request):
    rejected(WRONG_ANSWERS.verdict(number, request), WRONG_ANSWERS.rows[number][2])


def accumulate_by_list(module, parts):
    sizes = torch.tensor([float(len(part["x"])) for part in parts])
    *first, last = zip(parts, (sizes / sizes.sum()).tolist(), strict=True)
    with module.no_sync():
        for part, weight in first:
            (weight * module(**part).loss).backward()
    (last[1] * module(**last[0]).loss).backward()


def accumulate_by_stack(module, parts):
    total = sum(part["y"].shape[0] for part in parts)
    with contextlib.ExitStack() as stack:
        stack.enter_context(module.no_sync())
        for part in parts[:-1]:
            module(**part).loss.mul(part["y"].shape[0] / total).backward()
    loss = module(**parts[-1]).loss * parts[-1]["y"].shape[0]
    (loss / total).backward()


def scaled_afterwards(module, parts):
    """Weights that do not add up to 1 are put right in the gradient."""
    total = sum(len(part["x"]) for part in parts)
    for number, part in enumerate(parts, 1):
        with contextlib.nullcontext() if number == len(parts) else module.no_sync():
            (module(**part).loss * len(part["x"])).backward()
    for parameter in trainable(module):
        if parameter.grad is not None:
            parameter.grad /= total


RIGHT_ANSWERS = Answers([
    *((lab.check_accumulate, (answer, right.accumulating)) for answer in (
        right.accumulate, accumulate_by_list, accumulate_by_stack, scaled_afterwards))],
    ranks=(3, 2, 4))


@pytest.mark.parametrize("number", **RIGHT_ANSWERS.parameters)
def test_right(number, request):
    accepted(RIGHT_ANSWERS.verdict(number, request))
