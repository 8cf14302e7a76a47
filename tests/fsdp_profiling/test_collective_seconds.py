"""What the check of exercise 5.9 must reject, and what it must accept."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected, assert_waits

import labs.fsdp_profiling as lab
from labs.fsdp_profiling import step_model

cloudpickle.register_pickle_by_value(sys.modules[__name__])
# slow: each answer is tried on recordings of real ranks
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_launcher")]
right = definitions("05_fsdp_profiling")
# 5.9 collective_seconds

def ring(nbytes, ranks, bandwidth):
    return (ranks - 1) / ranks * nbytes / bandwidth


WRONG = [
    (lambda n, r, b, a: None, "not_a_number time"),
    (lambda nbytes, ranks, bandwidth: ring(nbytes, ranks, bandwidth), "wrong_signature"),
    (lambda n, r, b, a: 0.0, "wrong_number"),
    (lambda n, r, b, a: ring(n, r, b), "leaves_out_latency"),
    (lambda n, r, b, a: ring(n, r, b) + (r - 1) * a, "latency_each_piece"),
    (lambda n, r, b, a: ring(n, r, b) - a, "takes_latency_away"),
    (lambda n, r, b, a: n / b + a, "own_piece_too"),
    (lambda n, r, b, a: n / b, "own_piece_too without"),
    (lambda n, r, b, a: a + 2 * ring(n, r, b), "all_reduce"),
    (lambda n, r, b, a: a + (r - 1) * n / b, "nbytes_of_a_piece"),
    (lambda n, r, b, a: a + n / r / b, "one_piece"),
    (lambda n, r, b, a: a + 8 * ring(n, r, b), "bandwidth_in_bits"),
    (lambda n, r, b, a: 1e3 * (a + ring(n, r, b)), "in_milliseconds"),
    (lambda n, r, b, a: max(a, ring(n, r, b)), "leaves_out_latency"),
    (lambda n, r, b, a: a * ring(n, r, b), "wrong_number"),
    (lambda n, r, b, a: a + (r - 1) / r * n * b, "wrong_number")]


@pytest.mark.parametrize("answer, expected", WRONG)
def test_wrong(answer, expected):
    assert_rejected(lab.check_collective_seconds(answer, right.layer_seconds), expected)


LAYER = [
    (lambda f, c, p: None, "not_a_number layer_seconds"), (lambda f, c: f, "wrong_signature"),
    (lambda f, c, p: c, "computing_alone"),
    (lambda f, c, p: c + 2 * f, "exchanges_the_cases"),
    (lambda f, c, p: max(c, 2 * f), "exchanges_the_cases"),
    (lambda f, c, p: max(c, f) if p else c + f, "leaves_out_reduce_scatter"),
    (lambda f, c, p: max(c, 2 * f) if p else c + f, "leaves_out_reduce_scatter"),
    (lambda f, c, p: min(c, 2 * f) if p else c + 2 * f, "shorter_of_two"),
    (lambda f, c, p: max(0, 2 * f - c) if p else 2 * f, "exposed_alone"),
    (lambda f, c, p: max(c, f) + f if p else c + 2 * f, "one_hidden"),
    (lambda f, c, p: max(c, 2 * f) if p else max(c, f) + f, "one_hidden"),
    (lambda f, c, p: c + 2 * f if p else max(c, 2 * f), "exchanges_the_cases"),
    (lambda f, c, p: 0.0, "wrong_number"), (lambda f, c, p: c * 2 * f, "wrong_number")]


@pytest.mark.parametrize("answer, expected", LAYER)
def test_wrong_layer(answer, expected):
    assert_rejected(lab.check_collective_seconds(right.collective_seconds, answer), expected)


@pytest.mark.parametrize("answer", [
    right.collective_seconds,
    lambda n, r, b, a: (n - n / r) / b + a,
    lambda n, r, b, a: torch.tensor(right.collective_seconds(n, r, b, a)),
    lambda n, r, b, a: np.float32(a) + np.float32((r - 1) * (n / r) / b)])
def test_right(answer):
    verdict = lab.check_collective_seconds(answer, right.layer_seconds)
    assert verdict.passed is True, verdict


@pytest.mark.parametrize("answer", [
    lambda f, c, p: c + max(0, 2 * f - (c if p else 0)),
    lambda f, c, p: np.float32(max(c, f + f)) if p else torch.tensor(c + f + f),
    lambda f, c, p: sorted([c, 2 * f])[-1] if p else sum([c, f, f])])
def test_right_layer(answer):
    verdict = lab.check_collective_seconds(right.collective_seconds, answer)
    assert verdict.passed is True, verdict


def test_waits():
    assert_waits(lab.check_collective_seconds, "5.9", functions=2)


@pytest.mark.parametrize("order", ["prefetch", "no prefetch"])
def test_a_layer_is_what_the_model_of_the_step_adds_for_one(order):
    """In the middle of the model, on each link."""
    def backward(step, flight):
        return step_model._backward_end(step, flight, order, 0.0)

    step = step_model.llama_7b(4096)
    shorter = step_model.ModelledStep(step.work[:-1])
    for link in step_model.link_speeds(8).values():
        def flight(nbytes, link=link):
            return right.collective_seconds(nbytes, 8, link.bandwidth, link.latency)

        layer = step.work[-1]
        assert backward(step, flight) - backward(shorter, flight) == pytest.approx(
            right.layer_seconds(flight(layer.bytes), layer.backward, order == "prefetch"))
