"""What the check of exercise 5.9 must reject, and what it must accept."""

import sys

import cloudpickle
import numpy as np
import pytest
import torch
from _build.definitions import definitions
from answers import assert_rejected

import labs.fsdp_profiling as lab

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
    assert_rejected(lab.check_collective_seconds(answer), expected)


@pytest.mark.parametrize("answer", [
    right.collective_seconds,
    lambda n, r, b, a: (n - n / r) / b + a,
    lambda n, r, b, a: torch.tensor(right.collective_seconds(n, r, b, a)),
    lambda n, r, b, a: np.float32(a) + np.float32((r - 1) * (n / r) / b)])
def test_right(answer):
    verdict = lab.check_collective_seconds(answer)
    assert verdict.passed is True, verdict
