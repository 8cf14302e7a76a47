"""What notebook 09 draws of balance: trained routers, micro-batches, dropped copies, waiting."""

from statistics import mean

import pytest
import torch
from _build.definitions import definitions

import labs.mixture_of_experts as lab
from labs.checks.guesses import guess
from labs.checks.verdicts import Verdict
from labs.mixture_of_experts import trained_routers
from labs.mixture_of_experts.slowest_rank import PACE
from labs.mixture_of_experts.trained_routers import BIAS, LOSS, NONE

solution = definitions("09_mixture_of_experts")
BALANCE = solution.auxiliary_loss, solution.route_with_bias, solution.new_bias


@pytest.fixture(scope="module")
def balance():
    return lab.show_balance(*BALANCE)


def test_without_balance_training_makes_counts_more_uneven(balance):
    runs = balance.data
    ends = {name: mean(run.largest[-20:]) for name, run in runs.items()}
    assert ends[NONE] > 1.3 * runs[NONE].largest[0]
    for name in (LOSS, BIAS):
        assert ends[name] < runs[name].largest[0] and ends[name] < 0.7 * ends[NONE]
        # the picture says that the losses are alike, and that the bias acts first
        assert mean(runs[name].losses[-20:]) == pytest.approx(mean(runs[NONE].losses[-20:]),
                                                              rel=0.01)
    assert max(runs[BIAS].largest) < 0.75 * max(runs[LOSS].largest)
    assert "loss 5." in repr(balance) and balance.metrics()


def test_training_is_the_same_each_time(balance):
    """The student's functions and ours, in two launches."""
    ours = trained_routers.reference_runs()
    for name, run in balance.data.items():
        assert run.largest == pytest.approx(ours[name].largest)
        assert run.losses == pytest.approx(ours[name].losses)


def test_a_function_that_is_wrong_does_not_balance():
    """With the sign flipped the bias makes it worse: the picture is the student's own."""
    auxiliary_loss, route_with_bias, new_bias = BALANCE
    flipped = lab.show_balance(auxiliary_loss, route_with_bias,
                               lambda bias, counts, speed: new_bias(bias, counts, -speed))
    assert mean(flipped.data[BIAS].largest[-20:]) > 2.5


def test_micro_batches_look_less_balanced_than_their_batch():
    picture = lab.show_micro_batches(solution.auxiliary_loss)
    (parts,), (summed,), (whole,) = list(picture.data.values())[1:]
    assert parts == pytest.approx(mean(picture.data["8 micro-batches"]))
    assert parts > whole + 0.01
    assert summed == pytest.approx(whole, abs=1e-5)  # exact: the loss is linear in P


def test_a_balanced_router_drops_few_copies():
    shares = lab.show_dropped(solution.within_capacity).data
    untrained, alone, bias = shares.values()
    assert alone[1.0] > 0.5 > untrained[1.0] > bias[1.0] and bias[1.0] < 0.15
    assert all(found[4.0] == 0 and found[0.5] >= 0.49 for found in shares.values())


def test_the_slowest_rank():
    """Exact counts; the seconds are slept, and longer on a busy machine, but never shorter."""
    guess("9.6b", "times slower", 2)
    picture = lab.show_slowest_rank()
    untrained, equal = picture.data[:4], picture.data[4:]
    copies = [rank.copies for rank in untrained]
    assert [rank.copies for rank in equal] == [sum(copies) // 4] * 4
    assert max(copies) > 1.15 * sum(copies) / 4
    for rank in picture.data:
        assert rank.computing >= PACE * rank.copies
    for rank in untrained:
        assert rank.total >= 0.99 * PACE * max(copies) - 0.01
    assert "You guessed 2" in repr(picture) and "µs for a copy" in repr(picture)


@pytest.mark.parametrize("show, number, answers", [
    (lab.show_balance, "9.6", 3), (lab.show_micro_batches, "9.6", 1), (lab.show_dropped, "9.7", 1)])
def test_pictures_wait(show, number, answers):
    def unfilled(*_):
        raise NotImplementedError(f"Exercise {number}")

    verdict = show(*[unfilled] * answers)
    assert isinstance(verdict, Verdict) and verdict.passed is None


def test_a_layer_routes_as_the_reference_does():
    """Without a bias, the layer that is trained computes what the loop over experts computes."""
    from labs.training.mixtures import ExpertLayer

    torch.manual_seed(0)
    layer = ExpertLayer(experts=6, hidden=16, ffn=8, k=2)
    x = torch.randn(3, 5, 16)
    routed = trained_routers.BalancedLayer(layer, solution.route_with_bias)
    torch.testing.assert_close(routed(x), layer(x))
