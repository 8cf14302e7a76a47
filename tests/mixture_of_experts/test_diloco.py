"""Trainings that exercise 9.13 must reject, and right ones written differently."""

import pytest
import torch
import torch.distributed as dist
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

from labs.mixture_of_experts.diloco import SHOWN_EVERY, check_diloco, show_diloco
from labs.pictures.tables import Table
from labs.workers.hosts import hosts_unavailable

pytestmark = pytest.mark.usefixtures("warm_launcher")
STUCK = "collectives_differ|deadlock|no_progress|rank_died"


def train(model, batches, every, inner_lr, outer_lr, momentum, nesterov=True, sign=1, mean=True,
          new_inner=False, new_outer=False, average=True, order=lambda items: items, back=True,
          reduce_gradients=False):
    parameters = [p for p in model.parameters() if p.requires_grad]
    shared = [p.detach().clone() for p in parameters]

    def make():
        return (torch.optim.AdamW(parameters, lr=inner_lr),
                torch.optim.SGD(shared, lr=outer_lr, momentum=momentum, nesterov=nesterov))

    inner, outer = make()
    for step, batch in enumerate(batches, 1):
        model(**batch).loss.backward()
        for p in parameters if reduce_gradients else ():
            if p.grad is not None:
                dist.all_reduce(p.grad.clone())
        inner.step()
        inner.zero_grad()
        if step % every:
            continue
        with torch.no_grad():
            for p, s in order(list(zip(parameters, shared, strict=True))):
                s.grad = sign * (s - p)
                if average:
                    dist.all_reduce(s.grad)
                    s.grad /= dist.get_world_size() if mean else 1
            outer.step()
            for p, s in zip(parameters, shared, strict=True):
                if back:
                    p.copy_(s)
        inner, outer = make()[0] if new_inner else inner, make()[1] if new_outer else outer


def variant(**changes):
    return lambda *args, **settings: train(*args, **settings, **changes)


def reversed_on_rank_1(items):
    """torchft, pull request 206: fragments in another order on each rank."""
    return items[::-1] if dist.get_rank() == 1 else items


def averages_parameters(model, batches, every, inner_lr, outer_lr, momentum):
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=inner_lr)
    for step, batch in enumerate(batches, 1):
        model(**batch).loss.backward()
        inner.step()
        inner.zero_grad()
        for p in model.parameters() if step % every == 0 else ():
            if p.requires_grad:
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()


def own_formula(model, batches, every, inner_lr, outer_lr, momentum):
    """One flat tensor, and Nesterov's step by hand."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    inner = torch.optim.AdamW(parameters, lr=inner_lr)
    shared = torch.cat([p.detach().flatten() for p in parameters])
    velocity = torch.zeros_like(shared)
    for step, batch in enumerate(batches, 1):
        model(**batch).loss.backward()
        inner.step()
        inner.zero_grad(set_to_none=True)
        if step % every == 0:
            difference = shared - torch.cat([p.detach().flatten() for p in parameters])
            dist.all_reduce(difference)
            difference /= dist.get_world_size()
            velocity = momentum * velocity + difference
            shared = shared - outer_lr * (difference + momentum * velocity)
            for p, part in zip(parameters, shared.split([p.numel() for p in parameters]),
                               strict=True):
                p.data.copy_(part.view_as(p))


WRONG = {
    "nothing": (lambda *args, **settings: None, "not_trained"),
    "parameters averaged": (averages_parameters, "parameters_averaged"),
    "nothing averaged": (variant(average=False), "not_averaged"),
    "plain momentum": (variant(nesterov=False), "no_nesterov"),
    "opposite sign": (variant(sign=-1), "wrong_sign"),
    "sum": (variant(mean=False), "sum_not_mean"),
    "new AdamW each round": (variant(new_inner=True), "inner_state_lost"),
    "new outer optimizer each round": (variant(new_outer=True), "outer_state_lost"),
    "ranks go on from their own": (variant(back=False), "wrong_parameters"),
    "gradients reduced too": (variant(reduce_gradients=True), "too_much_sent"),
    "another order on rank 1": (variant(order=reversed_on_rank_1), STUCK),
}
RIGHT = {"one parameter at a time": train, "flat, by hand": own_formula}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_rejected(name):
    answer, expected = WRONG[name]
    assert_rejected(check_diloco(answer), expected)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_passes(name):
    verdict = check_diloco(RIGHT[name])
    assert verdict.passed, str(verdict)


def test_the_solution_passes_and_sends_little_over_the_link():
    answer = definitions("09_mixture_of_experts").train_diloco
    verdict = check_diloco(answer)
    assert verdict.passed, str(verdict)
    if hosts_unavailable():
        pytest.skip("this machine cannot have hosts")
    table = show_diloco(answer)
    assert isinstance(table, Table), table
    plain, diloco = (int(row[1].replace(",", "")) for row in table.rows)
    assert plain / diloco > SHOWN_EVERY / 3  # TCP's headers weigh more in few bytes


def test_it_waits_for_an_untouched_gap():
    assert_waits(check_diloco, "9.13")
    assert_waits(show_diloco, "9.13")
